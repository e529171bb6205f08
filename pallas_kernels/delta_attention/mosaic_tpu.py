"""The gated delta rule on TPUs, with a grid over batch rows, groups of heads, and chunks.

A grid step processes one chunk of tokens for a group of heads. Chunks are processed in sequence,
and the heads' states stay in VMEM. Operands have XLA's default layout, `[B, H, T, K]`. The backward
pass processes the chunks in reverse, and recomputes each chunk from the saved state before it.

For 8192 tokens with 32 heads in bfloat16 on v6e (918 TFLOP/s, 1640 GB/s), the forward kernel needs
at least 0.52 ms of matrix-unit time and 0.33 ms of HBM transfers. The backward kernel needs at
least 1.07 ms and 0.54 ms. The estimated run times are 1.13 ms and 2.52 ms
(docs/benchmarks/kernels.md), because vector arithmetic and registers limit both kernels.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.call import LANES, largest_divisor, tpu_call
from pallas_kernels.delta_attention import mosaic_tpu_kernels as kernels
from pallas_kernels.delta_attention.interface import DeltaGradients, DeltaOperands, chunk_size
from pallas_kernels.target import target

# Maximum number of heads per grid step, by pass. The products of one head hide the latency of
# another head's products.
_MOST_HEADS = {"forward": 16, "backward": 8}
# The VMEM that a head takes in a grid step in MiB, by pass and bytes per number: its blocks in two
# buffers, its state, and the temporaries that the compiler allocates. These are what compiled
# programs for v4, v5e and v6e take, rounded up; float32 products have several terms.
_HEAD_MIB = {("forward", 2): 1.6, ("forward", 4): 3.7, ("backward", 2): 3.1, ("backward", 4): 8.0}


def unsupported(op: str, operands: DeltaOperands, *others) -> str | None:
    """Return a one-line reason if the kernels do not support this call, else None."""
    keys, values = operands.k.shape[-1], operands.v.shape[-1]
    if keys != LANES or values != LANES:
        return f"heads of K={keys} and V={values} (legal: {LANES} for both)"
    dtypes = {x.dtype for x in operands[:3]}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}:
        named = ", ".join(sorted(map(str, dtypes)))
        return f"q, k and v of {named} (legal: all bfloat16 or all float32)"
    if operands.log_decay.dtype != jnp.float32:
        return f"log_decay of {operands.log_decay.dtype} (legal: float32)"
    return None


def forward(
    operands: DeltaOperands,
    state: Float[Array, "B H K V"],
    *,
    scale: float,
    interpret: bool = False,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"], Float[Array, "N B H V K"]]:
    """Return what each token reads, the final state and the saved states (see `interface.py`)."""
    call = _ChunksCall.of("forward", operands, scale)
    B, T, H, G = call.rows, call.chunks * call.size, call.heads, call.group
    inputs, prefetch = _inputs(call, operands, lambda n: n)
    inputs["state"] = (state.swapaxes(-1, -2), _state_block(G))
    of_states = jax.ShapeDtypeStruct((call.chunks, B, H, LANES, LANES), jnp.float32)
    outputs = {
        "read": (jax.ShapeDtypeStruct((B, H, T, LANES), call.dtype), _tokens(call, lambda n: n)),
        "after": (jax.ShapeDtypeStruct((B, H, LANES, LANES), jnp.float32), _state_block(G)),
        "states": (of_states, _states_block(G, lambda n: n)),
    }
    out = _run(_forward_kernel, "delta_forward", call, inputs, outputs, prefetch, interpret)
    read = out["read"].swapaxes(1, 2)[:, : operands.q.shape[1]]
    return read, out["after"].swapaxes(-1, -2), out["states"]


def backward(
    operands: DeltaOperands,
    states: Float[Array, "N B H V K"],
    d_read: Float[Array, "B T H V"],
    d_state: Float[Array, "B H K V"],
    *,
    scale: float,
    interpret: bool = False,
) -> DeltaGradients:
    """Return the cotangents of the operands and of the initial state (see `interface.py`)."""
    call = _ChunksCall.of("backward", operands, scale)
    B, seq, H, _ = operands.q.shape
    back = lambda n: call.chunks - 1 - n
    inputs, prefetch = _inputs(call, operands, back)
    tokens = _tokens(call, back)
    inputs["states"] = (states, _states_block(call.group, back))
    inputs["d_read"] = (_heads_first(call, d_read), tokens)
    inputs["d_after"] = (d_state.swapaxes(-1, -2), _state_block(call.group))
    like = lambda name: jax.ShapeDtypeStruct(inputs[name][0].shape, inputs[name][0].dtype)
    of_tokens = ("q", "k", "v", "log_decay", "beta")
    outputs = {f"d_{name}": (like(name), inputs[name][1]) for name in of_tokens}
    outputs["d_state"] = (like("d_after"), _state_block(call.group))
    out = _run(_backward_kernel, "delta_backward", call, inputs, outputs, prefetch, interpret)
    heads = [out[f"d_{name}"].swapaxes(1, 2)[:, :seq] for name in of_tokens[:-1]]
    d_beta = out["d_beta"].swapaxes(1, 2).reshape(B, -1, H)[:, :seq]
    return DeltaGradients(*heads, d_beta, out["d_state"].swapaxes(-1, -2))


# Functions that run inside the kernels -------------------------------------------------------


def _forward_kernel(call: "_ChunksCall", inputs, outputs, scratch):
    @pl.when(pl.program_id(2) == 0)
    def _():
        scratch["state"][...] = inputs["state"][0]

    state = scratch["state"][...]
    outputs["states"][0, 0] = state
    chunk, masks = _load(call, inputs, pl.program_id(2))
    read, state = kernels.forward(chunk, state, masks, call.dtype)
    outputs["read"][0] = read.astype(call.dtype)
    scratch["state"][...] = state
    outputs["after"][0] = state


def _backward_kernel(call: "_ChunksCall", inputs, outputs, scratch):
    @pl.when(pl.program_id(2) == 0)
    def _():
        scratch["state"][...] = inputs["d_after"][0]

    chunk, masks = _load(call, inputs, call.chunks - 1 - pl.program_id(2))
    state, d_after = inputs["states"][0, 0], scratch["state"][...]
    d, d_state = kernels.backward(chunk, state, inputs["d_read"][0], d_after, masks, call.dtype)
    d = d._replace(q=call.scale * d.q)
    for name in ("q", "k", "v", "log_decay"):
        output = outputs[f"d_{name}"]
        output[0] = getattr(d, name).astype(output.dtype)
    outputs["d_beta"][0, 0] = jnp.concatenate(list(d.beta), axis=-1)
    scratch["state"][...] = d_state
    outputs["d_state"][0] = d_state


def _load(call: "_ChunksCall", inputs, n) -> tuple[kernels.Chunk, kernels.Masks]:
    """Load the operands of chunk n for the grid step's group of heads, and the chunk's masks."""
    wide = lambda name: inputs[name][0].astype(jnp.float32)
    beta = inputs["beta"][0, 0]
    beta = jnp.stack([beta[:, head : head + 1] for head in range(call.group)])
    chunk = kernels.Chunk(call.scale * wide("q"), wide("k"), wide("v"), wide("log_decay"), beta)
    at = pl.program_id(0) * call.chunks + n
    masks = kernels.masks(
        inputs["documents"][0],
        inputs["documents_columns"][0],
        inputs["before"][at],
        inputs["last"][at],
        LANES,
    )
    return chunk, masks


# Functions that prepare and call the kernels -------------------------------------------------


class _ChunksCall(NamedTuple):
    """The static parameters of a kernel that processes chunks of tokens."""

    rows: int
    chunks: int
    size: int  # The number of tokens in a chunk.
    heads: int
    group: int  # The number of heads in a grid step.
    dtype: jnp.dtype
    scale: float

    @classmethod
    def of(cls, op: str, operands: DeltaOperands, scale: float) -> "_ChunksCall":
        """Return the parameters of a pass, with as many heads per grid step as fit into VMEM."""
        (B, T, H, K), dtype = operands.q.shape, operands.q.dtype
        fit = target().vmem_limit / 2**20 / _HEAD_MIB[op, dtype.itemsize]
        group = largest_divisor(H, min(_MOST_HEADS[op], int(fit)))
        size = chunk_size(K)
        return cls(B, -(-T // size), size, H, group, dtype, float(scale))


def _inputs(call: _ChunksCall, operands: DeltaOperands, at):
    """Return the operands as blocks, and the arrays to prefetch.

    After the last token, arrays are padded with zeros, and `documents` is padded with the last
    token's document.

    Args:
      call: the static parameters.
      operands: the operands.
      at: maps a grid step to the chunk that it processes.
    """
    tokens = _tokens(call, at)
    of_heads = ("q", "k", "v", "log_decay")
    inputs = {name: (_heads_first(call, getattr(operands, name)), tokens) for name in of_heads}
    B, G, C = call.rows, call.group, call.size
    beta = _padded(call, operands.beta).reshape(B, -1, call.heads // G, G).swapaxes(1, 2)
    inputs["beta"] = (beta, pl.BlockSpec((1, 1, C, G), lambda b, h, n, *_: (b, h, at(n), 0)))
    documents = _padded(call, operands.documents, mode="edge")
    inputs["documents"] = (
        documents[:, None],
        pl.BlockSpec((1, 1, C), lambda b, h, n, *_: (b, 0, at(n))),
    )
    inputs["documents_columns"] = (
        documents[..., None],
        pl.BlockSpec((1, C, 1), lambda b, h, n, *_: (b, at(n), 0)),
    )
    last = documents[:, C - 1 :: C]
    before = jnp.pad(last[:, :-1], ((0, 0), (1, 0)))
    return inputs, {"before": before.reshape(-1), "last": last.reshape(-1)}


def _padded(call: _ChunksCall, x, **mode):
    none = ((0, 0),) * (x.ndim - 2)
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % call.size), *none), **mode)


def _heads_first(call: _ChunksCall, x):
    """Convert [B, T, H, K] to [B, H, T, K], padded to whole chunks."""
    return _padded(call, x).swapaxes(1, 2)


def _tokens(call: _ChunksCall, at) -> pl.BlockSpec:
    shape = (1, call.group, call.size, LANES)
    return pl.BlockSpec(shape, lambda b, h, n, *_: (b, h, at(n), 0))


def _state_block(group: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, group, LANES, LANES), lambda b, h, n, *_: (b, h, 0, 0))


def _states_block(group: int, at) -> pl.BlockSpec:
    return pl.BlockSpec((1, 1, group, LANES, LANES), lambda b, h, n, *_: (at(n), b, h, 0, 0))


def _run(kernel, name: str, call: _ChunksCall, inputs, outputs, prefetch, interpret):
    levels = (call.size - 1).bit_length()
    products = 4 * levels + 8 if kernel is _forward_kernel else 10 * levels + 20
    tokens = call.rows * call.chunks * call.size * call.heads
    return tpu_call(
        functools.partial(kernel, call),
        name,
        inputs,
        outputs,
        {"state": pltpu.VMEM((call.group, LANES, LANES), jnp.float32)},
        grid=(call.rows, call.heads // call.group, call.chunks),
        semantics=("parallel", "parallel", "arbitrary"),
        flops=2 * products * tokens * call.size * LANES,
        transcendentals=tokens * LANES * (levels + 2),
        prefetch=prefetch,
        interpret=interpret,
    )
