"""Causal attention by cuDNN's fused kernels, on NVIDIA GPUs from Ampere on.

XLA knows them by the names of custom calls, as `jax.nn.dot_product_attention` has them; that one
has to find a GPU and cuDNN when it is traced, gives no log sums, and has a bias of all pairs of
tokens for what these kernels do not know: ALiBi and segments, which are `entries` here.
"""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float, Int

from pallas_kernels import tuned
from pallas_kernels.causal_attention import entries, reference
from pallas_kernels.causal_attention.reference import Segments, split

# Entries of a head, at most: before Hopper, and from it on.
_ENTRIES = {False: 128, True: 256}
_HOPPER = ("H100", "H200", "H800", "H20", "GH200", "B100", "B200", "GB200", "B300", "GB300")
_TOO_OLD = ("P100", "V100", "T4", "Quadro RTX", "TITAN", "GTX", "GeForce RTX 20")


def unsupported(
    op: str, qkv: Any, *others: Any, kv_heads: int | None = None, rows: str = "size_major"
) -> str | None:
    """Why cuDNN cannot serve the named op with these arrays, in a line; None if it can."""
    # Slopes and segments are the last two arguments of every op.
    slopes, segments = others[-2:]
    length = others[0].shape[1] if op.startswith("part_") else qkv.shape[1]
    kind = tuned.device_lowered_for()
    most = _ENTRIES[any(name in kind for name in _HOPPER)]
    if any(name in kind for name in _TOO_OLD):
        return f"cuDNN's fused attention on {kind} (Ampere or later)"
    if qkv.dtype not in (jnp.bfloat16, jnp.float16):
        return f"data vectors of {qkv.dtype} (bfloat16 or float16)"
    if slopes is not None and length > entries.POSITIONS:
        return f"ALiBi over {length} tokens (up to {entries.POSITIONS})"
    of_masks = 4 * (slopes is not None)
    of_masks += (segments is not None) * (entries.code_size(length) + 1)
    if qkv.shape[3] + of_masks > most:
        told = f" and {of_masks} entries for ALiBi and segments" if of_masks else ""
        return f"heads of size {qkv.shape[3]}{told} (up to {most} together)"
    return None


def attention_forward(
    qkv: Float[Array, "B N P D"],
    *,
    scale: Float[Array, ""] | int | float,
    slopes: Float[Array, " H"] | None = None,
    segment_ids: Int[Array, "B N"] | None = None,
    kv_heads: int | None = None,
    rows: str = "size_major",
    interpret: bool = False,
) -> tuple[Float[Array, "B N H D"], Float[Array, "B N H"]]:
    """The output, and the logarithm of each softmax's sum in float32."""
    segments = None if segment_ids is None else (segment_ids, segment_ids)
    given = *split(qkv, kv_heads), scale, 0, slopes, segments
    return _forward(*given, causal=True, interpret=interpret)


def attention_backward(
    qkv: Float[Array, "B N P D"],
    out: Float[Array, "B N H D"],
    log_sums: Float[Array, "B N H"],
    d_out: Float[Array, "B N H D"],
    *,
    scale: Float[Array, ""] | int | float,
    slopes: Float[Array, " H"] | None = None,
    segment_ids: Int[Array, "B N"] | None = None,
    kv_heads: int | None = None,
    rows: str = "size_major",
    interpret: bool = False,
) -> Float[Array, "B N P D"]:
    """The cotangent of qkv."""
    segments = None if segment_ids is None else (segment_ids, segment_ids)
    given = *split(qkv, kv_heads), scale, 0, slopes, segments
    gradients = _backward(*given, out, log_sums, d_out, causal=True, interpret=interpret)
    return jnp.concatenate(gradients, axis=2)


def part_forward(
    q: Float[Array, "B Q H D"],
    kv: Float[Array, "B K P D"],
    scale: Float[Array, ""] | int | float,
    shift: Int[Array, ""] | int,
    slopes: Float[Array, " H"] | None,
    segments: Segments | None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B Q H D"], Float[Array, "B Q H"]]:
    """Attention to an earlier part of the sequence; see the portable form."""
    given = q, *jnp.split(kv, 2, axis=2), scale, shift, slopes, segments
    return _forward(*given, causal=False, interpret=interpret)


def part_backward(
    q: Float[Array, "B Q H D"],
    kv: Float[Array, "B K P D"],
    out: Float[Array, "B Q H D"],
    log_sums: Float[Array, "B Q H"],
    d_out: Float[Array, "B Q H D"],
    scale: Float[Array, ""] | int | float,
    shift: Int[Array, ""] | int,
    slopes: Float[Array, " H"] | None,
    segments: Segments | None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B Q H D"], Float[Array, "B K P D"]]:
    """Cotangents of q and kv; out and log sums are those of all parts."""
    given = q, *jnp.split(kv, 2, axis=2), scale, shift, slopes, segments
    d_q, *d_kv = _backward(*given, out, log_sums, d_out, causal=False, interpret=interpret)
    # To be added up with those of other parts.
    return d_q.astype(jnp.float32), jnp.concatenate(d_kv, axis=2).astype(jnp.float32)


def _forward(q, k, v, scale, shift, slopes, segments, *, causal, interpret):
    """The output, and log sums."""
    arrays = _with_entries(q, k, v, scale, slopes, segments)
    run = _interpreted if interpret else _call
    out, sums = run("forward", causal, *arrays)
    sums = sums.swapaxes(1, 2)
    if slopes is not None:
        sums = sums - _of_positions(q, shift, slopes)
    return out[..., : q.shape[3]], sums


def _backward(q, k, v, scale, shift, slopes, segments, out, log_sums, d_out, *, causal, interpret):
    """Cotangents of q, k and v."""
    arrays = _with_entries(q, k, v, scale, slopes, segments)
    sums = log_sums.astype(jnp.float32)
    if slopes is not None:
        sums = sums + _of_positions(q, shift, slopes)
    out, d_out = (entries.padded(x.astype(q.dtype), arrays[0].shape[3]) for x in (out, d_out))
    run = _interpreted if interpret else _call
    gradients = run("backward", causal, *arrays, sums.swapaxes(1, 2), d_out, out)
    d_q, d_k, d_v = (x[..., : q.shape[3]] for x in gradients)
    return (d_q * scale).astype(d_q.dtype), d_k, d_v


def _with_entries(q, k, v, scale, slopes, segments):
    """Queries, keys and values of one size, whose logits are those of ALiBi within segments."""
    q, of_masks = (q * scale).astype(q.dtype), []
    if slopes is not None:
        of_masks.append(entries.of_positions(slopes, k.shape[1], q.dtype))
    if segments is not None:
        of_masks.append(entries.of_segments(*segments, q.dtype))
    q = entries.added(q, *(of_queries for of_queries, _ in of_masks))
    k = entries.added(k, *(of_keys for _, of_keys in of_masks))
    return q, k, entries.padded(v, q.shape[3])


def _of_positions(q, shift, slopes):
    """What logits have too much in every entry of a softmax, for ALiBi's are `slope j`."""
    return slopes * (shift + jnp.arange(q.shape[1]))[:, None]


def _interpreted(direction, causal, q, k, v, *saved):
    """What cuDNN computes, in plain JAX."""
    length = k.shape[1]
    mask = reference.of_part(length, None)
    if causal:
        mask = functools.partial(reference.visible, length=length, segment_ids=None)
    if direction == "forward":
        out, sums = reference.forward(q, k, v, 1.0, None, 0, mask)
        return out, sums.swapaxes(1, 2)
    sums, d_out, out = saved
    given = q, k, v, out, sums.swapaxes(1, 2), d_out
    gradients = reference.backward(*given, 1.0, None, 0, mask)
    return tuple(x.astype(q.dtype) for x in gradients)


def _call(direction, causal, *arrays):
    """cuDNN's kernel: out and log sums [B, H, N], or the cotangents of q, k and v."""

    @custom_vmap
    def run(*arrays):
        return _custom_call(direction, causal, *arrays)

    @run.def_vmap
    def batched(size, is_batched, *arrays):
        whole = (
            x if given else jnp.broadcast_to(x, (size, *x.shape))
            for x, given in zip(arrays, is_batched, strict=True)
        )
        results = run(*(x.reshape(-1, *x.shape[2:]) for x in whole))
        apart = tuple(x.reshape(size, -1, *x.shape[1:]) for x in results)
        return apart, (True,) * len(apart)

    return run(*arrays)


def _custom_call(direction, causal, q, k, v, *saved):
    B, N, H, _ = q.shape
    # Tokens before heads in memory, as the operands are; the size is that of all entries.
    rows = lambda x: jax.ShapeDtypeStruct((B, x.shape[2], x.shape[1], x.shape[3]), x.dtype)
    if direction == "forward":
        name, results = "__cudnn$fmhaSoftmax", [rows(q)]
        others = [jax.ShapeDtypeStruct((B, H, N), jnp.float32)]
    else:
        name, results, others = "__cudnn$fmhaSoftmaxBackward", [rows(q), rows(k), rows(v)], []
    # The last is where XLA puts what the kernel needs while it runs.
    workspace = jax.ShapeDtypeStruct((0,), jnp.uint8)
    layouts = [(0, 2, 1, 3)] * len(results) + [None] * (len(others) + 1)
    run = jax.ffi.ffi_call(
        name,
        [*results, *others, workspace],
        output_layouts=layouts,
        custom_call_api_version=2,
        legacy_backend_config=json.dumps(_config(direction, causal, q, k)),
    )
    *found, _ = run(q, k, v, *saved)
    tokens_first = [x.swapaxes(1, 2) for x in found[: len(results)]]
    return tuple(tokens_first + found[len(results) :])


# Dimensions over which products go, as XLA numbers them: contracted, then those of the batch.
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


def _config(direction, causal, q, k):
    """What XLA is told of the call, as jax tells it."""
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
        "mask_type": "CAUSAL" if causal else "NO_MASK",
        **products,
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": 0,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
    }
    return {"operation_queue_id": "0", "cudnn_fmha_backend_config": call}
