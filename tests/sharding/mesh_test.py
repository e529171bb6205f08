"""Meshes by text, what cannot be one, and where arrays lie."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import sharding
from sharding import MeshError


@pytest.mark.parametrize(
    "spec, shape",
    [
        ("data=8", (8, 1)),
        ("data=2,fsdp=4", (2, 4)),
        ("fsdp=4,data=-1", (2, 4)),
        ("fsdp=-1", (1, 8)),
        ("data=-1", (8, 1)),
    ],
)
def test_meshes(spec, shape):
    mesh = sharding.make_mesh(spec)
    assert mesh.axis_names == ("data", "fsdp")
    assert mesh.devices.shape == shape


@pytest.mark.parametrize(
    "spec, message",
    [
        ("data=3", "--mesh='data=3' asks for 3 devices, and there are 8.* 1, 2, 4, 8, or -1"),
        ("", "asks for 1 devices, and there are 8"),
        ("data=3,fsdp=-1", "asks for 3 devices or a multiple, and there are 8"),
        ("data=-1,fsdp=-1", "-1 on data and fsdp; only one"),
        ("dtaa=8", "axis 'dtaa' is unknown; legal axes: data, fsdp"),
        ("data=2,data=4", "axis 'data' is given twice"),
        ("data", "'data' must be axis=size"),
        ("data=two", "'data=two' must be axis=size"),
        ("data=0", "'data=0' must be axis=size"),
        ("data=-2", "'data=-2' must be axis=size"),
    ],
)
def test_what_cannot_be_a_mesh(spec, message):
    with pytest.raises(MeshError, match=message):
        sharding.make_mesh(spec)


def test_batches_lie_over_every_data_axis():
    mesh = sharding.make_mesh("data=2,fsdp=4")
    placed = jax.device_put(np.zeros((16, 3)), sharding.batch_sharding(mesh))
    assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 3)}
    sharding.check_batch_size(mesh, 16, parts=2)
    with pytest.raises(MeshError, match="--batch_size=12 .* 8 devices .* nearest legal: 8 or 16"):
        sharding.check_batch_size(mesh, 12)
    with pytest.raises(MeshError, match="--batch_size=3 .* nearest legal: 8"):
        sharding.check_batch_size(mesh, 3)
    with pytest.raises(MeshError, match="--batch_size=24 .* 2 accumulated parts.*: 16 or 32"):
        sharding.check_batch_size(mesh, 24, parts=2)


def test_parameters_lie_by_the_names_of_their_axes():
    mesh = sharding.make_mesh("data=2,fsdp=4")
    shapes = {"a": np.zeros((3, 8)), "b": np.zeros(5)}
    axes = {"a": ("head", "embed"), "b": ("key",)}
    placed = sharding.parameter_shardings(mesh, axes, shapes)
    assert placed["a"].spec == PartitionSpec(None, ("fsdp",))
    assert placed["b"].is_fully_replicated
    with pytest.raises(MeshError, match="axis 'embed' of size 6 is not divisible by fsdp = 4"):
        sharding.parameter_shardings(mesh, {"a": ("embed",)}, {"a": np.zeros(6)})
