"""The test cases for a device's kernels: every op, at two scales."""

from collections.abc import Callable, Iterator
from typing import Literal

from pallas_kernels import shapes
from pallas_kernels.shapes import Depth, Heads, KeyVector
from rmt_tpu.analysis import device_cases_depth as depth
from rmt_tpu.analysis import device_cases_layers as layers
from rmt_tpu.analysis import device_cases_residual as residual
from rmt_tpu.analysis.device_case import DeviceCase
from rmt_tpu.analysis.device_cases_parts import attention_part

Scale = Literal["real", "small"]


def cases(scale: Scale) -> list[DeviceCase]:
    """Return test cases for all ops, with sizes of models or the smallest sizes of kernels.

    Some cases have an odd number of tokens.
    """
    return [case for op in OPS.values() for case in op(scale)]


def _key_vector(scale: Scale) -> Iterator[DeviceCase]:
    if scale == "small":
        sites = [(KeyVector(8, 16, 3, 5), (1, 130)), (KeyVector(16, 32, 2, 3), (2, 129))]
    else:
        sites = [(shapes.RMT_305M, shapes.TOKENS), (shapes.RMT_134M, (5, 1001))]
    for size, tokens in sites:
        yield residual.site(size, tokens)
        yield residual.store(size, tokens)
        yield residual.norm_retrieve(size, tokens)
        yield residual.undo(size, tokens)
        yield residual.undo_and_reread(size, tokens)
        yield residual.site_at(size, tokens[0])
    yield residual.site(*sites[1], norm="rmsnorm")
    yield residual.undo(*sites[1], norm="rmsnorm")
    yield residual.undo(*sites[1], residual_dtype="float32")
    yield residual.undo_and_reread(*sites[1], fraction_bits=7, again=1)
    yield residual.store_forward(*sites[0])
    yield residual.norm_retrieve(*sites[1], residual_dtype="float32")
    yield residual.undo(*sites[0], in_stacks=True)
    yield residual.undo_and_reread(*sites[0], in_stacks=True)
    if scale == "real":  # Tiles of this residual do not fit in a TPU's VMEM as a whole.
        yield residual.undo(shapes.RMT_305M._replace(K=1024), (1, 512))


def _depth(scale: Scale) -> Iterator[DeviceCase]:
    if scale == "small":
        vectors = [(Depth(2, 3, 128), (1, 37)), (Depth(1, 4, 256), (2, 24))]
        matrices = [(Depth(2, 3, 128), (1, 130), (8, 16)), (Depth(1, 2, 512), (2, 131), (16, 32))]
    else:
        vectors = [(shapes.OVER_BLOCKS, shapes.TOKENS), (Depth(8, 9, 1024), (5, 701))]
        matrices = [
            (Depth(2, 9, 4096), (4, 512), (64, 64)),
            (Depth(2, 5, 2048), (3, 401), (32, 64)),
        ]
    for size, tokens in vectors:
        yield depth.depth_attention(size, tokens)
        yield depth.partial(size, tokens)
        yield depth.merge(size, tokens)
        yield depth.merge_at(size, tokens[0])
    yield depth.partial_backward(*vectors[0])
    yield depth.partial(*vectors[1], prior=True)
    yield depth.merge(*vectors[1], norm="rmsnorm")
    yield depth.merge(*vectors[1], norm=None)
    for size, tokens, matrix in matrices:
        yield depth.partial(size, tokens, matrix)
        yield depth.merge(size, tokens, matrix)
        yield depth.merge_read(size, tokens, matrix)
    yield depth.partial_backward(*matrices[1])
    yield depth.partial(*matrices[0], prior=True)
    yield depth.merge_read(*matrices[1], norm="rmsnorm")


def _depth_sums(scale: Scale) -> Iterator[DeviceCase]:
    small = scale == "small"
    yield depth.sums(*((Depth(4, 3, 128), (144,)) if small else (Depth(4, 25, 1024), (8192,))))
    yield depth.sums(*((Depth(1, 2, 256), (1, 128)) if small else (Depth(4, 13, 768), (3, 1360))))


def _attention(scale: Scale) -> Iterator[DeviceCase]:
    if scale == "small":
        # The cases include full and partial blocks, a single key head, and a head size that does
        # not divide the number of vector lanes.
        whole = [
            (Heads(2, 16), (1, 128), {}),
            (Heads(2, 16), (2, 131), {"kv_heads": 1, "alibi": True}),
            (Heads(1, 120), (1, 40), {"window": 9, "cap": 1.5}),
        ]
        after = [
            (Heads(2, 16), (1, 128), 128, {}),
            (Heads(2, 16), (2, 37), 45, {"kv_heads": 1, "alibi": True}),
        ]
        decode = [(Heads(2, 16), (1, 128), 128), (Heads(2, 16), (2, 3), 45)]
        parts = [(Heads(2, 16), (1, 128), 128, {"kv_heads": 1, "alibi": True})]
    else:
        whole = [
            (shapes.GPT2_405M, shapes.TOKENS, {}),
            (shapes.GPT2_160M, (4, 1023), {}),
            (Heads(16, 128), (1, 4096), {}),
            (Heads(16, 128), (1, 4096), {"kv_heads": 4, "window": 1024}),
            (shapes.GPT2_405M, (2, 2100), {"kv_heads": 4, "alibi": True}),
            (shapes.GEMMA2_2B, (1, 4096), {"kv_heads": 4, "window": 1024, "cap": 1.5}),
            # cuDNN supports only some of these head sizes, and fewer with segment ids, which make
            # heads larger.
            *[(Heads(4, size), (2, 512), {}) for size in (64, 120, 128, 256)],
        ]
        after = [
            (shapes.GPT2_405M, (2, 512), 2048, {}),
            (Heads(16, 128), (1, 255), 1001, {"kv_heads": 4, "alibi": True}),
        ]
        decode = [(shapes.GPT2_405M, (8, 1), 2048), (Heads(16, 128), (4, 1), 1001)]
        parts = [(Heads(16, 128), (1, 2048), 2048, {"kv_heads": 4, "alibi": True})]
    for size, tokens, options in whole:
        yield layers.attention(size, tokens, **options)
    yield layers.attention_in_stack(*whole[0][:2])
    yield layers.attention_in_stack(*whole[1][:2], **whole[1][2])
    for size, tokens, before, options in after:
        yield layers.attention_after(size, tokens, before, **options)
    for size, tokens, before in decode:
        yield layers.attention_to(size, tokens, before)
    for size, tokens, keys, options in parts:
        yield attention_part(size, tokens, keys, **options)


def _delta(scale: Scale) -> Iterator[DeviceCase]:
    if scale == "small":
        yield layers.delta((1, 67), Heads(1, 128), stepwise=True)
        yield layers.delta((2, 64), Heads(1, 128), stepwise=True)
    else:
        yield layers.delta((1, 4096), Heads(16, 128))
        yield layers.delta((3, 701), Heads(8, 128))


def _grouped(scale: Scale) -> Iterator[DeviceCase]:
    if scale == "small":
        yield layers.grouped(301, 128, 128, 3, rowwise=True)
        yield layers.grouped(256, 128, 256, 2, rowwise=True)
        yield layers.grouped(320, 128, 256, 3, alignment=16, rowwise=True)
    else:
        yield layers.grouped(8192, 1024, 2048, 16)
        yield layers.grouped(5001, 768, 1024, 7)
        yield layers.grouped(8192, 2304, 2048, 8, alignment=128)


def _stacked_product(scale: Scale) -> Iterator[DeviceCase]:
    small = scale == "small"
    yield layers.stacked_product(*((1, 2, 72, 200) if small else (1, 3, 1264, 1088)))
    yield layers.stacked_product(*((37, 1, 64, 256) if small else (256, 2, 1024, 2816)))


def _token_rows(scale: Scale) -> Iterator[DeviceCase]:
    small = scale == "small"
    yield layers.token_rows(*((71, 2, 43, 128) if small else (4096, 8, 8192, 1024)))
    yield layers.token_rows(*((64, 3, 192, 256) if small else (1001, 4, 1500, 768)))


def _logits(scale: Scale) -> Iterator[DeviceCase]:
    small = scale == "small"
    yield layers.logits(*((71, 128, 301) if small else (4096, 1024, 50257)))
    yield layers.logits(*((64, 256, 512) if small else (1001, 768, 32000)))


OPS: dict[str, Callable[[Scale], Iterator[DeviceCase]]] = {
    "key_vector": _key_vector,
    "depth_attention": _depth,
    "depth_sums": _depth_sums,
    "attention": _attention,
    "delta_attention": _delta,
    "grouped_matmul": _grouped,
    "stacked_product": _stacked_product,
    "token_rows": _token_rows,
    "logits": _logits,
}
