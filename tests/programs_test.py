"""Which compiled programs of the tests are kept."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sharding
from tests import programs


@pytest.fixture
def kept(tmp_path):
    """The folder of programs, new."""
    with programs.kept_in(tmp_path):  # Bazel's tests keep none else
        yield tmp_path


X = np.arange(4.0, dtype=np.float32)


def test_programs_for_no_device_are_not_kept_whatever_came_before(kept):
    jax.jit(lambda x: 3 * x + 1)(X)
    before = set(kept.iterdir())
    assert before
    with programs.not_kept():
        jax.jit(lambda x: 5 * x + 2)(X)
    assert set(kept.iterdir()) == before
    jax.jit(lambda x: 7 * x + 3)(X)
    assert set(kept.iterdir()) > before


def test_programs_over_several_cpus_are_not_kept(kept):
    mesh = sharding.make_mesh("data=2", jax.devices()[:2])
    total = jax.shard_map(
        lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    np.testing.assert_array_equal(jax.jit(total)(X), [2, 4])
    # Nor is there anything of another run's that could be read.
    assert not any("lambda" in path.name for path in kept.iterdir())
