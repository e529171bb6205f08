"""Attention over a divided sequence is attention over the whole one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels import causal_attention
from pallas_kernels.causal_attention import cudnn, mosaic_tpu, reference
from pallas_kernels.causal_attention.block_sizes import Blocks
from pallas_kernels.causal_attention.interface import (
    AttentionOperands,
    PartOperands,
    ResultsAndCotangent,
)
from pallas_kernels.target import Target, lowering_for
from tests.closeness import assert_close
from tests.tiers import later

B, HEADS, KV_HEADS, SIZE = 2, 4, 2, 8
SLOPES = np.array([0.5, 0.25, 0.1, 0.05])
# Of an array's largest entry; bfloat16 has as many roundings as there are parts of keys.
FLOAT32, BFLOAT16 = 2.0**-18, 2.0**-6


def draw(seed, *shape, dtype="float32"):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def divided(devices, **options):
    """The op over a ring, of global arrays."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("sequence",))
    tokens = PartitionSpec(None, "sequence")

    def op(qkv, segment_ids):
        return causal_attention(qkv, segment_ids=segment_ids, over="sequence", **options)

    whole = PartitionSpec()
    return jax.shard_map(op, mesh=mesh, in_specs=(tokens, whole), out_specs=tokens, check_vma=False)


def with_gradient(op, qkv, ids, d_out):
    def run(qkv, ids, d_out):
        out, pullback = jax.vjp(lambda qkv: op(qkv, ids), qkv)
        return out, pullback(d_out)[0]

    return jax.jit(run)(qkv, ids, d_out)


@pytest.mark.parametrize(
    "devices, with_ids", [(3, True), *later((2, False), (4, True), (8, False))]
)
def test_a_ring_is_the_whole_sequence(devices, with_ids):
    length = 4 * devices
    options = {"scale": 0.3, "slopes": jnp.asarray(SLOPES), "kv_heads": KV_HEADS}
    with jax.enable_x64(True):
        qkv = draw(0, B, length, HEADS + 2 * KV_HEADS, SIZE, dtype="float64")
        d_out = draw(1, B, length, HEADS, SIZE, dtype="float64")
        ids = np.sort(np.random.default_rng(2).integers(0, 3, (B, length)).astype("int32"))
        ids = ids if with_ids else None
        whole = lambda qkv, ids: causal_attention(qkv, segment_ids=ids, **options)
        wanted = with_gradient(whole, qkv, ids, d_out)
        assert_close(with_gradient(divided(devices, **options), qkv, ids, d_out), wanted, 1e-13)


def test_values_of_a_size_of_their_own_go_round():
    mesh = Mesh(np.array(jax.devices()[:2]), ("sequence",))
    tokens = PartitionSpec(None, "sequence")
    q, k = draw(0, B, 8, HEADS, SIZE), draw(1, B, 8, KV_HEADS, SIZE)
    v, d_out = draw(2, B, 8, KV_HEADS, 5), draw(3, B, 8, HEADS, 5)

    def op(q, k, v, **options):
        return causal_attention(q, kv=(k, v), scale=0.3, **options)

    ring = jax.shard_map(
        functools.partial(op, over="sequence"), mesh=mesh, in_specs=3 * (tokens,),
        out_specs=tokens, check_vma=False,
    )  # fmt: skip

    def both(op, *arrays):
        out, pullback = jax.vjp(op, *arrays)
        return out, pullback(d_out)

    got, wanted = (jax.jit(functools.partial(both, f))(q, k, v) for f in (ring, op))
    assert_close(got, wanted, FLOAT32)


def test_what_a_ring_cannot_have_is_told():
    with pytest.raises(ValueError, match="over sequence has 3 tokens per device; legal: an even"):
        jax.eval_shape(divided(2, scale=1.0), jnp.ones((1, 6, 3, 8)), jnp.zeros((1, 6), jnp.int32))
    part = jnp.ones((1, 100, 2, 8))
    assert "100 queries" in mosaic_tpu.unsupported(
        "x", PartOperands(part, part, 1.0, 0, None, None)
    )


@pytest.mark.parametrize(
    "kernels, dtype, queries, keys, added",
    [
        (mosaic_tpu, "float32", 256, 128, ("slopes", "segments")),
        (cudnn, "bfloat16", 96, 160, ("slopes", "segments")),
        *later(
            (mosaic_tpu, "bfloat16", 128, 384, ("slopes",)),
            (mosaic_tpu, "float32", 384, 256, ()),
            (cudnn, "float16", 100, 60, ()),
        ),
    ],
)
def test_kernels_of_a_part_equal_plain_attention(kernels, dtype, queries, keys, added):
    q = draw(0, B, queries, HEADS, SIZE).astype(dtype)
    kv = draw(1, B, keys, 2 * KV_HEADS, SIZE).astype(dtype)
    d_out = draw(2, B, queries, HEADS, SIZE).astype(dtype)
    slopes = jnp.asarray(SLOPES / 32, jnp.float32) if "slopes" in added else None
    ids = [np.sort(np.random.default_rng(n).integers(0, 3, (B, n))) for n in (queries, keys)]
    segments = tuple(x.astype("int32") for x in ids) if "segments" in added else None
    shared = np.float32(0.3), np.int32(512), slopes, segments

    @functools.partial(jax.jit, static_argnums=0)
    def run(module, q, kv, d_out, shared):
        options = {} if module is reference else {"interpret": True}
        given = PartOperands(q, kv, *shared)
        out, sums = module.part_forward(given, **options)
        # As if there were other keys too: weights do not add up to one, nor are there none.
        seen = sums > -500
        attended = ResultsAndCotangent(out, jnp.where(seen, sums + 0.5, 0), d_out)
        gradients = module.part_backward(given, attended, **options)
        return jnp.where(seen[..., None], out, 0), jnp.where(seen, sums, 0), gradients

    got, wanted = (run(module, q, kv, d_out, shared) for module in (kernels, reference))
    assert_close(got, wanted, FLOAT32 if dtype == "float32" else BFLOAT16)


def operands_in_bfloat16(queries, keys):
    """Return operands of attention to another part whose keys are all visible, and a cotangent."""
    array = lambda *shape: jnp.asarray(draw(sum(shape), *shape), jnp.bfloat16)
    q, kv, d_out = (array(1, n, 2, SIZE) for n in (queries, keys, queries))
    sums = jnp.full((1, queries, 2), np.log(keys), jnp.float32)
    given = PartOperands(q, (kv, kv), np.float32(0.3), np.int32(0), None, None)
    return given, ResultsAndCotangent(jnp.zeros_like(q), sums, d_out)


def test_gradients_that_callers_add_up_are_not_rounded():
    gradients = mosaic_tpu.part_backward(*operands_in_bfloat16(128, 128), interpret=True)
    for x in jax.tree.leaves(gradients):
        assert x.dtype == jnp.float32 and np.mean(x != x.astype(jnp.bfloat16)) > 0.9


@pytest.mark.slow
def test_sums_over_spans_of_queries_are_rounded_once(monkeypatch):
    """The gradients equal those of one span, whose sums are in another order."""
    given, results = operands_in_bfloat16(256, 256)
    whole = AttentionOperands(given.q, given.scale, kv=given.kv)
    blocks = Blocks(128, 128, 1)

    def run():
        options = {"kv_heads": 2, "rows": "head_major", "blocks": blocks, "interpret": True}
        return mosaic_tpu.attention_backward(whole, results, **options)[1]

    of_one = run()
    monkeypatch.setattr(Target, "vmem_part", lambda *_: 1)
    for one, two in zip(of_one, run(), strict=True):
        assert one.dtype == two.dtype == jnp.bfloat16 and np.mean(one == two) > 0.99


@pytest.mark.parametrize("each, of_q", [(16, "float32"), (24, "bfloat16")])
def test_gradients_of_parts_are_wide_where_they_fit(each, of_q):
    """A v4 has no room for the queries' if there are many per key."""
    array = lambda heads: jax.ShapeDtypeStruct((1, 512, heads, 256), jnp.bfloat16)
    given = PartOperands(array(each), (array(1),) * 2, 0.1, 0, None, None)
    sums = jax.ShapeDtypeStruct((1, 512, each), jnp.float32)

    def run(given, results):
        assert mosaic_tpu.unsupported("part_backward", given, results) is None
        return mosaic_tpu.part_backward(given, results)

    with lowering_for("TPU v4"):
        attended = ResultsAndCotangent(array(each), sums, array(each))
        jaxpr = jax.make_jaxpr(run)(given, attended)
    kernels = [x for x in jaxpr.eqns if x.primitive.name == "custom_vmap_call"]
    found = {(x.aval.shape[1], x.aval.dtype.name) for kernel in kernels for x in kernel.outvars}
    assert found == {(1, "float32"), (each, of_q)}


@pytest.mark.compile
@pytest.mark.parametrize("target", ["v5e:2x2", *later("v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")])
def test_a_ring_compiles_for_tpu(target):
    """Kernels for own and for other parts, and nothing of all tokens' keys is gathered."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=target)
    devices = topology.devices[:4]
    mesh = Mesh(np.array(devices), ("sequence",))
    tokens = PartitionSpec(None, "sequence")

    def gradient(qkv, ids):
        op = lambda qkv: causal_attention(
            qkv, scale=0.1, slopes=jnp.full(16, 0.1), segment_ids=ids, over="sequence"
        )
        out, pullback = jax.vjp(op, qkv)
        return pullback(out)[0]

    step = jax.shard_map(
        gradient, mesh=mesh, in_specs=(tokens, PartitionSpec()), out_specs=tokens, check_vma=False
    )
    place = lambda spec: jax.sharding.NamedSharding(mesh, spec)
    length = 1024 * len(devices)
    qkv = jax.ShapeDtypeStruct((1, length, 48, 64), jnp.bfloat16, sharding=place(tokens))
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=place(PartitionSpec()))
    text = jax.jit(step).lower(qkv, ids).compile().as_text()
    for kernel in ("attention_blocks_forward", "attention_blocks_backward"):
        assert kernel in text
    assert "collective-permute" in text and "all-gather" not in text
