"""Blocks of attention that rules choose fit the chip that is lowered for, and are right."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import UnsupportedImplementation, causal_attention
from pallas_kernels.causal_attention import block_sizes, mosaic_tpu
from pallas_kernels.causal_attention.interface import AttentionOperands, ResultsAndCotangent
from pallas_kernels.causal_attention.mosaic_tpu_masks import Mask
from pallas_kernels.target import lowering_for
from tests.pallas_kernels.causal_attention_battery import Battery, Case
from tests.tiers import later

KINDS = ("TPU v4", "TPU v5", "TPU v6 lite")
HEADS = ((8, 8), (20, 20), (16, 8), (8, 1))
SIZES = ((64, 64), (128, 128), (192, 128), (256, 256))
TOKENS = (1152, 4096, 32768)


@pytest.mark.parametrize("kind", KINDS)
def test_no_default_is_one_that_a_table_may_not_have(kind):
    with lowering_for(kind):
        for (heads, kv_heads), (size, value_size), tokens, dtype in itertools.product(
            HEADS, SIZES, TOKENS, ("bfloat16", "float32")
        ):
            kernel = "attention_blocks_backward"
            key = {"heads": heads, "kv_heads": kv_heads, "size": size, "value_size": value_size}
            key |= {"dtype": dtype, "rows": "head_major"}
            blocks = block_sizes.default_blocks(kernel, tokens, **key)
            assert block_sizes._refused(kernel, key, tokens, blocks) is None, (key, tokens)


def test_what_no_block_fits_is_refused_in_a_line():
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)

    def refused(heads, size, kind="TPU v5"):
        given = AttentionOperands(array(1, 2048, heads + 2, size), 0.1)
        out = array(1, 2048, heads, size)
        attended = ResultsAndCotangent(out, array(1, 2048, heads), out)
        with lowering_for(kind):
            return mosaic_tpu.unsupported("attention_backward", given, attended, kv_heads=1)

    assert refused(16, 256) is None
    why = "128 query heads of size 256 per key head: a block does not fit in VMEM"
    assert refused(128, 256) == why
    assert refused(64, 128, "TPU v4") is not None and refused(64, 128) is None


@pytest.mark.parametrize("apart", [False, True])
def test_what_no_block_fits_backward_is_refused_forward(apart):
    """Also if one array has queries, keys and values, and so does not say how many are which."""
    keys = [jax.ShapeDtypeStruct((1, 2048, 1, 256), jnp.bfloat16)] * 2

    def attend(heads):
        q = jax.ShapeDtypeStruct((1, 2048, heads + (not apart) * 2, 256), jnp.bfloat16)
        options = {"scale": 0.1, "kv_heads": 1, "implementation": "mosaic_tpu"}
        op = lambda q, kv: causal_attention(q, kv=tuple(kv) if apart else None, **options)
        return jax.eval_shape(op, q, keys)

    with lowering_for("TPU v4"):
        assert attend(16).shape == (1, 2048, 16, 256)
        with pytest.raises(UnsupportedImplementation, match="48 query heads of size 256 per key"):
            attend(48)


@pytest.mark.parametrize("size", [128, 256, 512, 1024])
@pytest.mark.parametrize("tokens", [1024, 3072])
def test_the_share_that_is_computed_is_that_of_the_tiles(size, tokens):
    blocks = block_sizes.Blocks(size, size, 1)
    call, count = SimpleNamespace(blocks=blocks), tokens // size
    entries = lambda tiles: sum(
        (x.keys.stop - x.keys.start) * (x.queries.stop - x.queries.start) for x in tiles
    )
    share = block_sizes.computed_share(blocks, tokens)
    for tiles in (Mask.by_queries, Mask.by_keys):
        whole, diagonal = (
            entries(tiles(mask, call, [(0, 0)])) for mask in (Mask(), Mask(True, ahead=0))
        )
        assert whole == size**2
        pairs = count * (count + 1) / 2
        assert share * pairs * whole == count * diagonal + (pairs - count) * whole


class TestByDefault(Battery):
    """Of more tokens than kernels take whole, and of large heads."""

    module = mosaic_tpu
    cases = later(
        (Case((1, 1300, 2, 16), "float32", alibi=True, segments=True, kv_heads=1),),
        (Case((1, 2100, 2, 16), "float32", kv_heads=2),),
        (Case((1, 1152, 1, 192), "bfloat16", segments=True, kv_heads=1),),
        (Case((1, 1152, 1, 256), "bfloat16", segments=True, kv_heads=1),),
    )
