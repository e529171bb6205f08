"""Steps on meshes of TPUs, compiled by the real compiler: what fits, and what is communicated."""

import contextlib
import dataclasses
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

import sharding
from rmt_tpu import Decoder
from rmt_tpu import config as cfg
from rmt_tpu.analysis.step_cost import lower_config
from rmt_tpu.config.presets import run
from rmt_tpu.estimator import Job, compile_jobs, parse_topology
from rmt_tpu.layers.parameters import metadata

pytestmark = pytest.mark.compile


def lowered(config: cfg.RunConfig, topology: str, count: int | None = None):
    """The step of a run, lowered for the first chips of a topology, or for all."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[:count]
    return lower_config(config, devices)


def on_accelerator(preset: str, mesh: str, batch_size: int, seq_len: int = 512, **model):
    config = run(preset)
    model = {"compute_dtype": "bfloat16"} | model
    return dataclasses.replace(
        config,
        model=config.model.replace(**model),
        train=dataclasses.replace(config.train, mesh=mesh, batch_size=batch_size),
        data=dataclasses.replace(config.data, seq_len=seq_len),
    )


WIDE = {"num_layers": 2, "vocab_size": 512, "store": cfg.MatrixStore(key_dim=4096)}


def test_a_residual_too_large_for_a_chip_fits_on_four():
    """D_k 4096: 512 KB a token in bfloat16, 8192 tokens at a time, and a few of them at once."""
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED|out of memory"):
        lowered(on_accelerator("rmt-305m", "data=1", 16, **WIDE), "v5e:2x2", 1).compile()
    step = lowered(on_accelerator("rmt-305m", "key=4", 16, **WIDE), "v5e:2x2")
    compiled = step.compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 15.75 * 2**30
    # A token's slice of the residual, for the tokens of all four chips; never the whole of it.
    program = compiled.as_text()
    assert re.search(r"bf16\[16,(64,1024,512|512,1024,64|1024,64,512)\]", program)
    assert not re.search(r"\[\d+,(64,4096,512|512,4096,64|4096,64,512)\]", program)


def test_residual_memory_falls_with_the_devices_of_key():
    """The same batch, D_k divided by two and by four; what is not residual is small beside it."""
    temporary = {}
    for devices in (2, 4):
        store = cfg.MatrixStore(key_dim=512)
        changes = {"num_layers": 2, "vocab_size": 512, "store": store}
        config = on_accelerator("rmt-305m", f"key={devices}", 16, **changes)
        step = lowered(config, "v5e:2x2", devices)
        temporary[devices] = step.compile().memory_analysis().temp_size_in_bytes
    assert temporary[4] < 0.6 * temporary[2]


@pytest.mark.parametrize(
    "mixer", [cfg.Sum(), cfg.BlockAttention(num_blocks=4)], ids=lambda m: m.kind
)
def test_memory_of_a_pipeline_does_not_grow_with_its_microbatches(mixer):
    """Four times as many of the same two rows: not even by what one of them carries."""
    temporary = {}
    for count in (4, 16):
        sizes = {"num_layers": 4, "vocab_size": 512, "mixer": mixer}
        config = on_accelerator("gpt2-160m", "stage=2", 2 * count, **sizes)
        train = dataclasses.replace(config.train, microbatches=count)
        step = lowered(dataclasses.replace(config, train=train), "v5e:2x2", 2)
        temporary[count] = step.compile().memory_analysis().temp_size_in_bytes
    assert temporary[16] - temporary[4] < 2 * 512 * 768 * 2


# Block caches ----------------------------------------------------------------------------------

BLOCKS, WIDTH = 8, 7168


def lower_features(devices, *, mesh, seq_len, blocks=BLOCKS):
    """A forward pass of one sequence, in blocks of one layer."""
    attention = cfg.Attention(num_heads=8, head_dim=128, positions=cfg.NoPositions())
    model = cfg.ModelConfig(
        (cfg.Stack((attention, cfg.FeedForward(hidden_dim=1024)), blocks),),
        store=cfg.VectorStore(dim=WIDTH),
        mixer=cfg.BlockAttention(sublayers_per_block=2),
        vocab_size=512,
        compute_dtype="bfloat16",
        norm="rmsnorm",
    )
    mesh = sharding.make_mesh(mesh, devices if "8" in mesh else devices[:1])
    abstract = nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract, nnx.Param)
    params = nnx.to_pure_dict(state)
    specs = sharding.parameter_specs(mesh, metadata(abstract, "axes"), params)
    placed = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s))
    params = jax.tree.map(placed, params, specs)
    tokens = placed(jax.ShapeDtypeStruct((1, seq_len), jnp.int32), PartitionSpec())
    forward = sharding.per_device(
        lambda params, tokens: nnx.merge(graphdef, params).features(tokens).z,
        mesh,
        (specs, PartitionSpec()),
        PartitionSpec(None, sharding.RULES["tokens"]),
    )
    return jax.jit(forward).lower(params, tokens)


def compiled_features(topology, **arguments):
    job = Job("tests.rmt_tpu.training.pods_test:lower_features", arguments, whole_topology=True)
    with contextlib.closing(
        compile_jobs(parse_topology(topology), [job], buffers=True)
    ) as programs:
        return next(programs)


@pytest.mark.parametrize(
    "topology, mesh, seq_len, gigabytes",
    [
        ("v5p:2x2x1", "data=1", 128 * 1024, 15.03),
        ("v5e:2x4", "tensor=8", 128 * 1024, 1.88),
        ("v5e:2x4", "tensor=8", 16 * 1024, 0.235),
    ],
)
def test_block_caches_are_divided_over_the_devices(topology, mesh, seq_len, gigabytes):
    """128K tokens of 8 blocks: 15 GB on one chip, 1.9 GB on each of eight, 0.24 GB for 16K."""
    program = compiled_features(topology, mesh=mesh, seq_len=seq_len)
    # The embedding and the blocks: one array, of which there is no second.
    own = seq_len // (8 if "8" in mesh else 1)
    shape = re.compile(rf"bf16\[{BLOCKS + 1},(1,)?{own},{WIDTH}\]")
    (bank,) = [b.bytes for b in program.assignment.live if shape.match(b.shape)]
    assert bank * BLOCKS / (BLOCKS + 1) / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_attention_over_depth_is_local_to_a_device():
    """A sublayer gathers its input along the sequence and scatters the sum of its outputs."""
    program = compiled_features("v5e:2x4", mesh="tensor=8", seq_len=16 * 1024)
    # The compiler may make a reduce-scatter of an all-reduce and a slice of its result; newer ones
    # have it in a fusion, and send the parts that its sizes leave over by a permute.
    kinds = Counter()
    for ran in program.module.run():
        opcode = ran.instruction.opcode
        if re.match("all-|reduce-scatter|collective", opcode) and not opcode.endswith("-done"):
            opcode = opcode.removesuffix("-start").replace("all-reduce", "reduce-scatter")
            kinds[opcode] += ran.times
    assert kinds.pop("all-gather") == 2 * BLOCKS
    assert kinds in ({"reduce-scatter": 2 * BLOCKS}, {"collective-permute": 2 * BLOCKS})
    kernels = {ran.instruction.op_name for ran in program.module.run() if ran.instruction.is_kernel}
    for kernel in ("partial", "merge"):
        assert any(f"depth_attention_{kernel}/" in name for name in kernels)


# Whole rows of the paper's table -----------------------------------------------------------------

SMALL = [("v5p:2x2x1", "data=2,fsdp=2", 64), ("v5e:4x4", "fsdp=4,key=4", 256)]
LARGE = [
    ("v5e:16x16", "data=8,fsdp=16,key=2", 2048),
    ("v5p:8x8x8", "data=32,fsdp=16", 4096),
    ("v6e:16x16", "data=16,fsdp=16", 2048),
]
ROWS = [pytest.param(*row) for row in SMALL]
ROWS += [pytest.param(*row, marks=pytest.mark.slow) for row in LARGE]


@pytest.mark.parametrize("topology, mesh, batch_size", ROWS)
def test_the_305m_step_fits_pods(topology, mesh, batch_size):
    compiled = lowered(on_accelerator("rmt-305m", mesh, batch_size), topology).compile()
    memory = compiled.memory_analysis()
    parameters = 3 * 4 * 305e6 / max(1, int(re.search(r"fsdp=(\d+)", mesh)[1]))
    assert memory.argument_size_in_bytes < 1.2 * parameters
    program = compiled.as_text()
    assert "key_vector_" in program and "all-gather" in program
