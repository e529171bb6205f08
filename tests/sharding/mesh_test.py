"""Meshes by text, what cannot be one, and where arrays lie."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import PartitionSpec

import sharding
from sharding import MeshError


@pytest.mark.parametrize(
    "spec, shape",
    [
        ("data=8", (1, 8, 1, 1, 1, 1, 1)),
        ("data=2,fsdp=4", (1, 2, 4, 1, 1, 1, 1)),
        ("fsdp=4,data=-1", (1, 2, 4, 1, 1, 1, 1)),
        ("tensor=2,key=-1", (1, 1, 1, 1, 4, 1, 2)),
        ("stage=2,sequence=4", (2, 1, 1, 1, 1, 4, 1)),
        ("data=-1", (1, 8, 1, 1, 1, 1, 1)),
    ],
)
def test_meshes(spec, shape):
    mesh = sharding.make_mesh(spec)
    assert mesh.axis_names == ("stage", "data", "fsdp", "expert", "key", "sequence", "tensor")
    assert mesh.devices.shape == shape


@pytest.mark.parametrize(
    "spec, message",
    [
        ("data=3", "--mesh='data=3' needs 3 devices, but there are 8.* 1, 2, 4, 8, or -1"),
        ("", "needs 1 devices, but there are 8"),
        ("data=3,fsdp=-1", "needs 3 devices or a multiple, but there are 8"),
        ("data=-1,fsdp=-1", "-1 for data and fsdp; legal: -1 for at most one axis"),
        ("dtaa=8", "axis 'dtaa' is unknown; legal axes: stage, data, fsdp, expert, key"),
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
    check = partial(sharding.check_divides, mesh, "--batch_size")
    check(16, "batch", parts=2)
    with pytest.raises(MeshError, match="--batch_size=12 .* axes data=2 x fsdp=4; .*: 8 or 16"):
        check(12, "batch")
    with pytest.raises(MeshError, match="--batch_size=3 .* nearest legal: 8"):
        check(3, "batch")
    with pytest.raises(MeshError, match="=24 .* fsdp=4 and 2 accumulated parts; .*: 16 or 32"):
        check(24, "batch", parts=2)
    check(7, "tokens")


def test_parameters_lie_by_the_names_of_their_axes():
    mesh = sharding.make_mesh("data=2,fsdp=4")
    shapes = {"a": np.zeros((3, 8)), "b": np.zeros(5)}
    axes = {"a": ("head", "embed"), "b": ("key",)}
    specs = sharding.parameter_specs(mesh, axes, shapes)
    assert specs == {"a": PartitionSpec(None, "fsdp"), "b": PartitionSpec("key")}
    with pytest.raises(MeshError, match="fsdp=4 .* 'embed' of size 6; legal: 1, 2, 3, 6"):
        sharding.parameter_specs(mesh, {"a": ("embed",)}, {"a": np.zeros(6)})


def test_slices_of_a_pod_are_spanned_by_the_outer_axes():
    """Two slices of 2 x 2: data runs between them, tensor within."""
    target = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:2x2", num_slices=2
    ).devices
    grid = sharding.make_mesh("data=2,tensor=4", target).devices.reshape(2, 4)
    assert [{device.slice_index for device in row} for row in grid] == [{0}, {1}]
    grid = sharding.make_mesh("fsdp=4,tensor=2", target).devices.reshape(2, 4)
    assert [{device.slice_index for device in row} for row in grid] == [{0}, {1}]
    with pytest.raises(
        MeshError,
        match="'tensor=8' cannot be divided over 2 slices; legal: the size of data or stage",
    ):
        sharding.make_mesh("tensor=8", target)


def test_neighbours_in_a_mesh_are_neighbours_on_the_chip():
    target = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4").devices
    grid = sharding.make_mesh("data=4,tensor=4", target).devices.reshape(4, 4)
    for row in grid:
        coords = np.array([device.coords[:2] for device in row])
        assert np.abs(np.diff(coords, axis=0)).sum(axis=1).max() == 1
