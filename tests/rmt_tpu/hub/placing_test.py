"""Folders opened straight onto devices: which bytes are read, and how much memory that takes."""

import json
import subprocess
import sys
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx, traverse_util
from safetensors.numpy import save_file

import rmt_tpu
from rmt_tpu import config as cfg
from rmt_tpu.data import ByteTokenizer
from rmt_tpu.errors import RunError, UsageError
from rmt_tpu.hub import files, weights
from rmt_tpu.hub.folder import export
from rmt_tpu.hub.models import describe
from rmt_tpu.hub.pieces import Part, Piece, full
from rmt_tpu.hub.placing import read_parameter
from rmt_tpu.runs.loading import identity
from tests import cli, models

ATTENTION = cfg.Attention(
    4, 8, cfg.Rope(), inverse_layer_scaling=False, num_kv_heads=2, query_key_norm=True
)
DENSE = cfg.FeedForward(hidden_dim=48, activation="swiglu")
EXPERTS = cfg.Experts(4, 2, 24, shared=0, scores="softmax", balance=cfg.BalanceLoss(0.0))
MODEL = cfg.ModelConfig(
    (cfg.Stack((ATTENTION, DENSE), 1), cfg.Stack((ATTENTION, EXPERTS), 3)),
    cfg.VectorStore(32),
    vocab_size=257,
    norm="rmsnorm",
)


def parameters(decoder):
    flat = traverse_util.flatten_dict(nnx.to_pure_dict(nnx.state(decoder, nnx.Param)))
    return {path: np.asarray(x) for path, x in flat.items()}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """The folder of a small model with experts, and its parameters."""
    decoder = nnx.merge(models.graph(MODEL), models.random_parameters(MODEL))
    decoder = jax.tree.map(lambda x: x.astype(np.float32), decoder)
    folder = tmp_path_factory.mktemp("hub") / "hub"
    export(decoder, ByteTokenizer(), folder, max_length=64)
    # The hub's format has no loads of experts.
    wanted = {path: x * (path[-1] != "load") for path, x in parameters(decoder).items()}
    return folder, wanted


@pytest.fixture
def reads(monkeypatch):
    """The (begin, end) of every range that is read of a local file."""
    found = []

    def read(self, begin, buffer, read=files.LocalFile.read):
        found.append((begin, begin + len(buffer)))
        return read(self, begin, buffer)

    monkeypatch.setattr(files.LocalFile, "read", read)
    return found


def small_memory(monkeypatch, count):
    """So that parameters of a small model are read in steps, and tensors in blocks."""
    monkeypatch.setattr(weights, "LEAST_MEMORY", count)


@pytest.mark.parametrize("mesh", [None, "expert=2,fsdp=2,tensor=2"])
def test_a_folder_is_the_same_in_steps_and_on_a_mesh(hub, mesh, monkeypatch):
    folder, wanted = hub
    small_memory(monkeypatch, 1)
    found, _ = rmt_tpu.load(folder, mesh=mesh)
    assert weights.Tensors(folder).memory == 257 * 32 * 4 // 2
    found = parameters(found)
    assert found.keys() == wanted.keys()
    for path, values in found.items():
        np.testing.assert_array_equal(values, wanted[path], err_msg=str(path))


def names_of(folder, ranges):
    """The tensors that ranges of bytes touch, each with the share of its bytes that is read."""
    content = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    read = np.zeros(len(content), int)
    for begin, end in ranges:
        read[begin:end] += 1
    assert read[8 + size :].max(initial=0) <= 1  # nothing is read twice
    offsets = {name: x["data_offsets"] for name, x in header.items() if name != "__metadata__"}
    shares = {name: read[8 + size + a : 8 + size + b].mean() for name, (a, b) in offsets.items()}
    return {name: share for name, share in shares.items() if share}


def only_device(tensors, by_path, path, shape, spec, number):
    """Read what one device of a mesh of four needs of a parameter, as a process that has it."""
    sharding = sharding_of(*spec, shape=(2, 2), axes=("expert", "fsdp"))
    index = sharding.addressable_devices_indices_map(shape)[jax.devices()[number]]
    begin = tuple(part.indices(size)[0] for part, size in zip(index, shape, strict=True))
    values = np.zeros(sharding.shard_shape(shape), np.float32)
    weights.fill(tensors, by_path[path], [weights.Target(begin, values)])
    return index, values


def test_each_device_reads_its_ranges_alone(hub, reads, monkeypatch):
    """Experts of its own, rows of its own; and whole rows for some columns, as rows are short."""
    folder, wanted = hub
    tensors = weights.Tensors(folder)
    by_path = weights.pieces_by_parameter(tensors, describe(folder))
    reads.clear()
    path = "stacks", 1, 1, "core", "w_2"
    index, values = only_device(tensors, by_path, path, (3, 4, 24, 32), (None, "expert"), 2)
    np.testing.assert_array_equal(values, wanted[path][index])
    names = [
        f"model.layers.{n}.mlp.experts.{e}.down_proj.weight" for n in (1, 2, 3) for e in (2, 3)
    ]
    assert names_of(folder, reads) == dict.fromkeys(names, 1.0)
    # The rows of the tensor are the columns of the parameter.
    for gap, share in ((1, 0.5), (1000, 1.0)):
        monkeypatch.setattr(files.LocalFile, "least_gap", gap)
        for spec in ((None, None, None, "fsdp"), (None, None, "fsdp")):
            reads.clear()
            shape = 3, 4, 24, 32
            index, values = only_device(tensors, by_path, path, shape, spec, 1)
            np.testing.assert_array_equal(values, wanted[path][index])
            shares = names_of(folder, reads)
            # A slice of rows has half of the bytes; one of columns only if gaps are left out.
            assert set(shares.values()) == {0.5 if len(spec) == 4 else share}
            assert len(shares) == 12


STACKED = 2, 4, 512, 1024  # layers, experts, in, out


@pytest.fixture(scope="module")
def stacked(tmp_path_factory):
    """A folder with 8 tensors of 1 MB in bfloat16, the pieces of one parameter of 16 MB."""
    folder = tmp_path_factory.mktemp("stacked")
    values = np.random.default_rng(0).standard_normal(STACKED, np.float32)
    values = values.astype(ml_dtypes.bfloat16)
    tensors, pieces = {}, []
    for layer, expert in np.ndindex(STACKED[:2]):
        name = f"{layer}.{expert}.weight"
        tensors[name] = np.ascontiguousarray(values[layer, expert].T)
        at = (layer, layer + 1), (expert, expert + 1), *full(*STACKED[2:])
        pieces.append(Piece(name, ("w",), at, transposed=True))
    save_file(tensors, folder / "model.safetensors")
    return folder, pieces, values.astype(np.float32)


def sharding_of(*spec, shape=(4,), axes=("expert",)):
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return jax.sharding.NamedSharding(
        jax.sharding.Mesh(devices, axes), jax.sharding.PartitionSpec(*spec)
    )


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True])
def test_reading_takes_less_memory_than_twice_the_largest_tensor(stacked, split, monkeypatch):
    """The memory is counted without the parameter itself, also with virtual pipeline stages."""
    folder, pieces, wanted = stacked
    small_memory(monkeypatch, 1)
    tensors = weights.Tensors(folder)
    shape = (2, 1, *STACKED[1:]) if split else STACKED
    sharding = sharding_of(*(2 + split) * (None,), "expert")

    def read():
        return read_parameter(tensors, pieces, STACKED, shape, sharding)

    read()  # a first call also traces programs
    tracemalloc.start()
    try:
        found = read()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(np.asarray(found).reshape(STACKED), wanted)
    assert found.sharding == sharding
    assert peak < 2 * 2**20


def test_columns_of_a_tensor_that_several_parameters_share(tmp_path, reads, monkeypatch):
    """GPT-2 joins projections so. Rows are long enough to leave the rest out, or they are not."""
    values = np.arange(8 * 24, dtype=np.float32).reshape(8, 24)
    save_file({"c": values}, tmp_path / "model.safetensors")
    piece = Piece("c", ("w",), full(8, 12), part=Part(1, 6, 24))
    tensors = weights.Tensors(tmp_path)
    for gap, bytes_read in ((16, 4 * 6 * 4), (10**6, (3 * 24 + 12) * 4)):
        monkeypatch.setattr(files.LocalFile, "least_gap", gap)
        reads.clear()
        target = weights.Target((2, 3), np.zeros((4, 6), np.float32))
        weights.fill(tensors, [piece], [target])
        np.testing.assert_array_equal(target.values, values[2:6, 9:15])
        assert sum(end - begin for begin, end in reads) == bytes_read


@pytest.mark.parametrize("wrong", [{"data_offsets": [0, 8]}, {"data_offsets": [0, 4000]}, {}])
def test_a_header_that_does_not_fit_its_file(tmp_path, wrong):
    header = {"a": {"dtype": "F32", "shape": [1]} | wrong}
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(8)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(RunError, match="model.safetensors cannot be read: "):
        weights.Tensors(tmp_path)


def test_the_same_from_a_bucket(hub, stacked, server, monkeypatch):
    """Headers first, then ranges that are small beside the files; and no file as a whole."""
    sizes = []

    def read(self, begin, buffer, read=files.BucketFile.read):
        sizes.append(len(buffer))
        return read(self, begin, buffer)

    monkeypatch.setattr(files.BucketFile, "read", read)
    small_memory(monkeypatch, 1)
    for name, (folder, *_) in (("hub", hub), ("stacked", stacked)):
        for path in folder.iterdir():
            server.replace(server.bucket, f"models/{name}/{path.name}", path.read_bytes())
    url = f"gs://{server.bucket}/models"
    found, tokenizer = rmt_tpu.load(f"{url}/hub", mesh="expert=2,fsdp=2,tensor=2")
    assert isinstance(tokenizer, ByteTokenizer)
    for path, values in parameters(found).items():
        np.testing.assert_array_equal(values, hub[1][path], err_msg=str(path))
    assert identity(f"{url}/hub")[0] == "hub"
    # Half of the experts: half of the bytes, 1 MB / 32 at a time.
    tensors = weights.Tensors(f"{url}/stacked")
    monkeypatch.setattr(files.BucketFile, "least_gap", 1)
    sizes.clear()
    target = weights.Target((0, 2, 0, 0), np.zeros((2, 2, 512, 1024), np.float32))
    weights.fill(tensors, stacked[1], [target])
    np.testing.assert_array_equal(target.values, stacked[2][:, 2:])
    assert sum(sizes) == 4 * 2**20 and max(sizes) == 2**20 // 32
    server.replace(server.bucket, "models/stacked/model.safetensors", b"another file")
    with pytest.raises(RunError, match="stacked/model.safetensors.* was replaced or deleted"):
        weights.fill(tensors, stacked[1], [target])
    server.remove(server.bucket, "models/stacked/model.safetensors")
    with pytest.raises(UsageError, match="/stacked has neither model.safetensors nor"):
        weights.Tensors(f"{url}/stacked")


OF_A_PROCESS = """
import json, sys
import jax, numpy as np
folder, port, number = sys.argv[1:]
where = {"coordinator_bind_address": f"127.0.0.1:{port}"} if number == "0" else {}
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(number), **where)
from rmt_tpu.hub import files, weights
from rmt_tpu.hub.pieces import Piece, full
from rmt_tpu.hub.placing import read_parameter
weights.LEAST_MEMORY = 1
tensors, reads, read = weights.Tensors(folder), [], files.LocalFile.read
def recorded(self, begin, buffer):
    reads.append((begin, begin + len(buffer)))
    return read(self, begin, buffer)
files.LocalFile.read = recorded
shape = 2, 4, 512, 1024
pieces = [
    Piece(f"{l}.{e}.weight", ("w",), ((l, l + 1), (e, e + 1), *full(*shape[2:])), transposed=True)
    for l, e in np.ndindex(shape[:2])
]
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("expert",))
spec = jax.sharding.PartitionSpec(None, "expert")
found = read_parameter(tensors, pieces, shape, shape, jax.sharding.NamedSharding(mesh, spec))
for shard in found.addressable_shards:
    np.save(f"{folder}/{number}-{shard.index[1].start}.npy", np.asarray(shard.data))
print(json.dumps(reads))
"""


@pytest.mark.slow
def test_each_of_two_processes_reads_its_half(stacked):
    """Each has two of four devices, and reads the experts of these alone."""
    folder, _, wanted = stacked
    command = [sys.executable, "-c", OF_A_PROCESS, str(folder), str(cli.free_port())]
    env = cli.environment(devices=2)
    processes = [
        subprocess.Popen([*command, str(n)], env=env, stdout=subprocess.PIPE, text=True)
        for n in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=cli.TIMEOUT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for number, output in enumerate(outputs):
        shares = names_of(folder, json.loads(output))
        own = {f"{layer}.{2 * number + e}.weight": 1.0 for layer in range(2) for e in range(2)}
        assert shares == own
        for expert in (2 * number, 2 * number + 1):
            values = np.load(folder / f"{number}-{expert}.npy")
            np.testing.assert_array_equal(values, wanted[:, expert : expert + 1])
