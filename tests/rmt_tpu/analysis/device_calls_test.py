"""The calls of a program become cases of its shapes and dtypes, up to a number of tokens."""

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels.platform import collecting_calls
from pallas_kernels.shapes import Depth, Heads, KeyVector
from pallas_kernels.target import lowering_for
from rmt_tpu.analysis import device_cases_layers as layers
from rmt_tpu.analysis import device_cases_residual as residual
from rmt_tpu.analysis import device_check
from rmt_tpu.analysis.device_calls import cases_of

SITE, TOKENS = KeyVector(16, 32, 4, 12), (2, 128)
CASES = {
    "key_vector": [
        residual.site(SITE, TOKENS, "float32", "rmsnorm"),
        residual.store(SITE._replace(P=0), TOKENS),
        residual.norm_retrieve(SITE._replace(R=0), TOKENS),
        residual.undo(SITE, TOKENS),
        residual.undo_and_reread(SITE._replace(R=1), TOKENS),
    ],
    "depth_attention": [
        residual.partial(Depth(2, 3, 128), (1, 256)),
        residual.merge(Depth(2, 1, 128), (1, 256)),
    ],
    "depth_attention_matrices": [residual.partial(Depth(2, 3, 512), TOKENS, (16, 32))],
    "merge_read": [residual.merge_read(Depth(2, 1, 512), TOKENS, (16, 32))],
    "causal_attention": [
        layers.attention(Heads(4, 64), TOKENS, alibi=True),
        layers.attention(Heads(4, 64), TOKENS, kv_heads=2, segments=False, order="head_major"),
        layers.attention(Heads(2, 64), TOKENS, values=32, dtype="float32"),
        layers.attention(Heads(4, 64), TOKENS, window=30, cap=1.5),
        layers.attention_to(Heads(2, 64), (2, 128), 256),
        layers.attention_to(Heads(2, 64), (2, 128), 256, cap=1.5),
    ],
    "delta_attention": [layers.delta((1, 128), Heads(1, 128))],
    "grouped_matmul": [layers.grouped(256, 128, 256, 4)],
    "token_rows": [layers.token_rows(64, 2, 128, 128)],
    "logits": [layers.logits(128, 128, 512)],
}
EACH = [(name, case) for name, cases in CASES.items() for case in cases]


def collected(case):
    """The calls of a case, traced as for a TPU."""
    inputs = jax.eval_shape(case.inputs)
    cotangents = device_check.abstract_cotangents(case, inputs)
    with lowering_for("TPU v5 lite"), collecting_calls() as calls:
        jax.eval_shape(device_check.results_and_gradients(case, "pallas"), inputs, cotangents)
    return calls


@pytest.mark.parametrize("name, case", EACH, ids=[f"{case.op} {case.size}" for _, case in EACH])
def test_a_call_becomes_the_case_that_it_is_of(name, case):
    calls = collected(case)
    assert calls and {call.name for call in calls} == {name}
    found = {(other.op, other.size): other for other in cases_of(calls, "tpu")[name]}
    assert jax.eval_shape(found[case.op, case.size].inputs) == jax.eval_shape(case.inputs)
    assert not cases_of(calls, "rocm")


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
