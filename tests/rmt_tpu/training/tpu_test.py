"""The train step compiled by the real TPU compiler, on a machine without a TPU."""

import contextlib
import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

import sharding
from rmt_tpu.analysis import step_cost
from rmt_tpu.config import (
    Alibi,
    Attention,
    BlockAttention,
    FeedForward,
    Kda,
    Learned,
    Mla,
    Rope,
    RunConfig,
    Stack,
    overrides,
)
from rmt_tpu.config.presets import run
from rmt_tpu.data import Batch
from rmt_tpu.estimator import TARGETS, Job, Worker, collectives
from rmt_tpu.estimator.hlo import Module
from rmt_tpu.training import compiler_options
from rmt_tpu.training.run import prepare
from tests.tiers import later

pytestmark = pytest.mark.compile


def config_of(preset: str, *, mesh="data=1", batch_size=None, vocab_size=512, **model) -> RunConfig:
    config = run(preset)
    model = {"compute_dtype": "bfloat16", "vocab_size": vocab_size} | model
    key_dim = model.pop("key_dim", None)
    if (positions := model.pop("positions", None)) is not None:
        model["attention"] = dataclasses.replace(config.model.attention, positions=positions)
    if key_dim is not None:
        model["store"] = dataclasses.replace(config.model.store, key_dim=key_dim)
    train = dataclasses.replace(
        config.train, mesh=mesh, batch_size=batch_size or config.train.batch_size
    )
    return dataclasses.replace(config, model=config.model.replace(**model), train=train)


def compiled(config: RunConfig, devices: int = 1, topology: str = "v5e:2x2"):
    """The shapes of the state, and the step compiled for so many devices of a topology."""
    target = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    prepared = prepare(config, sharding.make_mesh(config.train.mesh, target.devices[:devices]))
    placed = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    state = jax.tree.map(placed, jax.eval_shape(prepared.init), prepared.state_shardings)
    shape = (config.train.batch_size, config.data.seq_len)
    ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=prepared.batch_sharding)
    weights = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=prepared.batch_sharding)
    lowered = prepared.jitted_step().lower(state, Batch(ids, ids, ids, weights))
    return state, lowered.compile()


def moves(program: str, elements: int) -> list[str]:
    """Instructions that only move an array of so many elements."""
    found = []
    for line in program.splitlines():
        match = re.match(r"\s*(?:ROOT )?%?\S+ = \w+\[([\d,]+)\]\S* (copy|transpose)\(", line)
        if match and np.prod([int(n) for n in match.group(1).split(",")]) == elements:
            found.append(line.strip()[:160])
    return found


def cores(head_dim):
    """What the papers' decoders have not. KDA's kernels are for heads of 128."""
    return (
        Attention(4, head_dim, Rope(dims=16), False, 2, query_key_norm=True, bias=True),
        FeedForward(96, "swiglu"),
        Mla(num_heads=4, head_dim=head_dim, kv_rank=48, rope_dim=16, query_rank=64),
        FeedForward(96, "relu2"),
        Kda(num_heads=4, head_dim=128),
        FeedForward(128),
    )


V4 = {  # kernels of a layer of each, forward and backward
    "rmt-305m": ("key_vector_forward", "key_vector_backward", "attention_blocks_backward"),
    "gpt2-405m": ("attention_blocks_forward", "attention_blocks_backward"),
    "attnres-528m": ("depth_attention_partial_backward", "depth_attention_merge_backward"),
    "llama-374m": ("attention_blocks_forward", "attention_blocks_backward", "logits"),
    "kimi-tiny": ("attention_blocks_backward", "gmm", "tgmm"),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no tpu kernel for this call.*heads of K=32")  # KDA's, tiny
@pytest.mark.parametrize("preset", V4)
def test_steps_of_a_v4_take_kernels(preset):
    """A core of it has 16 MiB of VMEM, a quarter of what the others have at least."""
    text = compiled(config_of(preset, batch_size=2), topology="v4:2x2x1")[1].as_text()
    assert [name for name in V4[preset] if f"%{name}" not in text] == []


@pytest.mark.parametrize(
    "preset, topology, mesh, remat",
    [
        ("rmt-llama-tiny", "v5e:2x2", "data=2,fsdp=2", "reversible"),
        ("llama-attnres-tiny", "v6e:2x2", "data=2,tensor=2", "full"),
        *later(
            ("llama-tiny", "v5p:2x2x1", "fsdp=2,sequence=2", "full"),
            ("rmt-llama-tiny", "v6e:2x2", "data=2,key=2", "full"),
        ),
    ],
)
def test_cores_compile_for_a_slice(preset, topology, mesh, remat):
    """All heads of a matrix residual have its D_v; others are of 32, as of the presets."""
    period = cores(128 if preset.startswith("rmt") else 32)
    stacks = (Stack(period[:2]), Stack(period, repeat=2))
    config = config_of(preset, mesh=mesh, remat=remat, stacks=stacks)
    compiled(config, devices=4, topology=topology)


@pytest.mark.parametrize(
    "preset, remat, positions",
    [
        ("rmt-tiny", "full", Alibi()),
        ("rmt-tiny", "reversible", Learned(128)),
        ("gpt2-tiny", "full", Learned(128)),
        ("attnres-tiny", "full", Alibi()),
        ("attnres-full-tiny", "blocks", Alibi()),
        ("rmt-attnres-tiny", "full", Alibi()),
    ],
)
def test_train_step_compiles_for_a_slice_of_v5e(preset, remat, positions):
    config = config_of(preset, mesh="data=2,fsdp=2", remat=remat, positions=positions)
    state, step = compiled(config, devices=4)
    memory = step.memory_analysis()
    of = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    # Parameters, two moments and copies, half of nearly all of them on each device; all donated.
    size = 3 * of(state.params) + of(state.copies)
    assert memory.argument_size_in_bytes < 0.6 * size
    assert memory.alias_size_in_bytes > 0.4 * size
    program = step.as_text()
    assert "all-gather" in program and ("all-reduce" in program or "reduce-scatter" in program)
    assert "attention_backward" in program
    assert ("key_vector_" in program) == preset.startswith("rmt")
    kernel = "depth_attention_matrices_" if preset.startswith("rmt") else "depth_attention_"
    assert (f"{kernel}partial_backward" in program) == ("attnres" in preset)


@pytest.mark.parametrize(
    "topology, seq_len",
    [
        *((topology, 128) for topology in ("v5e:2x2", "v6e:2x2", "tpu7x:2x2x1")),
        ("v5e:2x2", 2048),
        *later(("tpu7x:2x2x1", 2048), ("v5p:2x2x1", 128)),
    ],
)
def test_nothing_moves_between_the_residuals_kernels_and_attention(topology, seq_len):
    """No copy or transpose of a residual, of what attention reads, or of all outputs, in a loop."""
    options = {"positions": Alibi(), "key_dim": 32, "batch_size": 8}
    config = config_of("rmt-tiny", remat="reversible", **options)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=seq_len))
    _, step = compiled(config, topology=topology)
    tokens = config.train.batch_size * config.data.seq_len
    heads, size = config.model.attention.num_heads, config.model.attention.head_dim
    program = step.as_text()
    assert ("attention_blocks_backward" in program) == (seq_len == 2048)
    # Of all computations, the entry apart, in which what happens once may happen.
    loops = program[: program.index("ENTRY")]
    assert moves(loops, tokens * config.model.residual_size) == []
    assert moves(loops, tokens * 3 * heads * size) == []
    layers = config.model.stacks[0].repeat
    for slots in (layers, layers + 1):
        of_stacks = moves(loops, slots * tokens * heads * size)
        assert [line for line in of_stacks if f"[{slots}," in line] == []


@pytest.mark.parametrize("heads", later(4, 8))
def test_stacks_of_outputs_are_not_copied(heads):
    """The kernels read a multiple of 8 vectors as XLA writes them, and 4 with rows of padding."""
    sizes = {"model.attention.num_heads": heads, "data.seq_len": 512}
    config = overrides.apply(config_of("rmt-tiny", batch_size=8, remat="reversible"), sizes)
    _, step = compiled(config)
    module, layers = Module(step.as_text()), config.model.num_layers
    stacks = {slots * 8 * 512 * heads * 32 for slots in (layers, layers + 1)}
    loops = [ran.instruction for ran in module.run() if ran.times > 1]
    moved = [
        i.name
        for i in loops
        if module.moves_only(i) and {math.prod(array.shape) for array in i.arrays} & stacks
    ]
    # One that writes a slice has the stack as its result.
    assert loops and [name for name in moved if "dynamic-update-slice" not in name] == []


@pytest.mark.parametrize(
    "preset, remat, sizes",
    [
        ("rmt-tiny", "reversible_dots", {"model.attention.num_heads": 8}),
        *later(*((p, "dots", {"model.store.dim": 256}) for p in ("llama-tiny", "gpt2-tiny"))),
        *later(("attnres-tiny", "dots", {"model.store.dim": 256, "model.mixer.num_blocks": 2})),
    ],
)
def test_products_that_are_kept_are_not_copied(preset, remat, sizes):
    """The backward pass reads the products of feed-forward layers directly from their stacks."""
    sizes |= {"model.feed_forward.hidden_dim": 896, "data.seq_len": 512}
    config = overrides.apply(config_of(preset, batch_size=8, remat=remat), sizes)
    _, step = compiled(config)
    module = Module(step.as_text())
    loops = [ran.instruction for ran in module.run() if ran.times > 1]
    kept = {8 * 512 * width for width in (896, 2 * 896)}
    elements = lambda instruction: {math.prod(array.shape) for array in instruction.arrays}
    moved = [i.name for i in loops if module.moves_only(i) and elements(i) & kept]
    assert loops and moved == []


@pytest.mark.parametrize(
    "preset, mesh", [("gpt2-tiny", "fsdp=2"), *later(("attnres-tiny", "data=1"))]
)
def test_offloaded_products_are_in_the_hosts_memory(preset, mesh):
    """Queries, keys and values, and what feed-forward layers multiply first, of all layers."""
    sizes = {"model.store.dim": 256, "model.feed_forward.hidden_dim": 640, "data.seq_len": 512}
    config = overrides.apply(config_of(preset, mesh=mesh, batch_size=8, remat="offload"), sizes)
    devices = 2 if mesh == "fsdp=2" else 1
    _, step = compiled(config, devices=devices)
    heads = config.model.attention.num_heads * config.model.attention.head_dim
    products = 2 * (3 * heads + 640) * config.model.num_layers * 8 * 512 // devices
    assert step.memory_analysis().host_temp_size_in_bytes >= products


def options_for(topology, *, whole=False):
    """The compiler options of a train step on a topology, or on one device of it."""
    target = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    devices = target.devices if whole else target.devices[:1]
    return compiler_options.for_step(jax.sharding.Mesh(np.array(devices), ("data",)))


def test_an_instruction_has_more_vmem_on_some_chips_unless_the_user_says_how_much(monkeypatch):
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    assert options_for("v4:2x2x1") is None
    kib = {"v5e:2x2": 65536, "v5p:2x2x1": 49152, "v6e:2x2": 49152, "tpu7x:2x2x1": 49152}
    for topology, wanted in kib.items():
        assert options_for(topology) == {"xla_tpu_scoped_vmem_limit_kib": wanted}
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=32768")
    assert options_for("v6e:2x2") is None


def test_several_chips_give_collectives_to_sparse_cores_unless_the_user_forbids(monkeypatch):
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    assert options_for("v4:2x2x1", whole=True) is None
    assert options_for("v5e:2x2", whole=True) == options_for("v5e:2x2")
    gathers = "xla_tpu_enable_sparse_core_collective_offload_all_gather"
    for topology in ("v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"):
        offloaded = options_for(topology, whole=True)
        assert offloaded.items() > options_for(topology).items() and offloaded[gathers] is True
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{gathers}=false")
    assert options_for("v6e:2x2", whole=True).keys() == offloaded.keys() - {gathers}


@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
def test_weights_and_gradients_are_sent_during_other_work(topology, monkeypatch):
    """SparseCores perform these collectives; without the compiler options, none is hidden."""
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    _, step = compiled(config_of("llama-tiny", mesh="fsdp=4", batch_size=8), 4, topology)
    sent = collectives(Module(step.as_text()), {"fsdp": 4})
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        hidden, exposed = (
            sum(c.bytes for c in sent if c.kind == kind and c.overlaps is overlaps)
            for overlaps in (True, False)
        )
        assert exposed < 0.01 * hidden, kind


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_the_bank_is_never_copied(topology):
    """Nor its gradient, and there is no float32 copy of either, in passes of three layers."""
    mixer = BlockAttention(layers_per_block=3)
    config = config_of("attnres-tiny", batch_size=8, num_layers=15, mixer=mixer)
    _, step = compiled(config, topology=topology)
    program, rows = step.as_text(), 1 + 15 // 3
    tokens = config.train.batch_size * config.data.seq_len
    shape = rf"\[{rows},(?:{tokens}|8,128),128\]"
    assert re.search(rf"bf16{shape}", program)
    assert moves(program, rows * tokens * config.model.residual_size) == []
    assert re.search(rf"= \(?f32{shape}", program) is None
    for kernel in ("partial", "partial_backward", "merge", "merge_backward"):
        assert f"depth_attention_{kernel}/pallas_call" in program
    # What phase one gives to a pass's six sites is read where it is.
    assert moves(program, 6 * tokens * config.model.residual_size) == []


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_a_bank_of_matrices_is_never_moved(topology):
    """Nor its gradient, nor what phase one gives to a pass's six sites: tokens lie last in all."""
    mixer = BlockAttention(layers_per_block=3)
    options = {"batch_size": 8, "num_layers": 15, "mixer": mixer, "key_dim": 32}
    config = config_of("rmt-attnres-tiny", **options)
    _, step = compiled(config, topology=topology)
    program, row = step.as_text(), config.train.batch_size * config.data.seq_len
    row *= config.model.residual_size
    for kernel in ("partial", "partial_backward", "merge_read", "merge_read_backward"):
        assert f"depth_attention_matrices_{kernel}/pallas_call" in program
    for kernel in ("read_backward", "store_backward"):
        assert f"key_vector_{kernel}/pallas_call" in program
    for count in (1 + 15 // 3, 6):
        assert moves(program, count * row) == []
    assert re.search(r"= \(?f32\[\d+,8,128,32,32\]", program) is None


@pytest.fixture
def temporary(monkeypatch):
    """A function that returns the temporary memory of a step of 16 x 512 tokens on v5e, in bytes.

    It compiles with XLA's own limit for VMEM: with that of `compiler_options`, it takes three
    times as long, and the memory in HBM hardly differs.
    """
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=16384")
    return _temporary


def _temporary(preset, **changes):
    changes = {f"model.{name.replace('__', '.')}": value for name, value in changes.items()}
    job = Job(
        f"{step_cost.__name__}:lower_step",
        dataclasses.asdict(step_cost.TrainStep(preset, changes=changes)),
    )
    with contextlib.closing(Worker(TARGETS["v5e"], buffers=True, schedules=False)) as worker:
        return worker.compile(job).assignment.temporary


@pytest.mark.slow
def test_block_attention_residuals_take_less_memory_than_the_plain_residual(temporary):
    """48 layers: the bank and one sum a layer, where the plain one keeps two vectors a layer."""
    plain = temporary("gpt2-405m", num_layers=48)
    assert temporary("gpt2-405m-attnres", num_layers=48) < plain


@pytest.mark.slow
def test_activation_memory_of_the_305m_step_hardly_grows_with_key_dim(temporary):
    """From D_k 64 to 256 by what three residuals grow, of which keeping all would add 48."""
    of_one = 16 * 512 * (256 - 64) * 64 * 2
    small, large = temporary("rmt-305m"), temporary("rmt-305m", store__key_dim=256)
    assert large - small < 3 * of_one


@pytest.mark.slow
def test_a_bank_of_matrices_takes_little_more_memory_than_a_residual_a_layer(temporary):
    plain = temporary("rmt-305m", remat="full")
    assert temporary("rmt-attnres-305m") < 1.3 * plain
