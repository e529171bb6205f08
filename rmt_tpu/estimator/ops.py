"""The ops of reports: their calls in the papers' models, and the least cost of each.

A new op is a function here that returns its cases, and its name in `OPS`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import shapes
from pallas_kernels.shapes import TOKENS, Depth, Heads, KeyVector, array
from rmt_tpu.estimator.programs import lower

Direction = Literal["forward", "training"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "training")
PORTABLE = "xla"
# Every case has 8192 tokens in bfloat16, in 16 sequences unless it says otherwise.
_TOKENS = math.prod(TOKENS)
_ITEM = 2


@dataclasses.dataclass(frozen=True)
class Work:
    """The least bytes between HBM and chip, with each array once, and the FLOPs."""

    bytes: int
    flops: int

    def __add__(self, other: "Work") -> "Work":
        return Work(self.bytes + other.bytes, self.flops + other.flops)


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of an op.

    Attributes:
      name: its sizes.
      function: the op as `function(implementation, *arguments)`.
      arguments: shapes and dtypes; arguments of floating dtypes are differentiated.
      forward: the work of the op.
      backward: the additional work of its gradient.
      carried: whether the first argument is a state that the first result replaces, as in a scan
        over layers; it and its cotangent are then donated.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    forward: Work
    backward: Work
    carried: bool = False

    def work(self, direction: Direction) -> Work:
        """Return the work of the forward pass, or of both passes ("training")."""
        return self.forward if direction == "forward" else self.forward + self.backward

    def program(
        self, direction: Direction, implementation: str | None
    ) -> tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...], tuple[int, ...]]:
        """Return a function to compile, the shapes of its arguments, and which of them are donated.

        A "training" function also takes the cotangents of the results, and returns results and
        gradients.
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

            def of_floats(*floats):
                given = dict(zip(floating, floats, strict=True))
                return forward(*(given.get(i, arg) for i, arg in enumerate(args)))

            results, pullback = jax.vjp(of_floats, *(args[i] for i in floating))
            return results, pullback(jax.tree.unflatten(structure, cotangents))

        donated = (0, len(arguments)) if self.carried else ()
        return training, (*arguments, *results), donated


@dataclasses.dataclass(frozen=True)
class Op:
    """An op: its cases, and by platform the implementation that is a kernel."""

    cases: Callable[[], list[Case]]
    kernels: dict[str, str]


def cases(op: str) -> dict[str, Case]:
    """Return the cases of an op, by name."""
    return {case.name: case for case in OPS[op].cases()}


def lower_case(
    device: jax.Device, op: str, case: str, direction: Direction, implementation: str | None
) -> jax.stages.Lowered:
    """Lower a case for a device that need not exist."""
    function, arguments, donated = cases(op)[case].program(direction, implementation)
    return lower(function, arguments, device, donate=donated)


def _key_vector() -> list[Case]:
    """Return sites before attention (P = 3R) and before feed-forward, small and large residuals."""
    rmt = shapes.RMT_305M
    sizes = [rmt, rmt.before_feed_forward, shapes.RMT_134M, shapes.RMT_LARGE]
    return [_store_norm_retrieve(size) for size in sizes]


def _store_norm_retrieve(size: KeyVector) -> Case:
    K, V, R, P = size

    def function(implementation, residual, store_keys, data, gain, read_keys):
        return pallas_kernels.store_norm_retrieve(
            residual, store_keys, data, gain, read_keys, implementation=implementation
        )

    keys = R * K + K * V + P * K
    forward = _TOKENS * _ITEM * V * (2 * K + R + P) + 4 * keys
    # It reads the stored residual, its cotangent, that of z, and the data; it writes two
    # cotangents.
    backward = _TOKENS * _ITEM * V * (3 * K + 2 * R + P) + 2 * 4 * keys
    flops = 2 * _TOKENS * (R + P) * K * V
    return Case(
        f"K={K} V={V} R={R} P={P}",
        function,
        tuple(size.site(TOKENS)),
        Work(forward, flops),
        Work(backward, 2 * flops),
        carried=True,
    )


def _attention() -> list[Case]:
    return [_causal_attention(shapes.GPT2_405M), _causal_attention(shapes.GPT2_160M)]


def _causal_attention(sizes: Heads) -> Case:
    heads, size = sizes

    def function(implementation, qkv, segment_ids):
        return pallas_kernels.causal_attention(
            qkv, scale=size**-0.5, segment_ids=segment_ids, implementation=implementation
        )

    per_array = _TOKENS * heads * size * _ITEM
    log_sums = 4 * _TOKENS * heads
    # A causal mask leaves half of the products of queries, keys and values.
    product = _TOKENS * heads * TOKENS[1] * size
    return Case(
        f"H={heads} D={size}",
        function,
        (array("bfloat16", *TOKENS, 3 * heads, size), array("int32", *TOKENS)),
        Work(4 * per_array + log_sums, 2 * product),
        # It reads qkv, the result and its cotangent; the probabilities are computed again.
        Work(8 * per_array + log_sums, 5 * product),
    )


def _depth() -> list[Case]:
    """Return one site over all blocks or sublayers, both phases, and the cases of Full AttnRes."""
    partials = [*shapes.ONE_SITE, shapes.ALL_SITES._replace(D=1024), shapes.ALL_SITES]
    merges = [_depth_merge(Depth(1, 1, D)) for D in (1024, 2048)]
    return [*map(_depth_partial, partials), *merges, *TABLE_1]


def _depth_partial(size: Depth, *, prior: bool = False) -> Case:
    S, N, D = size

    def function(implementation, queries, sources, *prior):
        return pallas_kernels.depth_attention_partial(
            queries, sources, prior=prior or None, implementation=implementation
        )

    row, sums = _TOKENS * D * _ITEM, 4 * S * _TOKENS
    of_prior = S * row + sums if prior else 0
    parameters = 4 * S * D
    flops = 4 * S * N * _TOKENS * D
    given = size.partial(TOKENS, prior=prior)
    return Case(
        f"S={S} N={N} D={D}{' prior' if prior else ''}",
        function,
        (given.queries, given.sources, *(given.prior or ())),
        Work((N + S) * row + sums + parameters + of_prior, flops),
        # It reads the sources and the result's cotangent, and writes the sources'. With a prior,
        # its share needs it and the result.
        Work((2 * N + S) * row + 2 * sums + 2 * parameters + 2 * of_prior, 2 * flops),
    )


def _depth_merge(size: Depth) -> Case:
    D, given = size.D, size.merge(TOKENS)

    def function(implementation, current, mixed, log_sums, query, norm_gain):
        mixed, current, z = pallas_kernels.depth_attention_merge(
            mixed[None], log_sums, 0, current, query, norm_gain, implementation=implementation
        )
        return current, z

    row, sums, parameters = _TOKENS * D * _ITEM, 4 * _TOKENS, 2 * 4 * D
    return Case(
        f"merge D={D}",
        function,
        (given.current, given.current, given.log_sums, given.query, given.norm_gain),
        # `current` is passed on unchanged.
        Work(3 * row + sums + parameters, 15 * _TOKENS * D),
        Work(6 * row + 2 * sums + 2 * parameters, 40 * _TOKENS * D),
        carried=True,
    )


def _delta() -> list[Case]:
    """Return one long sequence with Kimi Linear's heads."""
    heads, size = shapes.KIMI_48B

    def function(implementation, *operands):
        return pallas_kernels.delta_attention(
            *operands, scale=size**-0.5, implementation=implementation
        )

    rows = 1, _TOKENS, heads
    operand = array("bfloat16", *rows, size)
    per_array, beta = _TOKENS * heads * size * _ITEM, 4 * _TOKENS * heads
    decays, state = 2 * per_array, 4 * heads * size**2
    # In chunks of 128, a causal mask leaves half of the products between a chunk's tokens.
    product = 2 * _TOKENS * heads * size**2
    return [
        Case(
            f"H={heads} D={size}",
            function,
            (*[operand] * 3, array("float32", *rows, size), array("float32", *rows)),
            # The 5 products between tokens are those of keys, of queries, the inverse, and the
            # inverse and the queries with values.
            Work(4 * per_array + decays + beta + state, int((3 + 5 / 2) * product)),
            Work(7 * per_array + 2 * (decays + beta) + state, int((10 + 18 / 2) * product)),
        )
    ]


def elements_per_sublayer(moved: dict[str, int]) -> dict[str, float]:
    """Return what a sublayer moves in the schedules of table 1, in units of d, a token's elements.

    Args:
      moved: forward bytes of the cases in `TABLE_1` and of `merge D=1024`, by name.
    """
    row, sites = _TOKENS * 1024 * _ITEM, 16
    block, earlier, within = (moved[case.name] / row for case in TABLE_1)
    return {
        "Block, two-phase": block / sites + moved["merge D=1024"] / row,
        "Full, two-phase": earlier / sites + within,
    }


# The paper's table 1 has 128 sublayers in 8 blocks of 16. In Block AttnRes, phase 1 reads the 8
# blocks' sums. In Full AttnRes, it reads the 56 sublayers that precede the average block, and then
# each sublayer reads the 8 that precede the average one in its block, with phase 1 as the prior.
TABLE_1 = (
    _depth_partial(Depth(16, 8, 1024)),
    _depth_partial(Depth(16, 56, 1024)),
    _depth_partial(Depth(1, 8, 1024), prior=True),
)

OPS = {
    "key_vector": Op(_key_vector, {"tpu": "mosaic_tpu", "gpu": "triton"}),
    "attention": Op(_attention, {"tpu": "mosaic_tpu", "gpu": "cudnn"}),
    "depth_attention": Op(_depth, {"tpu": "mosaic_tpu", "gpu": "triton"}),
    "delta_attention": Op(_delta, {"tpu": "mosaic_tpu"}),
}
