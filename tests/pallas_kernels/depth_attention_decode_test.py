"""Depth attention of a few tokens: its kernels against float64 NumPy, and compiled.

Tolerances: sums are float32's, of some hundred terms; what is bfloat16 is rounded once.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import pallas_kernels
from pallas_kernels.depth_attention import mosaic_tpu, mosaic_tpu_decode, xla
from pallas_kernels.depth_attention.interface import MergeAt, Partial
from pallas_kernels.target import lowering_for
from tests.closeness import assert_close, float64
from tests.pallas_kernels import plain
from tests.pallas_kernels.depth_attention_battery import EPSILON, NORM_EPSILON, draw
from tests.tiers import later

TOLERANCE = {"bfloat16": 2.0**-8, "float32": 5e-6}
# Tokens, size, dtype, norm, and whether the running sum counts: one token of no whole tiles, and
# more than are in a grid step.
CASES = [
    (1, 72, "float32", "layernorm", True),
    (37, 136, "bfloat16", "rmsnorm", True),
    *later(((3, 128, "bfloat16", "layernorm", False),), ((32, 200, "float32", "rmsnorm", True),)),
]
SITES, SITE, LAYERS, LAYER = 3, 1, 4, 2


@pytest.mark.parametrize("count", [5, 3, 1, 0])
def test_phase_one_equals_numpy(count):
    T, D, dtype = 37, 72, "bfloat16"
    queries, sources = draw(1, SITES, D), draw(2, 5, T, D, dtype=dtype)
    sources[count:] = np.nan
    given = Partial(*map(jnp.asarray, (queries, sources)), jnp.int32(count))
    assert mosaic_tpu_decode.serves(given)
    mixed, log_sums = mosaic_tpu.partial(given, epsilon=EPSILON, interpret=True)
    assert mixed.dtype == dtype
    if count == 0:
        assert not np.any(float64(mixed)) and np.all(np.isneginf(log_sums))
        return
    zeros = np.zeros(mixed.shape), np.zeros(log_sums.shape)
    want, _ = plain.partial(queries, sources[:count], None, zeros, epsilon=EPSILON)
    assert_close(mixed, want[0], TOLERANCE[dtype])
    assert_close(log_sums, want[1], TOLERANCE["float32"])
    if count == 1:  # bit for bit
        np.testing.assert_array_equal(mixed, np.broadcast_to(sources[:1], mixed.shape))


def test_a_prior_and_many_tokens_are_for_the_other_kernel():
    few = Partial(jnp.zeros((2, 8)), jnp.zeros((3, 4, 8)), jnp.int32(3))
    assert mosaic_tpu_decode.serves(few)
    prior = jnp.zeros((2, 4, 8)), jnp.zeros((2, 4))
    assert not mosaic_tpu_decode.serves(few._replace(prior=prior))
    assert not mosaic_tpu_decode.serves(few._replace(sources=jnp.zeros((3, 128, 8))))
    assert not mosaic_tpu_decode.serves(few._replace(queries=jnp.zeros((64, 8))))


def merged(case) -> MergeAt:
    T, D, dtype, _, active = case
    return MergeAt(
        jnp.asarray(draw(3, LAYERS, 2, D)),
        jnp.int32(LAYER),
        jnp.asarray(draw(4, SITES, T, D, dtype=dtype)),
        jnp.asarray(draw(5, SITES, T)),
        jnp.int32(SITE),
        jnp.asarray(draw(6, T, D, dtype=dtype)),
        jnp.bool(active),
    )


def the_op(given: MergeAt, **options):
    parameters, layer, mixed, log_sums, site, current, active = given
    args = (layer, parameters, mixed, log_sums, site, current)
    return pallas_kernels.depth_attention_merge_at(*args, active=active, **options)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_phase_two_equals_numpy(case):
    given, (_, _, dtype, norm, active) = merged(case), case
    options = {"norm": norm, "epsilon": EPSILON, "norm_epsilon": NORM_EPSILON}
    query, gain = given.parameters[LAYER]
    sealed = given.mixed[SITE], given.log_sums[SITE], given.current
    want, _ = plain.merge(query, *sealed, gain, given.current, active=active, **options)
    by_kernel = jax.jit(lambda given: mosaic_tpu_decode.merge_at(given, **options, interpret=True))
    others = jax.jit(lambda given: (xla.merge_at(given, **options), the_op(given, **options)))
    for found in (by_kernel(given), *others(given)):
        assert found.dtype == dtype
        assert_close(found, want, TOLERANCE[dtype])
    # Before the first block nothing is sealed, and the sum is all there is.
    empty = given._replace(log_sums=jnp.full_like(given.log_sums, -jnp.inf), active=jnp.bool(True))
    want, _ = plain.normed(float64(given.current), -1, norm, NORM_EPSILON)
    found = by_kernel(empty)
    assert_close(found, float64(gain) * want, TOLERANCE[dtype])


def test_what_does_not_fit_is_named(unannotated):
    given = merged(CASES[0])
    for name, wrong in {"mixed": given.mixed[:, :, 1:], "log_sums": given.log_sums[1:]}.items():
        message = f"shapes do not fit.* {name} .* has shape {re.escape(str(wrong.shape))}"
        with pytest.raises(ValueError, match=message):
            the_op(given._replace(**{name: wrong}))
    half = given._replace(current=given.current.astype(jnp.float16))
    with pytest.raises(pallas_kernels.UnsupportedImplementation, match="neither bfloat16"):
        the_op(half, implementation="mosaic_tpu")


@pytest.mark.compile
@pytest.mark.parametrize(
    "topology, tokens, size, dtype",
    [
        ("v5e:2x2", 1, 1264, "bfloat16"),
        ("v5p:2x2x1", 1, 1280, "bfloat16"),
        ("v6e:2x2", 37, 1264, "bfloat16"),
        ("tpu7x:2x2x1", 1, 72, "float32"),
        *later(("v5e:2x2", 127, 1280, "float32"), ("v6e:2x2", 1, 7168, "bfloat16")),
    ],
)
def test_phases_compile_and_take_no_slices(topology, tokens, size, dtype):
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    case = (tokens, size, dtype, "rmsnorm", True)
    shapes = jax.eval_shape(lambda: (merged(case), jnp.zeros((9, tokens, size), dtype)))
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device)),
        shapes,
    )

    @jax.jit
    def both(given, sources):
        queries = given.parameters[:SITES, 0]
        partial = pallas_kernels.depth_attention_partial
        mixed, log_sums = partial(queries, sources, count=given.layer)
        return the_op(given._replace(mixed=mixed, log_sums=log_sums), norm="rmsnorm")

    text = both.lower(*shapes).compile().as_text()
    for name in ("partial", "merge"):
        assert len(re.findall(rf"custom-call.*/depth_attention_{name}_decode/", text)) == 1, name
    assert not re.search(r"= (f32|bf16)\S* (dynamic-slice|pad)\(", text)


@pytest.mark.parametrize(
    "kind, N, D, dtype, tokens",
    [
        ("TPU v5 lite", 64, 7168, "bfloat16", 32),  # as much as was chosen before there was a bound
        ("TPU v5 lite", 33, 7168, "float32", 16),
        ("TPU v5 lite", 128, 8192, "float32", None),
        ("TPU v4", 24, 1024, "bfloat16", 32),
        ("TPU v4", 64, 7168, "bfloat16", None),
    ],
)
def test_rows_of_a_step_fit_vmem(kind, N, D, dtype, tokens):
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    given = Partial(array(1, D), array(N, 64, D), jax.ShapeDtypeStruct((), jnp.int32))
    with lowering_for(kind):
        assert mosaic_tpu_decode._tokens(given) == tokens
        assert mosaic_tpu_decode.serves(given) == (tokens is not None)


@pytest.mark.parametrize(
    "kind, D, dtype, tokens",
    [
        ("TPU v5 lite", 16384, "bfloat16", 32),
        ("TPU v4", 7168, "float32", 32),
        ("TPU v4", 16384, "float32", 16),
        ("TPU v4", 65536, "bfloat16", None),
        ("TPU v4", 40960, "float32", 8),
    ],
)
def test_rows_of_a_step_of_phase_two_fit_vmem(kind, D, dtype, tokens):
    given = jax.eval_shape(lambda: merged((64, D, dtype, "rmsnorm", True)))
    with lowering_for(kind):
        assert mosaic_tpu_decode._merge_tokens(given) == tokens
        refused = mosaic_tpu_decode.unsupported("merge_at", given)
    assert refused == (f"D={D}: 8 tokens do not fit in VMEM" if tokens is None else None)


@pytest.mark.compile
@pytest.mark.parametrize(
    "size, dtype", [(22528, "bfloat16"), (26368, "float32"), (45184, "float32")]
)
def test_phase_two_of_large_vectors_compiles_for_v4(size, dtype):
    """The largest in steps of 32, 16 and 8 tokens."""
    device = topologies.get_topology_desc(platform="tpu", topology_name="v4:2x2x1").devices[0]
    shapes = jax.eval_shape(lambda: merged((64, size, dtype, "rmsnorm", True)))
    given = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device)),
        shapes,
    )
    with lowering_for(device.device_kind):
        run = jax.jit(lambda given: the_op(given, norm="rmsnorm", implementation="mosaic_tpu"))
        text = run.lower(given).compile().as_text()
    assert "depth_attention_merge_decode" in text
