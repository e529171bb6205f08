"""TPU kernels that compute depth attention for the few tokens of a decoding step.

The kernels of `mosaic_tpu` need operations around them, which pad rows, broadcast parameters and
copy slices. For few tokens, these take more time than the kernels. The kernels in this module need
no such operations: arrays keep the model's layout, and a kernel reads its parameters directly from
the stack of all layers' parameters. Sums use the vector unit, in float32.

For S sites, T tokens, N sources and E bytes per entry, `partial` takes `4 S N T D` FLOPs and moves
`E (N + S) T D` bytes; `merge_at` moves `E 3 T D` bytes.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import operand
from pallas_kernels.arguments import Norm
from pallas_kernels.call import LANES, round_up, tpu_call
from pallas_kernels.depth_attention.interface import MergeAt, Partial
from pallas_kernels.target import target

# Maximum number of inner products per token in `partial` (N * S). The kernel unrolls all of them.
_MOST = 128
# Number of tokens per grid step. It is small enough that most intermediates stay in registers.
_TOKENS = 32
# `_TILE`: number of tokens in a register tile of the narrowest dtype. `_LEAST`: number of tokens in
# a register tile of float32, which a block may have in any dtype. `_BUDGET`: maximum VMEM for the
# double-buffered rows of a grid step, in units of 1/60 of the VMEM limit.
_TILE, _LEAST, _BUDGET = 16, 8, 58


@dataclasses.dataclass(frozen=True)
class _DepthDecodeCall:
    """The static parameters of a decoding kernel, constant during tracing."""

    epsilon: int | float
    norm: Norm = "rmsnorm"
    norm_epsilon: int | float = 0.0


def serves(operands: Partial) -> bool:
    """Return whether `mosaic_tpu.partial` should use this module's `partial` for these operands."""
    S, (N, T, _) = operands.queries.shape[0], operands.sources.shape
    return operands.prior is None and T < LANES and N * S <= _MOST and _tokens(operands) is not None


def _tokens(operands: Partial) -> int | None:
    """Return the number of tokens per grid step; None if no such number fits in VMEM."""
    S, (N, T, D) = operands.queries.shape[0], operands.sources.shape
    each = 2 * (N + S) * D * jnp.dtype(operands.sources.dtype).itemsize
    fitting = (
        n for n in (_TOKENS, _TILE) if each * round_up(min(n, T), 8) <= target().vmem_part(_BUDGET)
    )
    return next((min(n, T) for n in fitting), None)


def partial(
    operands: Partial, *, epsilon: int | float, interpret: bool = False
) -> tuple[Float[Array, "S T D"], Float[Array, "S T"]]:
    """Return each site's mix (a weighted sum of the sources) and log-sum-exp (see `interface`).

    The operands must have no `prior` (mixes of other sources).
    """
    queries, sources, count, _ = operands
    S, (N, T, D) = queries.shape[0], sources.shape
    tokens = _tokens(operands)
    by_token = lambda rows, size: pl.BlockSpec((rows, tokens, size), lambda i: (0, i, 0))
    out = tpu_call(
        functools.partial(_partial, call=_DepthDecodeCall(epsilon)),
        "depth_attention_partial_decode",
        {
            "count": operand.in_smem(count),
            "queries": (queries, pl.BlockSpec((S, D), lambda i: (0, 0))),
            "sources": (sources, by_token(N, D)),
        },
        {
            "mixed": (jax.ShapeDtypeStruct((S, T, D), sources.dtype), by_token(S, D)),
            "log_sums": (jax.ShapeDtypeStruct((S, T, 1), jnp.float32), by_token(S, 1)),
        },
        {},
        grid=(-(-T // tokens),),
        semantics=("parallel",),
        flops=4 * S * N * T * D,
        interpret=interpret,
    )
    return out["mixed"], out["log_sums"].reshape(S, T)


def _partial(inputs, outputs, scratch, *, call: _DepthDecodeCall):
    queries = inputs["queries"]
    (S, size), N, count = queries.shape, inputs["sources"].shape[0], inputs["count"][0]

    def source(n):
        return jnp.where(n < count, inputs["sources"][n].astype(jnp.float32), 0)

    logits: list[list[Array]] = [[] for _ in range(S)]
    for n in range(N):
        v = source(n)
        rstd = jax.lax.rsqrt(jnp.sum(v * v, axis=-1, keepdims=True) / size + call.epsilon)
        for s in range(S):
            product = jnp.sum(v * queries[s : s + 1], axis=-1, keepdims=True)
            logits[s].append(jnp.where(n < count, product * rstd, -jnp.inf))
    for s in range(S):
        largest = functools.reduce(jnp.maximum, logits[s])
        shift = jnp.where(largest == -jnp.inf, 0, largest)
        weights = [jnp.exp(logit - shift) for logit in logits[s]]
        total = sum(weights)
        outputs["log_sums"][s] = largest + jnp.log(jnp.where(total == 0, 1, total))
        mixed = sum(weights[n] * source(n) for n in range(N)) / jnp.where(total == 0, 1, total)
        outputs["mixed"][s] = mixed.astype(outputs["mixed"].dtype)


def unsupported(op: str, operands: MergeAt) -> str | None:
    """Return a one-line reason why the kernel does not support these operands, or None."""
    floats = [x for x in operands if jnp.issubdtype(x.dtype, jnp.floating)]
    if any(x.dtype not in (jnp.bfloat16, jnp.float32) for x in floats):
        return "arrays that are neither bfloat16 nor float32"
    if _merge_tokens(operands) is None:
        return f"D={operands.current.shape[-1]}: {_LEAST} tokens do not fit in VMEM"
    return None


def _merge_tokens(operands: MergeAt) -> int | None:
    """Return the number of tokens per grid step of `merge_at`; None if no such number fits in VMEM.

    Blocks are double-buffered. The compiler also keeps about one and a half float32 arrays with a
    block's rows, and a third copy of the layer's parameters, which fill 8 rows each.
    """
    mixed, current = operands.mixed, operands.current
    T, D = current.shape
    each = 2 * D * (jnp.dtype(mixed.dtype).itemsize + 2 * jnp.dtype(current.dtype).itemsize)
    each += 2 * LANES * 4 + 6 * D
    of_layer = 3 * 8 * D * 4
    budget = target().vmem_part(_BUDGET) - of_layer
    fitting = (n for n in (_TOKENS, _TILE, _LEAST) if each * round_up(min(n, T), 8) <= budget)
    return next((min(n, T) for n in fitting), None)


def merge_at(
    operands: MergeAt,
    *,
    norm: Norm,
    epsilon: int | float,
    norm_epsilon: int | float,
    interpret: bool = False,
) -> Float[Array, "T D"]:
    """Compute `merge` for a few tokens, with parameters read from the stack of all layers.

    For T tokens with D entries of E bytes, the kernel moves `E 3 T D` bytes.
    """
    parameters, layer, mixed, log_sums, site, current, active = operands
    T, D = current.shape
    tokens = _merge_tokens(operands)
    tables = {"active": active, "layer": layer, "site": site}
    by_site = lambda *shape: pl.BlockSpec(
        (None, tokens, *shape), lambda i, a, layer, site: (site[0], i, 0)
    )
    by_token = lambda width: pl.BlockSpec((tokens, width), lambda i, *_: (i, 0))
    of_layer = pl.BlockSpec((None, 2, D), lambda i, a, layer, site: (layer[0], 0, 0))
    out = tpu_call(
        functools.partial(_merge, call=_DepthDecodeCall(epsilon, norm, norm_epsilon)),
        "depth_attention_merge_decode",
        {
            "parameters": (parameters, of_layer),
            "mixed": (mixed, by_site(D)),
            "log_sums": (log_sums[..., None], by_site(1)),
            "current": (current, by_token(D)),
        },
        {"z": (jax.ShapeDtypeStruct((T, D), current.dtype), by_token(D))},
        {},
        grid=(-(-T // tokens),),
        semantics=("parallel",),
        flops=15 * current.size,
        moved=3 * current.nbytes,
        prefetch={k: x.reshape(1).astype(jnp.int32) for k, x in tables.items()},
        interpret=interpret,
    )
    return out["z"]


def _merge(inputs, outputs, scratch, *, call: _DepthDecodeCall):
    query, gain = inputs["parameters"][0:1], inputs["parameters"][1:2]
    current, mixed = (inputs[k][...].astype(jnp.float32) for k in ("current", "mixed"))
    mean = lambda x: jnp.mean(x, axis=-1, keepdims=True)
    rstd = jax.lax.rsqrt(mean(jnp.square(current)) + call.epsilon)
    logit = jnp.sum(current * query, axis=-1, keepdims=True) * rstd
    p = jnp.where(inputs["active"][0] != 0, jax.nn.sigmoid(logit - inputs["log_sums"][...]), 0)
    h = mixed + p * (current - mixed)
    if call.norm == "layernorm":
        h = h - mean(h)
    z = h * jax.lax.rsqrt(mean(jnp.square(h)) + call.norm_epsilon) * gain
    outputs["z"][...] = z.astype(outputs["z"].dtype)
