"""Causal attention by cuDNN's fused kernels, on NVIDIA GPUs of the Ampere generation or later.

The kernels are called through XLA's custom calls, as in `jax.nn.dot_product_attention`. That
function is not used here, for three reasons. It needs a GPU and cuDNN at tracing time. It does not
return the log-sum-exp. It needs a bias for all pairs of tokens to express ALiBi and segments. Here
they are extra entries of queries and keys: see `entries`.
"""

import functools
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import read_slices, write_slice
from pallas_kernels.causal_attention import entries, reference
from pallas_kernels.causal_attention.interface import (
    AttentionOperands,
    KeysAndValues,
    PartOperands,
    ResultsAndCotangent,
    Rows,
)
from pallas_kernels.target import target


def most_entries(capability: int) -> int:
    """Return the maximum head size for which cuDNN has both a forward and a backward kernel.

    On Blackwell, cuDNN 9.18 supports 256 entries in the forward pass, but only 128 in the backward
    pass.
    """
    return 256 if capability // 10 == 9 else 128


def refused(
    capability: int,
    size: int,
    value_size: int,
    *,
    segments: bool,
    alibi: bool,
    length: int,
    dtype: jnp.dtype | str,
    cap: float | None = None,
) -> str | None:
    """Return a one-line reason if cuDNN does not support a call with these properties, else None.

    A window makes no difference, except in attention to another part of a sequence.

    Args:
      capability: ten times the device's compute capability: 80 is sm_80.
      size: the size of queries and keys.
      value_size: the size of values.
      segments: whether batch rows have several segments.
      alibi: whether ALiBi is used.
      length: the number of keys.
      dtype: the dtype of queries.
      cap: the soft cap on logits, or None. XLA's custom calls do not support a cap.
    """
    if cap is not None:
        return f"a soft cap on logits, {cap} (legal: None)"
    if capability < 80:
        return f"cuDNN's fused attention on sm_{capability} (legal: sm_80, Ampere, or later)"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"data vectors of {jnp.dtype(dtype)} (legal: bfloat16 or float16)"
    if alibi and length > entries.POSITIONS:
        return f"ALiBi over {length} tokens (legal: up to {entries.POSITIONS})"
    most = most_entries(capability)
    of_masks = 4 * alibi + (entries.code_size(length) + 1) * segments
    if size + of_masks > most:
        extra = f" plus {of_masks} entries for ALiBi and segments" if of_masks else ""
        return f"heads of size {size}{extra} (legal: up to {most} in total)"
    if value_size > most:
        return f"values of size {value_size} (legal: up to {most})"
    return None


def unsupported(
    op: str,
    operands: AttentionOperands | PartOperands,
    *results: ResultsAndCotangent,
    kv_heads: int | None = None,
) -> str | None:
    """Return a one-line reason if cuDNN does not support these operands, else None."""
    qkv, keys = operands[0], operands[0]
    value_size = qkv.shape[3]
    if isinstance(operands, PartOperands):
        keys, values = operands.keys_and_values
        value_size = values.shape[3]
        if operands.window is not None:
            return "a window over another part of the sequence (legal: over the whole sequence)"
    elif operands.kv is not None:
        value_size = operands.kv[1].shape[3]
    device = target()
    if device.capability < 80:
        return f"cuDNN's fused attention on {device.kind} (legal: sm_80, Ampere, or later)"
    return refused(
        device.capability,
        qkv.shape[3],
        value_size,
        segments=operands.segments is not None,
        alibi=operands.slopes is not None,
        length=keys.shape[1],
        dtype=qkv.dtype,
        cap=operands.cap,
    )


def attention_forward(
    operands: AttentionOperands,
    *,
    kv_heads: int,
    rows: Rows = "size_major",
    interpret: bool = False,
) -> tuple[Float[Array, "*count B N H Dv"], Float[Array, "B N H"]]:
    """Return the attention output and each softmax's log-sum-exp, as `interface.py` specifies."""
    out, log_sums = _forward(_as_part(operands, kv_heads), causal=True, interpret=interpret)
    return write_slice(out, operands.to), log_sums


def attention_backward(
    operands: AttentionOperands,
    results: ResultsAndCotangent,
    *,
    kv_heads: int,
    rows: Rows = "size_major",
    interpret: bool = False,
) -> tuple[Float[Array, "B N P D"], KeysAndValues | None]:
    """Return the cotangents of qkv and kv, as `interface.py` specifies."""
    results = read_slices(results)
    d_q, d_kv = _backward(_as_part(operands, kv_heads), results, causal=True, interpret=interpret)
    return (d_q, d_kv) if operands.kv is not None else (jnp.concatenate([d_q, d_kv], axis=2), None)


def part_forward(
    operands: PartOperands, *, interpret: bool = False
) -> tuple[Float[Array, "B Q H Dv"], Float[Array, "B Q H"]]:
    """Attend from one part of a sequence to another, as `interface.py` specifies."""
    return _forward(operands, causal=False, interpret=interpret)


def part_backward(
    operands: PartOperands, results: ResultsAndCotangent, *, interpret: bool = False
) -> tuple[Float[Array, "B Q H D"], Float[Array, "B K P D"] | KeysAndValues]:
    """Return the cotangents of `part_forward`'s q and kv, as `interface.py` specifies."""
    gradients = _backward(operands, results, causal=False, interpret=interpret)
    # Return float32, because the caller adds up the gradients of several parts.
    return jax.tree.map(lambda x: x.astype(jnp.float32), gradients)


def _as_part(operands: AttentionOperands, kv_heads: int) -> PartOperands:
    """Return the operands of attention from a sequence to itself, without the causal mask."""
    q, kv = operands.qkv, operands.kv
    if kv is None:
        q, kv = jnp.split(q, [q.shape[2] - 2 * kv_heads], axis=2)
    return PartOperands(
        q, kv, operands.scale, 0, operands.slopes, operands.segments, operands.window
    )


def _forward(operands: PartOperands, *, causal: bool, interpret: bool):
    """Return the attention output of one part and each softmax's log-sum-exp."""
    run = _interpreted if interpret else _run_cudnn
    mask = _Mask(causal, operands.window or 0)
    out, sums = run("forward", mask, *_with_entries(operands, causal))
    sums = sums.swapaxes(1, 2)
    if operands.slopes is not None:
        sums = sums - _of_positions(operands)
    return out[..., : operands.keys_and_values[1].shape[3]], sums


def _backward(
    operands: PartOperands, results: ResultsAndCotangent, *, causal: bool, interpret: bool
):
    """Return the cotangents of one part's queries, and of its keys and values."""
    arrays = _with_entries(operands, causal)
    sums = results.log_sums.astype(jnp.float32)
    if operands.slopes is not None:
        sums = sums + _of_positions(operands)
    padded = lambda x: entries.pad_vectors(x.astype(operands.q.dtype), arrays[0].shape[3])
    run = _interpreted if interpret else _run_cudnn
    saved = sums.swapaxes(1, 2), padded(results.d_out), padded(results.out)
    found = run("backward", _Mask(causal, operands.window or 0), *arrays, *saved)
    own = operands.q, *operands.keys_and_values
    d_q, *d_kv = (x[..., : of.shape[3]] for x, of in zip(found, own, strict=True))
    return (d_q * operands.scale).astype(d_q.dtype), operands.like_kv(*d_kv)


def _with_entries(operands: PartOperands, causal: bool):
    """Return queries, keys and values of equal size, with extra entries for ALiBi and segments."""
    k, v = operands.keys_and_values
    q, of_masks = (operands.q * operands.scale).astype(operands.q.dtype), []
    if operands.slopes is not None:
        positions = jnp.arange(k.shape[1])[None]
        if operands.segments is not None and not causal:
            positions = _of_seen_keys(positions, *operands.segments)
        of_masks.append(entries.of_positions(operands.slopes, positions, q.dtype))
    if operands.segments is not None:
        of_masks.append(entries.of_segments(*operands.segments, q.dtype))
    q = entries.append_entries(q, *(of_queries for of_queries, _ in of_masks))
    k = entries.append_entries(k, *(of_keys for _, of_keys in of_masks))
    # cuDNN requires queries, keys and values of equal size.
    size = max(q.shape[3], v.shape[3] + -v.shape[3] % 8)
    return tuple(entries.pad_vectors(x, size) for x in (q, k, v))


def _of_seen_keys(
    positions: Int[Array, "1 K"], queries: Int[Array, "B Q"], keys: Int[Array, "B K"]
) -> Int[Array, "B K"]:
    """Return the keys' positions, and for keys that no query sees, that of the first seen key.

    An unused entry of a cache lies after the keys that are seen. There, ALiBi's entries could
    exceed the term that keeps segments apart.
    """
    seen = jnp.any(queries[:, :, None] == keys[:, None, :], axis=1)
    return jnp.where(seen, positions, jnp.argmax(seen, axis=1, keepdims=True))


def _of_positions(operands: PartOperands):
    """Return the amount by which the extra entries for ALiBi make each query's logits too large.

    The entries add `slope j` in place of `-slope (i - j)`, where i is the query's position and j
    the key's. The difference is `slope i`.
    """
    slopes = operands.slopes.astype(jnp.float32)
    return slopes * (operands.shift + jnp.arange(operands.q.shape[1]))[:, None]


class _Mask(NamedTuple):
    """The mask that cuDNN's kernels apply.

    Attributes:
      causal: whether keys after the query are masked.
      window: the number of keys that a query sees, including the key at its own position; 0 means
        no limit. A window requires `causal`.
    """

    causal: bool
    window: int


def _interpreted(direction, shown, q, k, v, *saved):
    """Compute in plain JAX what cuDNN's kernels compute, for tests without a GPU."""
    length = k.shape[1]
    mask = reference.of_part(length, None)
    if shown.causal:
        window = shown.window or None
        mask = functools.partial(reference.visible, length=length, segment_ids=None, window=window)
    terms = reference.Terms(scale=1.0, slopes=None, shift=0, cap=None)
    if direction == "forward":
        out, sums = reference.forward(q, k, v, terms, mask)
        return out, sums.swapaxes(1, 2)
    sums, d_out, out = saved
    sums = sums.swapaxes(1, 2)
    gradients = reference.backward(q, k, v, out, sums, d_out, terms, mask)
    return tuple(x.astype(q.dtype) for x in gradients)


def _run_cudnn(direction, shown, *arrays):
    """Run cuDNN's kernel.

    Returns:
      The output and the log-sum-exps [B, H, N] in the forward direction, and the cotangents of q, k
      and v in the backward direction.
    """

    @custom_vmap
    def run(*arrays):
        return _custom_call(direction, shown, *arrays)

    @run.def_vmap
    def batched(size, is_batched, *arrays):
        arrays = (
            x if has_axis else jnp.broadcast_to(x, (size, *x.shape))
            for x, has_axis in zip(arrays, is_batched, strict=True)
        )
        results = run(*(x.reshape(-1, *x.shape[2:]) for x in arrays))
        results = tuple(x.reshape(size, -1, *x.shape[1:]) for x in results)
        return results, (True,) * len(results)

    return run(*arrays)


def _custom_call(direction, shown, q, k, v, *saved):
    B, N, H, _ = q.shape
    # In memory, tokens are before heads. Vectors include the extra entries for ALiBi and segments.
    rows = lambda x: jax.ShapeDtypeStruct((B, x.shape[2], x.shape[1], x.shape[3]), x.dtype)
    if direction == "forward":
        name, results = "__cudnn$fmhaSoftmax", [rows(q)]
        others = [jax.ShapeDtypeStruct((B, H, N), jnp.float32)]
    else:
        name, results, others = "__cudnn$fmhaSoftmaxBackward", [rows(q), rows(k), rows(v)], []
    # The last result is the kernel's workspace.
    workspace = jax.ShapeDtypeStruct((0,), jnp.uint8)
    layouts = [(0, 2, 1, 3)] * len(results) + [None] * (len(others) + 1)
    run = jax.ffi.ffi_call(
        name,
        [*results, *others, workspace],
        output_layouts=layouts,
        custom_call_api_version=2,
        legacy_backend_config=json.dumps(_config(direction, shown, q, k)),
    )
    *found, _ = run(q, k, v, *saved)
    tokens_first = [x.swapaxes(1, 2) for x in found[: len(results)]]
    return tuple(tokens_first + found[len(results) :])


# Dimension numbers of the matrix products: the contracted dimension of each operand, the batch
# dimensions of the left operand, and the batch dimensions of the right operand.
_PRODUCTS = {
    "forward": {
        "bmm1": ((3, 3), (0, 2), (0, 2)),
        "bmm2": ((3, 1), (0, 1), (0, 2)),
    },
    "backward": {
        "bmm1_grad_gemm1": ((2, 1), (0, 1), (0, 2)),
        "bmm1_grad_gemm2": ((3, 1), (0, 1), (0, 2)),
        "bmm2_grad_gemm1": ((2, 1), (0, 1), (0, 2)),
        "bmm2_grad_gemm2": ((3, 3), (0, 2), (0, 2)),
    },
}


def _config(direction, shown, q, k):
    """Return the custom call's backend config in the form that XLA parses."""
    B, N, H, _ = q.shape
    text = lambda numbers: [str(n) for n in numbers]
    products = {
        f"{name}_dot_dimension_numbers": {
            "lhs_contracting_dimensions": text([contracted[0]]),
            "rhs_contracting_dimensions": text([contracted[1]]),
            "lhs_batch_dimensions": text(lhs),
            "rhs_batch_dimensions": text(rhs),
        }
        for name, (contracted, lhs, rhs) in _PRODUCTS[direction].items()
    }
    logits = {
        "element_type": {"bfloat16": "BF16", "float16": "F16"}[q.dtype.name],
        "dimensions": text((B, H, N, k.shape[1])),
        "tuple_shapes": [],
        "layout": {
            "dim_level_types": [],
            "dim_unique": [],
            "dim_ordered": [],
            "minor_to_major": text((3, 2, 1, 0)),
            "tiles": [],
            "element_size_in_bits": "0",
            "memory_space": "0",
            "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
            "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
            "dynamic_shape_metadata_prefix_bytes": "0",
        },
        "is_dynamic_dimension": [False] * 4,
    }
    call = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": 1.0,
        "intermediate_tensor_shape": logits,
        "is_flash_attention": True,
        "mask_type": "CAUSAL" if shown.causal else "NO_MASK",
        **products,
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": shown.window,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
    }
    return {"operation_queue_id": "0", "cudnn_fmha_backend_config": call}
