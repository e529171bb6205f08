"""The tuning space of each kernel: its candidate block sizes, and a call to compile or time.

The call does little besides running the kernel. To add a kernel, add an entry to `SPACES`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.call import divisors
from pallas_kernels.causal_attention import block_sizes as attention_blocks
from pallas_kernels.causal_attention import mosaic_tpu as attention_tpu
from pallas_kernels.causal_attention import mosaic_tpu_whole as attention_whole
from pallas_kernels.causal_attention import plain as attention_portable
from pallas_kernels.causal_attention.interface import AttentionOperands, ResultsAndCotangent
from pallas_kernels.depth_attention import mosaic_tpu as depth_tpu
from pallas_kernels.depth_attention import triton_gpu as depth_gpu
from pallas_kernels.depth_attention import xla as depth_portable
from pallas_kernels.depth_attention.interface import (
    Merge,
    MergeCotangents,
    Partial,
    PartialCotangents,
)
from pallas_kernels.key_vector import block_sizes as key_vector_blocks
from pallas_kernels.key_vector import mosaic_tpu as key_vector_tpu
from pallas_kernels.key_vector import triton_gpu as key_vector_gpu
from pallas_kernels.key_vector import xla as key_vector_portable
from pallas_kernels.key_vector.interface import SiteBackward, SiteOperands
from pallas_kernels.shapes import Depth, KeyVector
from pallas_kernels.target import Platform, lowering_for
from rmt_tpu.estimator.programs import lower

Values = dict[str, tuned.Value]
# The minimum number of tokens in a call, which is enough to occupy a whole chip.
_TOKENS = 8192
_EPSILON = 1e-5


@dataclasses.dataclass(frozen=True)
class Problem:
    """A kernel to tune, for arrays of one size, on one kind of device.

    Attributes:
      device: the kind of device, as in the tuned tables, like "tpu_v5_lite".
      platform: the platform of the device, "tpu" or "cuda".
      kernel: the name of the kernel.
      key: the sizes and dtypes that block sizes depend on, as pairs of a name and a value.
      tokens: the number of tokens; for some kernels, the number per sequence.
    """

    device: str
    platform: Platform
    kernel: str
    key: tuned.Items
    tokens: int

    @property
    def tuned_kernel(self) -> tuned.Kernel:
        """The kernel's entry in the registry of tuned kernels."""
        return tuned.KERNELS[self.platform, self.kernel]

    @property
    def name(self) -> str:
        """The kernel, sizes and tokens as one line of text."""
        return f"{self.kernel} {' '.join(f'{k}={v}' for k, v in self.key)} tokens={self.tokens}"

    def default(self) -> tuned.Blocks | None:
        """Return the default rule's block sizes, or None if the kernel cannot run this size."""
        with lowering_for(self.device):
            return SPACES[self.platform, self.kernel].default(dict(self.key), self.tokens)

    def candidates(self) -> list[tuned.Blocks]:
        """Return the default block sizes and all other candidates that fit in memory."""
        default, key = self.default(), dict(self.key)
        space = SPACES[self.platform, self.kernel]
        others = []
        for values in space.values(key, self.tokens, tuned.fields(default)):
            blocks = self.tuned_kernel.build_blocks(tuned.fields(default) | values)
            if blocks != default and self.tuned_kernel.refused(key, self.tokens, blocks) is None:
                others.append(blocks)
        return [default, *dict.fromkeys(others)]

    def bytes(self) -> int:
        """Return the number of bytes that the kernel must move, whatever its block sizes are."""
        return SPACES[self.platform, self.kernel].call(dict(self.key), self.tokens).bytes()

    def entry(self, blocks: tuned.Blocks, source: tuned.Source, **more: Any) -> tuned.Entry:
        """Return a table entry that assigns block sizes to this kernel, size and device."""
        return tuned.Entry(
            self.device,
            self.kernel,
            self.tuned_kernel.version,
            self.key,
            self.tokens,
            tuned.items(tuned.fields(blocks)),
            source,
            **more,
        )


@dataclasses.dataclass(frozen=True)
class TuningCall:
    """A call of an op for tuning its kernel, and the same call in plain JAX.

    Attributes:
      function: a function that takes one of the two modules and returns the function to call.
      kernels, portable: the module with the kernels, and the module with plain JAX.
      arguments: the shapes and dtypes of the arguments, as trees.
      donated: the indices of the arguments that the results may overwrite.
      counts: the values of integer arguments by argument index; other integer arguments are 0.
      spared: the number of bytes of arguments and results that no implementation needs to move.
      complete: a function of random arguments that returns the arguments to call with. It replaces
        those that are results of others, such as the log-sum-exps of a backward pass: with others,
        exponentials overflow, and a check compares NaN with NaN.
    """

    function: Callable[[ModuleType], Callable[..., Any]]
    kernels: ModuleType
    portable: ModuleType
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    counts: Mapping[int, int] = dataclasses.field(default_factory=dict)
    spared: int = 0
    complete: Callable[..., tuple[Any, ...]] = lambda *arguments: arguments

    def bytes(self) -> int:
        """Return the bytes of all operands and results, except `spared`, each moved once."""
        results = jax.eval_shape(self.function(self.portable), *self.arguments)
        return _bytes((self.arguments, results)) - self.spared


@dataclasses.dataclass(frozen=True)
class Space:
    """The tuning space of one kernel.

    Attributes:
      default: a function of `(key, tokens)` that returns the default rule's block sizes.
      values: a function of `(key, tokens, default)` that yields alternative values of the block
        fields.
      grows: the names of the block sizes that increase the need for on-chip memory.
      call: a function of `(key, tokens)` that returns the call to compile.
    """

    default: Callable[[Values, int], tuned.Blocks | None]
    values: Callable[[Values, int, Values], Iterable[Values]]
    grows: tuple[str, ...]
    call: Callable[[Values, int], TuningCall]


def problem_of(look: tuned.Look) -> Problem:
    """Return the tuning problem (kernel, sizes and device) for a look-up in the tuned tables."""
    return Problem(look.device, look.kernel.platform, look.kernel.name, look.key, look.tokens)


def lower_candidate(
    device: jax.Device, problem: Mapping[str, Any], blocks: Values
) -> jax.stages.Lowered:
    """Lower (for compilation) a kernel with a candidate's block sizes.

    The device need not be present.

    Args:
      device: a device of the problem's kind.
      problem: the fields of a `Problem`, as JSON values.
      blocks: maps the name of each block size to the candidate's value.
    """
    kernel_problem = Problem(**(dict(problem) | {"key": tuned.items(dict(problem["key"]))}))
    call = SPACES[kernel_problem.platform, kernel_problem.kernel].call(
        dict(kernel_problem.key), kernel_problem.tokens
    )
    return lower_call(
        device, kernel_problem, call, kernel_problem.tuned_kernel.build_blocks(blocks)
    )


def lower_call(
    device: jax.Device, problem: Problem, call: TuningCall, blocks: tuned.Blocks | None
) -> jax.stages.Lowered:
    """Lower (for compilation) a call with the kernel, or in plain JAX if `blocks` is None.

    Raises:
      RuntimeError: the kernel does not accept these block sizes.
    """
    if blocks is None:
        return lower(call.function(call.portable), call.arguments, device, donate=call.donated)
    own = tuned.Table("candidate", (problem.entry(blocks, "heuristic"),), exact=True)
    with tuned.tuned(own), tuned.collecting() as looks:
        function = call.function(call.kernels)
        lowered = lower(lambda *a: function(*a), call.arguments, device, donate=call.donated)
    used_blocks = [look.chosen for look in looks if problem_of(look) == problem]
    if used_blocks != [blocks]:
        raise RuntimeError(
            f"{problem.name} was compiled with {used_blocks or 'no look-up of block sizes'}, "
            f"instead of {blocks}"
        )
    return lowered


# Shapes of arguments, and candidate block sizes --------------------------------------------------


def _array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _bytes(arrays: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def _product(**choices: Iterable[tuned.Value]) -> Iterator[Values]:
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def _powers(first: int, last: int) -> list[int]:
    return [2**n for n in range(first.bit_length() - 1, last.bit_length()) if first <= 2**n <= last]


def _around(value: int, most: int) -> list[int]:
    """Return half of `value`, `value`, and twice `value` (at most `most`), in ascending order."""
    return sorted({max(1, value // 2), value, min(most, 2 * value)})


# Spaces of key-vector ops ------------------------------------------------------------------------


def _key_vector_tpu_values(op, key: Values, tokens: int, default: Values) -> Iterator[Values]:
    V = key["V"]
    yield from _product(
        tokens=(128, 256, 512),
        slab=[V // n for n in (1, 2, 4, 8) if V % n == 0],
        store_unroll=_around(default["store_unroll"], 64),
        read_unroll=_around(default["read_unroll"], 64),
        keep=(False,) if op == "forward" else (True, False),
    )


def _key_vector_tpu_default(op, key: Values, tokens: int):
    return key_vector_blocks.default_block_sizes(op, key_vector_blocks.Sizes(**key), tokens)


def _key_vector_gpu_values(key: Values, tokens: int, default: Values) -> Iterator[Values]:
    yield from _product(
        keys=_powers(16, max(16, key_vector_gpu.padded(key["K"]))),
        warps=(2, 4, 8, 16),
        stages=(1, 2, 3),
        programs=_around(default["programs"], tokens),
    )


def _key_vector_call(op, modules, rows, key: Values, tokens: int) -> TuningCall:
    """Return the call for tuning a key-vector op.

    Args:
      op: the name of the op.
      modules: the module with the kernels, and the module with plain JAX.
      rows: a function of `tokens` that returns the shape of the token axes: several sequences on a
        TPU, and a single sequence on a GPU.
      key: maps names to the sizes and dtypes of the problem.
      tokens: the number of tokens per sequence.
    """
    size = KeyVector(*(key[name] for name in "KVRP"))
    data = key.get("data_dtype", key.get("dtype"))
    dtypes = data, key.get("residual_dtype", data)
    stores, reads = bool(size.R), bool(size.P)
    options = {"norm": "layernorm"} if reads else {}
    if op in ("backward", "rebuild"):
        operands, A = size.backward(rows(tokens), *dtypes), key.get("A")
        operands = operands._replace(again=size._replace(P=A).reread(rows(tokens)) if A else None)
        both = stores and reads
        options |= {"rebuild": op == "rebuild", "fraction_bits": 9} if both else {}
        run = lambda m, *arrays: m.backward(SiteBackward(*arrays), **options)
        return TuningCall(
            lambda m: functools.partial(run, m), *modules, operands, (2,) if both else ()
        )
    options |= ({"epsilon": _EPSILON} if reads else {}) | {"fraction_bits": 9}
    options |= {} if stores else {"dtype": jnp.dtype(data)}
    operands = size.site(rows(tokens), *dtypes)
    run = lambda m, *arrays: m.forward(SiteOperands(*arrays), **options)
    return TuningCall(
        lambda m: functools.partial(run, m), *modules, operands, (0,) if stores else ()
    )


_in_sequences = lambda tokens: (max(2, _TOKENS // tokens), tokens)
_in_one_sequence = lambda tokens: (1, tokens)


def _key_vector() -> Iterator[tuple[tuple[str, str], Space]]:
    for op in ("forward", "backward", "rebuild"):
        modules = key_vector_tpu, key_vector_portable
        yield (
            ("tpu", f"key_vector_{op}"),
            Space(
                functools.partial(_key_vector_tpu_default, op),
                functools.partial(_key_vector_tpu_values, op),
                ("tokens", "slab", "store_unroll", "read_unroll", "keep"),
                functools.partial(_key_vector_call, op, modules, _in_sequences),
            ),
        )
    for name in key_vector_gpu.KERNELS:
        modules = key_vector_gpu, key_vector_portable
        op = "backward" if "backward" in name else "forward"
        rule = functools.partial(key_vector_gpu.default_blocks, name)
        yield (
            ("cuda", name),
            Space(
                lambda key, tokens, rule=rule: rule(tokens=tokens, **key),
                _key_vector_gpu_values,
                ("keys", "stages"),
                functools.partial(_key_vector_call, op, modules, _in_one_sequence),
            ),
        )


# Spaces of depth attention -----------------------------------------------------------------------


def _depth_tpu_values(key: Values, tokens: int, default: Values) -> Iterator[Values]:
    # A tile need not have more tokens than the array. An inner loop processes at most a whole tile.
    most = -(-tokens // 16) * 16
    for size in (16, 32, 48, 64, 96, 128, 192, 256, 512):
        if size <= most:
            yield from _product(tokens=(size,), unroll=_powers(1, min(16, size // 16)))


def _depth_gpu_values(name, key: Values, tokens: int, default: Values) -> Iterator[Values]:
    summed = name.endswith(("backward", "gradients"))
    yield from _product(
        rows=(1, 2, 4, 8),
        sites=sorted({default["sites"], 1, *_around(default["sites"], key["S"])}),
        tokens=_around(default["tokens"], 64) if summed else (1,),
        columns=_around(default["columns"], depth_gpu.padded(key["D"])),
        warps=_around(default["warps"], 16),
        ahead=(1, 2, 3),
    )


def _depth_call(op, modules, key: Values, tokens: int) -> TuningCall:
    size, epsilon = Depth(key["S"], key["N"], key["D"]), {"epsilon": _EPSILON}
    norm = epsilon | {"norm": "rmsnorm", "norm_epsilon": _EPSILON}
    if op.startswith("merge"):
        operands, cotangents = size._replace(S=2).merge_backward((tokens,))
        # The arrays have rows for two sites, but only one site is merged. The row of the other site
        # need not be moved.
        row = _bytes(operands.current)
        if op == "merge":
            function = lambda m: lambda *a: m.merge(Merge(*a), **norm)
            return TuningCall(function, *modules, tuple(operands), spared=row)
        back = lambda m, *a: m.merge_backward(Merge(*a[:7]), MergeCotangents(*a[7:]), **norm)
        arguments = (*operands, *cotangents)
        # The rows of the other site are not moved. Neither is the incoming gradient of the merged
        # site's row, because it is overwritten without being read.
        function, spared = lambda m: functools.partial(back, m), 4 * row
        return TuningCall(function, *modules, arguments, (8, 9), spared=spared)
    operands, counts = size.partial((tokens,), key["dtype"])[:3], {2: size.N}
    if op == "partial":
        function = lambda m: lambda *a: m.partial(Partial(*a), **epsilon)
        return TuningCall(function, *modules, operands, counts=counts)
    back = lambda m, *a: m.partial_backward(Partial(*a[:3]), PartialCotangents(*a[3:]), **epsilon)
    arguments = (*operands, *size.partial_cotangents((tokens,), key["dtype"]))

    def complete(queries, sources, count, _, *cotangents):
        own = Partial(queries, sources, count)
        return *own[:3], depth_portable.partial(own, **epsilon)[1], *cotangents

    function = lambda m: functools.partial(back, m)
    return TuningCall(function, *modules, arguments, (6,), counts, complete=complete)


_DEPTH_OPS = {
    "scores": "partial_backward",
    "backward": "partial_backward",
    "gradients": "partial_backward",
}


def _depth() -> Iterator[tuple[tuple[str, str], Space]]:
    for name in depth_tpu.KERNELS:
        op = name.removeprefix("depth_attention_")
        rule = functools.partial(depth_tpu.default_block_sizes, op)
        yield (
            ("tpu", name),
            Space(
                lambda key, tokens, rule=rule: rule(T=tokens, **key),
                _depth_tpu_values,
                ("tokens", "unroll"),
                functools.partial(_depth_call, op, (depth_tpu, depth_portable)),
            ),
        )
    for name in depth_gpu.KERNELS:
        kind = name.removeprefix("depth_attention_")
        op = _DEPTH_OPS.get(kind, kind)
        rule = functools.partial(depth_gpu.default_blocks, name)
        yield (
            ("cuda", name),
            Space(
                lambda key, tokens, rule=rule: rule(T=tokens, **key),
                functools.partial(_depth_gpu_values, name),
                ("rows", "sites", "columns", "ahead"),
                functools.partial(_depth_call, op, (depth_gpu, depth_portable)),
            ),
        )


# Spaces of attention -----------------------------------------------------------------------------


def _attention_values(op, key: Values, tokens: int, default: Values) -> Iterator[Values]:
    if "blocks" not in op:
        yield from _product(queries=range(128, tokens + 1, 128))
        return
    sizes = [size for size in (128, 256, 512, 1024, 2048) if size < 2 * tokens]
    heads = [n for n in divisors(key["kv_heads"]) if n <= attention_blocks.MOST_HEADS]
    yield from _product(queries=sizes, keys=sizes, heads=heads)


def _attention_default(op, key: Values, tokens: int) -> tuned.Blocks:
    if "blocks" in op:
        return attention_blocks.default_blocks(op, tokens, **key)
    return attention_whole.default_blocks(op, tokens)


def _attention_call(op, key: Values, tokens: int) -> TuningCall:
    B, N, H, D = max(2, _TOKENS // tokens), tokens, key["heads"], key["size"]
    G, Dv, rows = key.get("kv_heads", H), key.get("value_size", D), key["rows"]
    portable = op.replace("_blocks", "")
    data = functools.partial(_array, dtype=key["dtype"])
    operands = AttentionOperands(
        data(B, N, H + 2 * G if Dv == D else H, D),
        None,
        _array(H) if key["alibi"] else None,
        _array(B, N, dtype=jnp.int32) if key["segments"] else None,
        None if Dv == D else (data(B, N, G, D), data(B, N, G, Dv)),
    )

    def function(module):
        run = functools.partial(getattr(module, portable), kv_heads=G, rows=rows)
        return lambda operands, *attended: run(operands._replace(scale=D**-0.5), *attended)

    if op.endswith("forward"):
        return TuningCall(function, attention_tpu, attention_portable, (operands,))

    def complete(operands, results):
        own = operands._replace(scale=D**-0.5)
        attended = attention_portable.attention_forward(own, kv_heads=G, rows=rows)
        return operands, ResultsAndCotangent(*attended, results.d_out)

    results = ResultsAndCotangent(data(B, N, H, Dv), _array(B, N, H), data(B, N, H, Dv))
    modules = attention_tpu, attention_portable
    return TuningCall(function, *modules, (operands, results), complete=complete)


def _attention() -> Iterator[tuple[tuple[str, str], Space]]:
    for op in attention_tpu.KERNELS:
        rule = functools.partial(_attention_default, op)
        yield (
            ("tpu", op),
            Space(
                rule,
                functools.partial(_attention_values, op),
                ("queries", "keys", "heads") if "blocks" in op else ("queries",),
                functools.partial(_attention_call, op),
            ),
        )


SPACES: dict[tuple[str, str], Space] = dict((*_key_vector(), *_depth(), *_attention()))
