"""A new token for each row, compiled by the real TPU compiler: cache and weights stay in place."""

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import rmt_tpu
import sharding
from rmt_tpu.analysis import decode
from rmt_tpu.analysis.preflight import preflight
from rmt_tpu.analysis.prompt import Prompt, placed_decoder
from rmt_tpu.config import RunConfig, overrides
from rmt_tpu.config.presets import run
from rmt_tpu.estimator import Job, compile_jobs, parse_topology
from rmt_tpu.generation import Sampling, choice, programs
from rmt_tpu.generation.layouts import lay_out
from tests import models
from tests.tiers import later

# Kernels are for more tokens than one.
pytestmark = [pytest.mark.compile, pytest.mark.filterwarnings("ignore:no tpu kernel")]
CASES = [
    ("rmt-305m", "v5e:2x2"),
    ("attnres-528m", "v5e:2x2"),
    *later(
        ("rmt-305m", "v5p:2x2x1"),
        ("attnres-528m", "v6e:2x2"),
        ("prenorm-528m", "v6e:2x2"),
        ("gpt2-405m", "v5p:2x2x1"),
        ("llama-374m", "v5e:2x2"),
    ),
]


def copied(program: str) -> int:
    """Bytes of the largest array that an instruction only moves within HBM."""
    bytes_of = {"bf16": 2, "f32": 4, "s32": 4}
    pattern = r"= (\w+)\[([\d,]+)\]\S* (?:copy|transpose)\("
    sizes = [
        bytes_of[kind] * np.prod([int(n) for n in shape.split(",")])
        for kind, shape in re.findall(pattern, program)
        if kind in bytes_of
    ]
    return max(sizes, default=0)


def compile_for(topology, preset, run, tokens, capacity):
    """`run(decoder, tokens, cache)` in bfloat16: the program, and shapes of the cache."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    whole = NamedSharding(Mesh(np.array(devices[:1]), ("all",)), PartitionSpec())
    config = rmt_tpu.preset(preset).replace(compute_dtype="bfloat16")
    graphdef, params = nnx.split(models.abstract(config), nnx.Param)
    shaped = lambda dtype: lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=whole)
    rows = tokens[0]
    cache = jax.eval_shape(lambda p: nnx.merge(graphdef, p).empty_cache(rows, capacity), params)
    args = (
        jax.tree.map(shaped(jnp.bfloat16), params),
        jax.ShapeDtypeStruct(tokens, jnp.int32, sharding=whole),
        jax.tree.map(shaped(None), cache),
    )
    merged = lambda p, *given: run(nnx.merge(graphdef, p), *given)
    with jax.sharding.use_abstract_mesh(whole.mesh.abstract_mesh):
        return jax.jit(merged, donate_argnums=2).lower(*args).compile(), cache


def size_of(cache):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))


@pytest.mark.parametrize("preset, topology", CASES)
def test_steps_copy_no_part_of_the_cache_and_no_layers_weights(preset, topology):
    """A dispatch of weights that lie as the engine has them."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    case = decode.DecodeCase(preset, 32, 1024)
    compiled = decode.lower(device, **dataclasses.asdict(case)).compile()
    abstract = models.abstract(case.model("bfloat16"))
    cache = jax.eval_shape(lambda: abstract.empty_cache(case.batch, case.capacity))
    temporary, moved = compiled.memory_analysis().temp_size_in_bytes, copied(compiled.as_text())
    told = f"{temporary / 1e6:.2f} MB beside {size_of(cache) / 1e6:.0f} MB of cache"
    print(f"{preset}, {topology}: {told}, and at most {moved / 1e6:.2f} MB moved as they are")
    assert temporary < size_of(cache) / 100
    of_layer = size_of(cache) / 2 / abstract.config.num_layers  # keys, or values
    stacks = nnx.state(abstract, nnx.Param)["stacks"]
    of_weights = max(2 * x.size // x.shape[0] for x in jax.tree.leaves(stacks))
    assert moved < min(of_layer / 2, of_weights)


@pytest.mark.slow
def test_no_stack_of_weights_is_copied_to_vmem():
    """XLA would copy W_O of all layers before the product of each layer."""
    device = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices[0]
    case = decode.DecodeCase("llama-374m", 1, 512)
    text = decode.lower(device, **dataclasses.asdict(case)).compile().as_text()
    in_vmem = re.findall(r"bf16\[(24,1024,\d+)\]\{[^}]*S\(1\)", text)
    assert "bf16[24,1024,1024]{" in text and not in_vmem


V4 = {  # kernels of a prompt, and of a new token for each row
    "rmt-305m": ("key_vector_forward", "key_vector_decode"),
    "gpt2-405m": ("attention_blocks_forward", "stacked_product"),
    "attnres-528m": ("depth_attention_partial", "depth_attention_partial_decode"),
    "llama-374m": ("attention_blocks_forward", "stacked_product"),
    "kimi-tiny": ("attention_blocks_forward", "gmm"),
}


@pytest.mark.slow
@pytest.mark.parametrize("preset", V4)
def test_prompts_and_new_tokens_compile_for_a_v4(preset):
    """A core of it has 16 MiB of VMEM, a quarter of what the others have at least."""

    def read(decoder, tokens, cache):
        return decoder.prefill(tokens, jnp.full(1, tokens.shape[1]), cache)

    prompt, _ = compile_for("v4:2x2x1", preset, read, (1, 512), 1024)
    device = topologies.get_topology_desc(platform="tpu", topology_name="v4:2x2x1").devices[0]
    step = decode.lower(device, **dataclasses.asdict(decode.DecodeCase(preset, 8, 1024))).compile()
    of_prompt, of_step = V4[preset]
    assert f"%{of_prompt}" in prompt.as_text()
    assert f"%{of_step}" in step.as_text()


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["rmt-305m", "gpt2-405m"])
def test_a_part_of_a_long_prompt_needs_little_beside_the_cache(preset):
    """2048 of 131,072 tokens: keys and values are laid out for the kernel a layer at a time."""

    def read(decoder, tokens, cache):
        return decoder.extend(tokens, jnp.full(1, tokens.shape[1]), cache)

    compiled, cache = compile_for("v5p:2x2x1", preset, read, (1, 2048), 131072)
    temporary = compiled.memory_analysis().temp_size_in_bytes
    print(f"{preset}: {size_of(cache) / 1e9:.1f} GB of cache, {temporary / 1e9:.1f} GB beside it")
    assert temporary < size_of(cache) / 5
    assert "attention_blocks_forward" in compiled.as_text()


def test_layouts_of_a_large_batch_are_found():
    """A cache of 1024 tokens for 4096 rows would need 17 GB, and a v5e has 16."""
    (device,) = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:1x1", chips_per_host_bounds=[1, 1, 1]
    ).devices
    case = decode.DecodeCase(
        "gpt2-405m", 4096, 32, {"model.num_layers": 1, "model.vocab_size": 512}
    )
    decode.lower(device, **dataclasses.asdict(case))


def lower_steps(devices, *, config, rows, capacity):
    """A dispatch of the engine for rows on a mesh."""
    given = overrides.from_json(RunConfig, config)
    mesh = sharding.make_mesh(given.train.mesh, devices)
    decoder = placed_decoder(given.model, mesh)
    lay_out(decoder, rows)
    model, params = programs.ModelSpec.of(decoder)
    on = lambda spec: (
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
    )
    shapes = jax.eval_shape(lambda p: programs.empty_rows(model, p, rows, capacity), params)
    shapes = jax.tree.map(lambda x, spec: on(spec)(x), shapes, model.rows)
    used, how = jnp.ones(rows, bool), choice([Sampling()] * rows)
    ends = programs.Ends(jnp.zeros(1, jnp.int32), jnp.int32(0))
    others = jax.tree.map(on(PartitionSpec()), (used, how, ends, jnp.bool_(False)))
    return programs.steps.lower(model, params, shapes, *others, 8), {}


@pytest.mark.slow
def test_steps_on_a_mesh_copy_no_part_of_the_cache():
    """A head of keys a device, and rows whose residuals are divided over the same devices."""
    config = run("llama-374m")
    config = overrides.apply(config, {"train.mesh": "tensor=4", "model.compute_dtype": "bfloat16"})
    arguments = {"config": overrides.to_json(config), "rows": 32, "capacity": 1024}
    job = Job("tests.rmt_tpu.generation.tpu_test:lower_steps", arguments, whole_topology=True)
    with contextlib.closing(compile_jobs(parse_topology("v5e:2x2"), [job])) as compiled:
        program = next(compiled)
    run_of = [(program.module, ran.instruction) for ran in program.module.run()]
    keys = [one.result for module, one in run_of if "32,1024,128]" in one.result]
    moved = [one.result for module, one in run_of if module.moves_only(one)]
    assert keys and not [result for result in moved if "1024,128]" in result]
    print(f"{program.memory['temp'] / 1e6:.1f} MB")
    assert program.memory["temp"] < 2 * 85e6


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset, mesh",
    [("llama-attnres-1.2b", "tensor=8"), ("rmt-llama-attnres-1b", "sequence=4,tensor=2")],
)
def test_a_divided_prompt_takes_what_the_paper_says(preset, mesh):
    """One bank of (N + 1) c D / P numbers a device; the cache divided by all of them."""
    config = overrides.apply(run(preset), {"train.mesh": mesh, "model.vocab_size": 512})
    tokens, part, model = 131072, 8192, config.model
    report = preflight(config, parse_topology("v5e:2x4"), prompt=Prompt(tokens, part))
    rows = model.mixer.num_blocks + 1
    bank = 2 * rows * part * model.residual_size // 8
    shape = re.compile(rf"(bf16|f32)\[{rows},")
    found = sum(b.bytes for b in report.buffers if b.kind == "temporaries" and shape.match(b.shape))
    # Keys and values of a head of 64, filled up to a tile.
    cache = 2 * 2 * model.num_layers * tokens * 128
    of_layer = report.memory["temporaries"] - found
    print(
        f"{preset}, {mesh}: MB a device: bank {found / 1e6:.1f} (formula {bank / 1e6:.1f}), cache"
    )
    print(f"{report.memory['cache'] / 1e6:.1f}, what a sublayer has beside {of_layer / 1e6:.1f}")
    assert found == pytest.approx(bank, rel=0.2)
    assert report.memory["cache"] == pytest.approx(cache, rel=0.01)
    assert of_layer < 4 * 2 * part * model.width
