"""The calls of a program become cases of its shapes and dtypes, up to a number of tokens."""

import functools

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels.platform import collecting_calls, preferring
from pallas_kernels.shapes import Depth, Heads, KeyVector
from pallas_kernels.target import lowering_for
from rmt_tpu.analysis import device_cases_depth as depth
from rmt_tpu.analysis import device_cases_layers as layers
from rmt_tpu.analysis import device_cases_residual as residual
from rmt_tpu.analysis import device_check
from rmt_tpu.analysis.device_calls import cases_of
from rmt_tpu.analysis.device_cases_parts import attention_part
from tests.tiers import later

SITE, TOKENS = KeyVector(16, 32, 4, 12), (2, 128)
CASES = {
    "key_vector": [
        residual.site(SITE, TOKENS, "float32", "rmsnorm"),
        residual.store(SITE._replace(P=0), TOKENS),
        residual.norm_retrieve(SITE._replace(R=0), TOKENS),
        residual.undo(SITE, TOKENS),
        residual.undo(SITE, TOKENS, in_stacks=True),
        residual.undo_and_reread(SITE._replace(R=1), TOKENS),
        residual.undo_and_reread(SITE, TOKENS, again=5, in_stacks=True),
        residual.undo_and_reread(SITE, TOKENS, again=5, fraction_bits=7),
        residual.undo(SITE, TOKENS, fraction_bits=12),
        residual.undo(SITE, TOKENS, residual_dtype="float32"),
        residual.undo_and_reread(SITE, TOKENS, residual_dtype="float32"),
        residual.site(SITE, TOKENS, residual_dtype="float32"),
        residual.store(SITE._replace(P=0), TOKENS, residual_dtype="float32"),
        residual.store_forward(SITE._replace(P=0), TOKENS),
        residual.norm_retrieve(SITE._replace(R=0), TOKENS, residual_dtype="float32"),
    ],
    "depth_attention": [
        depth.partial(Depth(2, 3, 128), (1, 256)),
        depth.partial(Depth(2, 3, 128), (1, 256), prior=True),
        depth.partial_backward(Depth(2, 3, 128), (1, 256)),
        depth.merge(Depth(2, 1, 128), (1, 256)),
        depth.merge(Depth(2, 1, 128), (1, 256), norm="rmsnorm"),
    ],
    "depth_attention_matrices": [
        depth.partial(Depth(2, 3, 512), TOKENS, (16, 32)),
        depth.partial_backward(Depth(2, 3, 512), TOKENS, (16, 32), "float32"),
    ],
    "merge_read": [
        depth.merge_read(Depth(2, 1, 512), TOKENS, (16, 32), norm="rmsnorm", reads=4),
        depth.merge_read(Depth(2, 1, 512), TOKENS, (16, 32), residual_dtype="float32"),
    ],
    "causal_attention": [
        layers.attention(Heads(4, 64), TOKENS, alibi=True),
        layers.attention(Heads(4, 64), TOKENS, kv_heads=2, segments=False, order="head_major"),
        layers.attention(Heads(2, 64), TOKENS, values=32, dtype="float32"),
        layers.attention(Heads(4, 64), TOKENS, window=30, cap=1.5),
        layers.attention_in_stack(Heads(4, 64), TOKENS, kv_heads=2, alibi=True),
        layers.attention_to(Heads(2, 64), (2, 128), 256),
        layers.attention_to(Heads(2, 64), (2, 128), 256, cap=1.5),
        attention_part(Heads(4, 64), TOKENS, 256, kv_heads=2, alibi=True, cap=1.5),
        attention_part(Heads(2, 64), TOKENS, 128, values=32, segments=False, window=-40),
    ],
    "delta_attention": [layers.delta((1, 128), Heads(1, 128))],
    "grouped_matmul": [
        layers.grouped(256, 128, 256, 4),
        layers.grouped(256, 128, 256, 4, alignment=16),
    ],
    "token_rows": [layers.token_rows(64, 2, 128, 128)],
    "logits": [layers.logits(128, 128, 512)],
}
EACH = [(name, case) for name, cases in CASES.items() for case in cases]
LARGE = depth.partial(Depth(8, 9, 1024), (1, 8192))  # more bytes than a GPU's cache has


def collected(case):
    """The calls of a case, traced as for a TPU."""
    inputs = jax.eval_shape(case.inputs)
    cotangents = device_check.abstract_cotangents(case, inputs)
    with lowering_for("TPU v5 lite"), collecting_calls() as calls:
        jax.eval_shape(device_check.results_and_gradients(case, "pallas"), inputs, cotangents)
    return calls


@pytest.mark.parametrize(
    "name, case",
    [*EACH, *later(("depth_attention", LARGE))],
    ids=[f"{case.op} {case.size}" for case in [*(case for _, case in EACH), LARGE]],
)
def test_a_call_becomes_the_case_that_it_is_of(name, case):
    calls = collected(case)
    assert calls and {call.name for call in calls} == {name}
    found = {(other.op, other.size): other for other in cases_of(calls, "tpu")[name]}
    assert jax.eval_shape(found[case.op, case.size].inputs) == jax.eval_shape(case.inputs)
    assert not cases_of(calls, "rocm")


def test_plain_jax_in_place_of_a_kernel_is_not_compared_with_itself():
    """There is nothing to check or time, because "pallas" is plain JAX for this op on a GPU."""
    case = depth.merge_read(Depth(2, 1, 512), TOKENS, (16, 32), reads=16)
    calls = collected(case)
    assert cases_of(calls, "tpu") and not cases_of(calls, "cuda")
    with preferring("mosaic_gpu"), collecting_calls() as calls:
        jax.eval_shape(lambda x: case.function(None, **x), jax.eval_shape(case.inputs))
    assert "cuda" in calls[0].platforms


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(residual.site, SITE, TOKENS),
        functools.partial(residual.norm_retrieve, SITE, TOKENS),
        functools.partial(residual.undo, SITE, TOKENS),
        functools.partial(residual.undo_and_reread, SITE, TOKENS),
        functools.partial(depth.merge, Depth(2, 1, 128), TOKENS),
        functools.partial(depth.merge_read, Depth(2, 1, 512), TOKENS, (16, 32)),
    ],
    ids=lambda make: make.func.__name__,
)
def test_a_norm_has_a_record_of_its_own(make):
    assert make(norm="layernorm").size != make(norm="rmsnorm").size


@pytest.mark.slow
def test_the_parts_of_ring_attention_are_checked_with_their_gradients():
    """The case has grouped heads, ALiBi and segments, and half of a device's tokens."""
    slopes, ids = jnp.ones(4), jnp.zeros((1, 256), jnp.int32)

    def loss(qkv):
        options = {"scale": 0.1, "slopes": slopes, "segment_ids": ids, "kv_heads": 2, "over": "s"}
        run = lambda x: pallas_kernels.causal_attention(x, **options, implementation="pallas")
        spec = jax.P(None, "s")
        out = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(qkv)
        return out.astype(jnp.float32).sum()

    mesh = jax.make_mesh((1,), ("s",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    with lowering_for("TPU v5 lite"), collecting_calls() as calls:
        jax.eval_shape(jax.grad(loss), jax.ShapeDtypeStruct((1, 256, 8, 64), jnp.bfloat16))
    want = attention_part(Heads(4, 64), (1, 128), 128, kv_heads=2, alibi=True)
    assert {"part_forward", "part_backward"} < {call.op for call in calls}
    found = {case.size: case for case in cases_of(calls, "tpu")["causal_attention"]}
    assert found[want.size].op == "attention_part" and found[want.size].gradients
    assert "attention_to" not in {case.op for case in found.values()}


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["pallas", "xla"])
@pytest.mark.parametrize(
    "case",
    [case for case in CASES["causal_attention"] if case.op == "attention_part"],
    ids=lambda case: case.size,
)
def test_a_part_passes_its_own_check(case, implementation):
    interpret = implementation == "pallas"
    row = device_check.check(case, implementation, interpret=interpret, timed=False)
    assert row.ok, row.verdict
    assert row.implementation == ("interpreted" if interpret else "xla")
    names = {name.removesuffix(" (rms)") for name in row.differences}
    assert {"out", "log_sums", "d_q"} < names


def test_many_tokens_are_cut_by_rows_first():
    keys, read = jnp.zeros((16, 64)), jnp.zeros((48, 64))
    gain = jnp.ones((64, 64))

    def sites(residual, data):
        return pallas_kernels.store_norm_retrieve(
            residual, keys, data, gain, read, implementation="pallas"
        )

    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    with lowering_for("TPU v5 lite"), collecting_calls() as calls:
        jax.eval_shape(sites, shape(64, 512, 64, 64), shape(64, 512, 16, 64))
        jax.eval_shape(sites, shape(2, 16384, 64, 64), shape(2, 16384, 16, 64))
    found = [case.size.split()[0] for case in cases_of(calls, "tpu")["key_vector"]]
    assert found == ["16x512", "1x8192"]
