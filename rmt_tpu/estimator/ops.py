"""The ops in cost reports, with test calls of each op.

Test calls have the sizes of the papers' models. The minimum cost of each call is computed, too.

To add an op, write a function here that returns its cases, and add the op's name to `OPS`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import shapes
from pallas_kernels.causal_attention.interface import Rows
from pallas_kernels.shapes import TOKENS, Depth, Heads, KeyVector, array
from rmt_tpu.estimator.programs import lower

Direction = Literal["forward", "training"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "training")
PORTABLE = "xla"
# Every case but those of experts has 8192 tokens in bfloat16, divided into 16 sequences unless the
# case specifies another number.
_TOKENS = math.prod(TOKENS)
_ITEM = 2


@dataclasses.dataclass(frozen=True)
class MinimumWork:
    """The FLOPs of a call, and the HBM traffic in bytes if each array is moved once."""

    bytes: int
    flops: int

    def __add__(self, other: "MinimumWork") -> "MinimumWork":
        return MinimumWork(self.bytes + other.bytes, self.flops + other.flops)


@dataclasses.dataclass(frozen=True)
class OpCase:
    """A call of an op at one size.

    Attributes:
      name: the sizes, as text.
      function: a function that calls the op, as `function(implementation, *arguments)`.
      arguments: shapes and dtypes of the arguments; floating-point arguments are differentiated.
      forward: the work of the forward pass.
      backward: the work of the backward pass.
      carried: whether the first result replaces the first argument, like the carry of a scan over
        layers. If so, the first argument and its cotangent are donated.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    forward: MinimumWork
    backward: MinimumWork
    carried: bool = False

    def work(self, direction: Direction) -> MinimumWork:
        """Return the minimum work of the forward pass, or of both passes for "training"."""
        return self.forward if direction == "forward" else self.forward + self.backward

    def program(
        self, direction: Direction, implementation: str | None
    ) -> tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...], tuple[int, ...]]:
        """Return the function to compile, the shapes of its arguments, and the donated ones.

        The donated arguments are given by their indices. For "training", the function also takes
        the cotangents of the results, and it returns the results and the gradients.
        """
        arguments = self.arguments
        floating = [i for i, a in enumerate(arguments) if jnp.issubdtype(a.dtype, jnp.floating)]

        def forward(*args):
            return self.function(implementation, *args)

        if direction == "forward":
            return forward, arguments, (0,) if self.carried else ()

        results, structure = jax.tree.flatten(jax.eval_shape(forward, *arguments))

        def training(*args):
            args, cotangents = args[: len(arguments)], args[len(arguments) :]

            def forward_of_floats(*floats):
                operands = dict(zip(floating, floats, strict=True))
                return forward(*(operands.get(i, arg) for i, arg in enumerate(args)))

            results, pullback = jax.vjp(forward_of_floats, *(args[i] for i in floating))
            return results, pullback(jax.tree.unflatten(structure, cotangents))

        donated = (0, len(arguments)) if self.carried else ()
        return training, (*arguments, *results), donated


@dataclasses.dataclass(frozen=True)
class Op:
    """An op, with its test calls and, for each platform, the name of its kernel implementation."""

    cases: Callable[[], list[OpCase]]
    kernels: dict[str, str]


def cases(op: str) -> dict[str, OpCase]:
    """Return the test calls (cases) of an op, keyed by name."""
    return {case.name: case for case in OPS[op].cases()}


def lower_case(
    device: jax.Device, op: str, case: str, direction: Direction, implementation: str | None
) -> jax.stages.Lowered:
    """Lower (for compilation) a test call of an op for a device that need not be present."""
    function, arguments, donated = cases(op)[case].program(direction, implementation)
    return lower(function, arguments, device, donate=donated)


def _key_vector() -> list[OpCase]:
    """Return test cases for a write to a matrix residual followed by the next sublayer's reads.

    One sublayer writes R vectors to the residual, and the next sublayer reads P vectors. For
    attention, P = 3R; for a feed-forward layer, P = R. The cases cover both kinds of sublayer, and
    small and large residuals.
    """
    rmt = shapes.RMT_305M
    sizes = [rmt, rmt.before_feed_forward, shapes.RMT_134M, shapes.RMT_LARGE]
    return [_store_norm_retrieve(size) for size in sizes]


def _store_norm_retrieve(size: KeyVector) -> OpCase:
    K, V, R, P = size

    def function(implementation, residual, store_keys, data, gain, read_keys):
        return pallas_kernels.store_norm_retrieve(
            residual, store_keys, data, gain, read_keys, implementation=implementation
        )

    keys = R * K + K * V + P * K
    forward = _TOKENS * _ITEM * V * (2 * K + R + P) + 4 * keys
    # The backward pass reads the stored residual, the written data vectors, and the cotangents of
    # the residual and of the vectors that were read. It writes the cotangents of the residual and
    # of the data vectors.
    backward = _TOKENS * _ITEM * V * (3 * K + 2 * R + P) + 2 * 4 * keys
    flops = 2 * _TOKENS * (R + P) * K * V
    return OpCase(
        f"K={K} V={V} R={R} P={P}",
        function,
        tuple(size.site(TOKENS)),
        MinimumWork(forward, flops),
        MinimumWork(backward, 2 * flops),
        carried=True,
    )


def _attention() -> list[OpCase]:
    """Return test cases for attention, with sizes of the RMT paper's Transformers and of Gemma 2.

    Gemma 2 has cases with and without its soft cap. Its windows of 4096 tokens have an effect only
    in the case with the longer sequence.
    """
    gemma = functools.partial(_causal_attention, shapes.GEMMA2_2B, kv_heads=4, rows="head_major")
    return [
        _causal_attention(shapes.GPT2_405M),
        _causal_attention(shapes.GPT2_160M),
        *(gemma((4, 2048), cap=cap) for cap in (None, 50.0)),
        *(gemma((1, 8192), cap=cap, window=4096) for cap in (None, 50.0)),
    ]


def _causal_attention(
    sizes: Heads,
    tokens: tuple[int, int] = TOKENS,
    *,
    kv_heads: int | None = None,
    rows: Rows = "size_major",
    window: int | None = None,
    cap: float | None = None,
) -> OpCase:
    heads, size = sizes
    G, length = kv_heads or heads, tokens[1]

    def function(implementation, qkv, segment_ids):
        return pallas_kernels.causal_attention(
            qkv,
            scale=size**-0.5,
            segment_ids=segment_ids,
            kv_heads=G,
            rows=rows,
            window=window,
            cap=cap,
            implementation=implementation,
        )

    per_head = _TOKENS * size * _ITEM
    log_sums = 4 * _TOKENS * heads
    # Query i attends to min(i, window) keys. Without a window, this is half of the length on
    # average.
    shown = min(window or length, length)
    seen = shown - shown**2 / (2 * length)
    # The FLOPs of one product between queries and the keys that they attend to.
    product = int(2 * _TOKENS * heads * size * seen)
    named = {"H": heads} | ({"G": G} if G != heads else {}) | {"D": size}
    named |= {} if tokens == TOKENS else {"N": length}
    named |= {} if window is None else {"window": window}
    named |= {} if cap is None else {"cap": cap}
    return OpCase(
        " ".join(f"{name}={value:g}" for name, value in named.items()),
        function,
        (array("bfloat16", *tokens, heads + 2 * G, size), array("int32", *tokens)),
        MinimumWork((2 * heads + 2 * G) * per_head + log_sums, 2 * product),
        # The backward pass reads qkv, the result and its cotangent, and computes the attention
        # probabilities again.
        MinimumWork((4 * heads + 4 * G) * per_head + log_sums, 5 * product),
    )


def _depth() -> list[OpCase]:
    """Return test cases for depth attention.

    A site is the input of a sublayer. A source is a block sum, or the output of a sublayer. In the
    first cases, one site attends to all sources at once. The other cases are the two phases of the
    Attention Residuals paper. In phase 1, several sites attend to the sources; phase 2 merges the
    result with a newer source. The cases include the sizes of Table 1 of the paper.
    """
    partials = [*shapes.ONE_SITE, shapes.ALL_SITES._replace(D=1024), shapes.ALL_SITES]
    merges = [_depth_merge(Depth(1, 1, D)) for D in (1024, 2048)]
    return [*map(_depth_partial, partials), *merges, *TABLE_1]


def _depth_partial(size: Depth, *, prior: bool = False) -> OpCase:
    S, N, D = size

    def function(implementation, queries, sources, *prior):
        return pallas_kernels.depth_attention_partial(
            queries, sources, prior=prior or None, implementation=implementation
        )

    row, sums = _TOKENS * D * _ITEM, 4 * S * _TOKENS
    prior_bytes = S * row + sums if prior else 0
    parameters = 4 * S * D
    flops = 4 * S * N * _TOKENS * D
    operands = size.partial(TOKENS, prior=prior)
    return OpCase(
        f"S={S} N={N} D={D}{' prior' if prior else ''}",
        function,
        (operands.queries, operands.sources, *(operands.prior or ())),
        MinimumWork((N + S) * row + sums + parameters + prior_bytes, flops),
        # The backward pass reads the sources and the cotangent of the result, and writes the
        # cotangent of the sources. If a prior result was merged, it also reads the prior and the
        # forward result.
        MinimumWork((2 * N + S) * row + 2 * sums + 2 * parameters + 2 * prior_bytes, 2 * flops),
    )


def _depth_merge(size: Depth) -> OpCase:
    D, operands = size.D, size.merge(TOKENS)

    def function(implementation, current, mixed, log_sums, query, norm_gain):
        mixed, current, z = pallas_kernels.depth_attention_merge(
            mixed[None], log_sums, 0, current, query, norm_gain, implementation=implementation
        )
        return current, z

    row, sums, parameters = _TOKENS * D * _ITEM, 4 * _TOKENS, 2 * 4 * D
    return OpCase(
        f"merge D={D}",
        function,
        (operands.current, operands.current, operands.log_sums, operands.query, operands.norm_gain),
        # The op returns its argument `current` unchanged, so it does not move these bytes.
        MinimumWork(3 * row + sums + parameters, 15 * _TOKENS * D),
        MinimumWork(6 * row + 2 * sums + 2 * parameters, 40 * _TOKENS * D),
        carried=True,
    )


def _depth_sums() -> list[OpCase]:
    """Return test cases for weighted sums over depth: those of MUDD, and one of DenseFormer."""
    return [_sums(Depth(4, 25, 1024)), _sums(Depth(4, 13, 768)), _sums(Depth(1, 25, 1024))]


def _sums(size: Depth) -> OpCase:
    S, N, D = size

    def function(implementation, weights, sources):
        return pallas_kernels.depth_sums(weights, sources, implementation=implementation)[1]

    weights = array("float32", S, N, *TOKENS)
    row, of_weights, flops = _TOKENS * D * _ITEM, 4 * S * N * _TOKENS, 2 * S * N * _TOKENS * D
    return OpCase(
        f"S={S} N={N} D={D}",
        function,
        (weights, array("bfloat16", N, *TOKENS, D)),
        MinimumWork((N + S) * row + of_weights, flops),
        # The backward pass reads weights, sources and the cotangents of the sums, and writes the
        # cotangents of weights and sources.
        MinimumWork((2 * N + S) * row + 2 * of_weights, 2 * flops),
    )


def _delta() -> list[OpCase]:
    """Return a delta-attention case: one long sequence with the head sizes of Kimi Linear."""
    heads, size = shapes.KIMI_48B

    def function(implementation, *operands):
        return pallas_kernels.delta_attention(
            *operands, scale=size**-0.5, implementation=implementation
        )

    rows = 1, _TOKENS, heads
    operand = array("bfloat16", *rows, size)
    per_array, beta = _TOKENS * heads * size * _ITEM, 4 * _TOKENS * heads
    decays, state = 2 * per_array, 4 * heads * size**2
    # The FLOPs of one matrix product of each token with a chunk of 128 tokens. A causal mask
    # halves this number.
    product = 2 * _TOKENS * heads * size**2
    return [
        OpCase(
            f"H={heads} D={size}",
            function,
            (*[operand] * 3, array("float32", *rows, size), array("float32", *rows)),
            # In five products, tokens of the same chunk interact, so the causal mask halves their
            # FLOPs: keys with keys, queries with keys, the inverse, the inverse with values, and
            # queries with values.
            MinimumWork(4 * per_array + decays + beta + state, int((3 + 5 / 2) * product)),
            MinimumWork(7 * per_array + 2 * (decays + beta) + state, int((10 + 18 / 2) * product)),
        )
    ]


def _grouped() -> list[OpCase]:
    """Return the products of experts: those of Kimi Linear's 48B on a device, and of Mixtral 8x7B.

    A device of a mesh with `expert=8` has 32 of Kimi Linear's experts. The numbers of rows are
    multiples of every tile.
    """
    kimi, mixtral = (131072, 32), (8192, 8)
    sizes = ((*kimi, 2304, 2048), (*kimi, 1024, 2304), (*mixtral, 4096, 14336))
    return [_grouped_matmul(*size) for size in sizes]


def _grouped_matmul(M: int, G: int, K: int, N: int) -> OpCase:
    def function(implementation, rows, matrices, sizes):
        options = {"alignment": pallas_kernels.row_alignment(M, G)}
        return pallas_kernels.grouped_matmul(
            rows, matrices, sizes, implementation=implementation, **options
        )

    of_rows, of_products, of_matrices = M * K * _ITEM, M * N * _ITEM, G * K * N * _ITEM
    flops = 2 * M * K * N
    return OpCase(
        f"M={M} G={G} K={K} N={N}",
        function,
        (array("bfloat16", M, K), array("bfloat16", G, K, N), array("int32", G)),
        MinimumWork(of_rows + of_products + of_matrices, flops),
        # Each of the two gradients reads the cotangents of the products.
        MinimumWork(2 * (of_rows + of_products + of_matrices), 2 * flops),
    )


def elements_per_sublayer(moved: dict[str, int]) -> dict[str, float]:
    """Return the memory traffic of each schedule in Table 1 of the Attention Residuals paper.

    The traffic is per sublayer and token, in units of D elements, with D the width of the model.

    Args:
      moved: maps the name of each case in `TABLE_1`, and `merge D=1024`, to the bytes that its
        forward pass moves.
    """
    row, sites = _TOKENS * 1024 * _ITEM, 16
    block, earlier, within = (moved[case.name] / row for case in TABLE_1)
    return {
        "Block, two-phase": block / sites + moved["merge D=1024"] / row,
        "Full, two-phase": earlier / sites + within,
    }


# Table 1 of the Attention Residuals paper has 128 sublayers in 8 blocks of 16. In Block AttnRes,
# phase 1 reads the sums of the 8 blocks. In Full AttnRes, phase 1 reads all sublayers before a
# block, which are 56 on average. In phase 2, each sublayer reads the sublayers before it in its own
# block, which are 8 on average. It merges them with the result of phase 1 (the prior).
TABLE_1 = (
    _depth_partial(Depth(16, 8, 1024)),
    _depth_partial(Depth(16, 56, 1024)),
    _depth_partial(Depth(1, 8, 1024), prior=True),
)

OPS = {
    "key_vector": Op(_key_vector, {"tpu": "mosaic_tpu", "gpu": "triton"}),
    "attention": Op(_attention, {"tpu": "mosaic_tpu", "gpu": "cudnn"}),
    "depth_attention": Op(_depth, {"tpu": "mosaic_tpu", "gpu": "triton"}),
    "depth_sums": Op(_depth_sums, {"tpu": "mosaic_tpu"}),
    "delta_attention": Op(_delta, {"tpu": "mosaic_tpu"}),
    "grouped_matmul": Op(_grouped, {"tpu": "mosaic_tpu", "gpu": "triton"}),
}
