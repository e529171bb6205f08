"""Batches over a mesh, of which a process reads its own rows, and arrays back on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import sharding
from rmt_tpu.data import Windows
from rmt_tpu.training.global_arrays import on_one_device, put_batch

WINDOWS = Windows(
    np.arange(200, dtype=np.int32), seq_len=4, batch_size=8, bos=0, seed=0, shuffle=True
)


@pytest.mark.parametrize("spec", ["data=8", "data=2,fsdp=2,tensor=2", "sequence=8"])
def test_a_batch_is_placed_as_it_is(spec):
    mesh = sharding.make_mesh(spec)
    batch_sharding = sharding.batch_sharding(mesh)
    placed = put_batch(lambda rows: WINDOWS.batch_at(16, rows), (8, 4), batch_sharding)
    for ours, expected in zip(*map(jax.tree.leaves, (placed, WINDOWS.batch_at(16))), strict=True):
        assert ours.sharding.is_equivalent_to(batch_sharding, 2)
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize(
    ("own", "expected"), [([0, 1, 2, 3], [0, 1, 2, 3]), ([6, 1], [1, 6]), ([5], [5])]
)
def test_only_the_rows_of_own_devices_are_read(monkeypatch, own, expected):
    batch_sharding = sharding.batch_sharding(sharding.make_mesh("data=8"))
    asked, placed = [], {}

    def own_indices(self, shape):
        everywhere = list(self.devices_indices_map(shape).items())
        return dict(everywhere[number] for number in own)

    def read(rows):
        asked.append(rows.tolist())
        return WINDOWS.batch_at(0, rows)

    def make(shape, of, data):
        for number, index in zip(own, own_indices(of, shape).values(), strict=True):
            placed[number] = data(index)
        return jnp.zeros(shape)

    monkeypatch.setattr(NamedSharding, "addressable_devices_indices_map", own_indices)
    monkeypatch.setattr(jax, "make_array_from_callback", make)
    put_batch(read, (8, 4), batch_sharding)
    assert asked == [expected]
    weights = WINDOWS.batch_at(0).weights
    for number in own:  # weights are the last of a batch's arrays
        np.testing.assert_array_equal(placed[number], weights[number : number + 1])


def test_arrays_come_back_whole_on_one_device():
    mesh = sharding.make_mesh("data=2,fsdp=4")
    x = jnp.arange(64.0).reshape(8, 8)
    tree = {
        "rows": jax.device_put(x, NamedSharding(mesh, PartitionSpec("fsdp"))),
        "both": jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", "fsdp"))),
        "everywhere": jax.device_put(x, NamedSharding(mesh, PartitionSpec())),
    }
    for leaf in on_one_device(tree, mesh).values():
        assert leaf.devices() == {mesh.devices.flatten()[0]}
        np.testing.assert_array_equal(leaf, x)
