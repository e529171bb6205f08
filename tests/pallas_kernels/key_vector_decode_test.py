"""A site of a few tokens at a layer of stacked keys: against float64 NumPy, and compiled."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import pallas_kernels
from pallas_kernels.key_vector import mosaic_tpu_decode, xla
from pallas_kernels.key_vector.interface import SiteOperands
from tests.closeness import assert_close
from tests.pallas_kernels import plain
from tests.tiers import later

EPSILON = 1e-6
# Largest error relative to the largest value: every operand of a bfloat16 product is rounded to
# 2^-9, and float32 sums are off by some units of 2^-24.
TOLERANCE = {"bfloat16": 1e-2, "float32": 3e-6}


class Case(NamedTuple):
    T: int
    K: int
    V: int
    R: int
    P: int
    residual: str
    data: str
    norm: str
    size_major: tuple[bool, bool] = (False, False)


# One token, whose vectors are turned in the kernel; twice what is computed beside each other, and
# some more; of each dtype and norm.
CASES = [
    Case(1, 12, 6, 5, 7, "float32", "float32", "layernorm", (True, True)),
    Case(19, 16, 8, 4, 12, "bfloat16", "bfloat16", "rmsnorm"),
    Case(3, 16, 8, 3, 9, "bfloat16", "float32", "rmsnorm"),
    *later(
        (Case(1, 16, 8, 8, 8, "bfloat16", "bfloat16", "layernorm", (False, True)),),
        (Case(27, 12, 6, 5, 7, "float32", "bfloat16", "layernorm", (True, True)),),
        (Case(3, 24, 136, 3, 9, "bfloat16", "float32", "rmsnorm"),),
    ),
]
LAYERS, LAYER = 3, 2


def arguments(case: Case) -> SiteOperands:
    rng = np.random.default_rng(0)
    draw = lambda dtype, *size: rng.normal(size=size).astype(jnp.dtype(dtype))
    arrays = (
        3 + draw(case.residual, case.T, case.K, case.V),
        draw("float32", LAYERS, case.R, case.K) / 4,
        draw(case.data, case.T, case.R, case.V),
        draw("float32", LAYERS, case.K, case.V),
        draw("float32", LAYERS, case.P, case.K),
    )
    return SiteOperands(*map(jnp.asarray, arrays))


@pytest.mark.parametrize("case", CASES)
def test_a_layer_equals_numpy(case):
    site = arguments(case)
    options = {"norm": case.norm, "epsilon": EPSILON, "size_major": case.size_major}

    @jax.jit
    def run(site, layer):
        return {
            "kernel": mosaic_tpu_decode.at_layer(site, layer, **options, interpret=True),
            "xla": xla.at_layer(site, layer, **options),
            "op": pallas_kernels.store_norm_retrieve_at(LAYER, *site, **options),
        }

    got = run(site, jnp.int32(LAYER))
    X, w, y, gain, r = site
    stored = plain.store(X, w[LAYER], y)
    # What is read is that of X' as it is kept.
    kept = jnp.asarray(stored, case.residual)
    read = {"norm": case.norm, "epsilon": EPSILON}
    z = plain.norm_retrieve(kept, gain[LAYER], r[LAYER], **read)
    tolerance = max(TOLERANCE[case.data], TOLERANCE[case.residual])
    for name, found in got.items():
        assert [x.dtype for x in found] == [case.residual, case.data], name
        assert_close(found, (stored, z), tolerance)


def test_rows_of_several_steps_equal_those_of_one(monkeypatch):
    """The last of them with fewer rows than are computed beside each other."""
    site = arguments(Case(19, 16, 512, 4, 12, "float32", "float32", "rmsnorm"))
    options = {"norm": "rmsnorm", "epsilon": EPSILON, "interpret": True}
    calls, original = [], mosaic_tpu_decode.tpu_call
    note = lambda *args, **given: (calls.append(given["grid"]), original(*args, **given))[1]
    monkeypatch.setattr(mosaic_tpu_decode, "tpu_call", note)
    at_layer = lambda: mosaic_tpu_decode.at_layer(site, jnp.int32(LAYER), **options)
    want = at_layer()
    monkeypatch.setattr(mosaic_tpu_decode, "LARGEST", 1)  # MiB: room for 8 rows
    got = at_layer()
    assert calls == [(2,), (3,)]
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_what_does_not_fit_is_named(unannotated):
    site = arguments(CASES[0])
    for name, wrong in {"read_keys": site.read_keys[1:], "data": site.data[:, 1:]}.items():
        message = f"shapes do not fit.* {name} .* has shape {re.escape(str(wrong.shape))}"
        with pytest.raises(ValueError, match=message):
            pallas_kernels.store_norm_retrieve_at(0, *site._replace(**{name: wrong}))
    with pytest.raises(ValueError, match="has shape .* legal: axes of at least one entry"):
        pallas_kernels.store_norm_retrieve_at(0, *site._replace(store_keys=site.store_keys[:0]))
    half = site._replace(data=site.data.astype(jnp.float16))
    with pytest.raises(pallas_kernels.UnsupportedImplementation, match="neither bfloat16"):
        pallas_kernels.store_norm_retrieve_at(0, *half, implementation="mosaic_tpu")
    large = jax.eval_shape(lambda: site._replace(residual=jnp.zeros((1, 8192, 128))))
    assert "does not fit in VMEM" in mosaic_tpu_decode.unsupported("at_layer", large, jnp.int32(0))


@pytest.mark.compile
@pytest.mark.parametrize(
    "topology, case",
    [
        ("v5e:2x2", Case(1, 64, 64, 16, 48, "bfloat16", "bfloat16", "layernorm")),
        ("v5p:2x2x1", Case(1, 64, 64, 16, 16, "bfloat16", "bfloat16", "layernorm", (True, True))),
        ("v6e:2x2", Case(100, 64, 64, 16, 48, "bfloat16", "bfloat16", "rmsnorm")),
        ("tpu7x:2x2x1", Case(3, 12, 10, 5, 7, "float32", "float32", "layernorm")),
        *later(
            ("v5e:2x2", Case(256, 64, 64, 16, 16, "bfloat16", "bfloat16", "layernorm")),
            ("v5p:2x2x1", Case(2, 4096, 64, 16, 48, "bfloat16", "bfloat16", "rmsnorm")),
            ("v6e:2x2", Case(1, 48, 16, 14, 42, "float32", "bfloat16", "rmsnorm", (False, True))),
            ("tpu7x:2x2x1", Case(1, 64, 64, 16, 16, "bfloat16", "bfloat16", "rmsnorm")),
        ),
    ],
)
def test_compiles_and_takes_no_slices(topology, case):
    """In a loop over layers: neither keys and gains nor the residual are copied."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    here = SingleDeviceSharding(device)
    given = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
        jax.eval_shape(lambda: arguments(case)),
    )
    options = {"norm": case.norm, "epsilon": EPSILON, "size_major": case.size_major}

    @jax.jit
    def layers(residual, store_keys, data, gain, read_keys):
        def body(carry, layer):
            parameters = gain, read_keys
            op = pallas_kernels.store_norm_retrieve_at
            residual, z = op(layer, carry[0], store_keys, carry[1], *parameters, **options)
            return (residual, carry[1] + jnp.mean(z)), None

        return jax.lax.scan(body, (residual, data), jnp.arange(LAYERS))[0]

    text = layers.lower(*given).compile().as_text()
    assert len(re.findall(r"custom-call.*/key_vector_decode/", text)) == 1
    assert not re.search(r"= (f32|bf16)\S* dynamic-slice\(", text)
