"""What CPUs of processes that have joined do in place of Gloo's reduce-scatter."""

import jax
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax._src.lax.parallel import reduce_scatter_p
from jax.sharding import PartitionSpec as P

import sharding
from rmt_tpu.distributed import gloo


@pytest.fixture
def joined():
    gloo.scatter_sums_by_all_reduce()
    yield
    del mlir._platform_specific_lowerings["cpu"][reduce_scatter_p]


@pytest.mark.parametrize(
    "names", ["fsdp", ("data", "fsdp")], ids=lambda names: "+".join(np.atleast_1d(names))
)
def test_no_sum_is_scattered_by_gloo(joined, names):
    """Neither one that is asked for nor the gradient of a gather."""
    mesh = sharding.make_mesh("data=2,fsdp=2", jax.devices()[:4])
    x = np.random.default_rng(0).integers(-8, 8, (4, 8, 4)).astype(np.float32)
    of_all = P(("data", "fsdp"))

    def each(x):
        gathered = lambda part: (sharding.gather(part, names, axis=1) * x[0]).sum()
        size = sharding.axis_size(names)
        scattered = sharding.scatter_sum(x[0], names, axis=0)
        untiled = jax.lax.psum_scatter(x[0][:size], names)
        return scattered[None], jax.grad(gathered)(x[0][:, : 4 // size])[None], untiled[None]

    each = jax.jit(sharding.per_device(each, mesh, of_all, of_all))
    lowered = each.lower(x)
    assert "reduce_scatter" not in lowered.as_text()
    assert "reduce-scatter" not in lowered.compile().as_text()
    groups = [[0, 1], [2, 3]] if names == "fsdp" else [[0, 1, 2, 3]]
    for group in groups:
        whole = x[group].sum(0)
        outs = [np.asarray(out)[group] for out in each(x)]
        np.testing.assert_array_equal(outs[0].reshape(8, 4), whole)
        np.testing.assert_array_equal(np.concatenate(list(outs[1]), axis=1), whole)
        np.testing.assert_array_equal(outs[2], whole[: len(group)])
