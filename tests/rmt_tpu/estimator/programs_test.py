"""What a compiled program holds in memory and sends, exact where it can be counted by hand."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rmt_tpu import estimator
from rmt_tpu.estimator import (
    TARGETS,
    CompilerError,
    Failure,
    Job,
    compile_jobs,
    lower,
    parse_topology,
)
from rmt_tpu.estimator.collectives import collectives
from rmt_tpu.estimator.hlo import Module
from rmt_tpu.estimator.memory import parse_assignment

LAYERS = 5

# What the worker processes compile ------------------------------------------------------------


def lower_gradient(device, layers, rows):
    """Of a product a layer, whose forward pass keeps what every layer is given."""

    def loss(weights, x):
        step = jax.checkpoint(lambda x, w: (jnp.tanh(jnp.dot(x, w)), None), prevent_cse=False)
        return jnp.sum(jax.lax.scan(step, x, weights)[0].astype(jnp.float32))

    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((layers, 2048, 2048), (rows, 2048))
    ]
    return lower(jax.grad(loss), shapes, device), {"layers": layers}


SENT = 2**20  # float32 of each device


def lower_collectives(devices):
    """One of each kind; in a loop, two."""
    mesh = jax.sharding.Mesh(np.array(devices).reshape(2, 2), ("outer", "inner"))

    def per_device(x):
        def step(x, _):
            gathered = jax.lax.all_gather(x, "inner", tiled=True)
            kept = jax.lax.psum_scatter(jnp.sin(gathered), "inner", tiled=True)
            return jnp.tanh(jax.lax.psum(kept, "outer")), None

        x = jax.lax.scan(step, x, None, length=LAYERS)[0]
        x = jnp.cos(jax.lax.all_to_all(x, "outer", 0, 1, tiled=True))
        return jax.lax.ppermute(x, "inner", [(0, 1), (1, 0)])

    whole = jax.sharding.PartitionSpec(("outer", "inner"))
    apply = jax.shard_map(per_device, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    placed = jax.sharding.NamedSharding(mesh, whole)
    x = jax.ShapeDtypeStruct((4 * 1024, SENT // 1024), jnp.float32, sharding=placed)
    return jax.jit(apply).lower(x), {"mesh": dict(mesh.shape)}


def job(name, *, whole_topology=False, **arguments):
    return Job(f"tests.rmt_tpu.estimator.programs_test:{name}", arguments, whole_topology)


# Memory ---------------------------------------------------------------------------------------


@pytest.mark.compile
def test_memory_of_a_gradient_and_of_one_that_does_not_fit():
    """Sizes beyond VMEM, which would else hold what is kept."""
    target, layers, rows = TARGETS["v5e"], 12, 8192
    jobs = [job("lower_gradient", layers=layers, rows=r) for r in (rows, 64 * rows)]
    fits, too_large = compile_jobs(target, jobs, buffers=True)
    weights, kept = 2 * layers * 2048**2, 2 * layers * rows * 2048
    assert fits.info == too_large.info == {"layers": layers}
    found = {buffer.name: buffer.bytes for buffer in fits.assignment.arguments}
    assert found == {"weights": weights, "x": 2 * rows * 2048}
    assert sum(found.values()) == fits.memory["argument"]
    (largest, *others) = fits.assignment.live
    assert (largest.bytes, largest.shape) == (kept, f"bf16[{layers},{rows},2048]")
    assert largest.is_saved and "jvp()" in largest.name and "transpose" not in largest.name
    assert not any(buffer.is_saved for buffer in others if buffer.bytes > kept / layers)
    assert 0 <= fits.assignment.gaps < 0.1 * fits.assignment.temporary
    # XLA tells of two digits behind the point, and names the kind of memory.
    assert isinstance(too_large, Failure) and too_large.error == "JaxRuntimeError"
    needed = too_large.assignment.total
    assert needed > target.hbm
    assert f"({needed / 2**30:.2f}G) exceeds available HBM (15.75G)" in too_large.message
    assert too_large.assignment.live[0].bytes == 64 * kept
    assert target.hbm == 15.75 * 2**30


def test_a_name_with_quotes_is_whole():
    text = r"""HloModule m

ENTRY %main (a: f32[2]) -> f32[2] {
  ROOT %a = f32[2]{0} parameter(0), metadata={op_name="state.copies[\"[\'x\'][0]\"]" line=3}
}
"""
    module = Module(text)
    (instruction,) = module.computations[module.entry].values()
    assert instruction.op_name == "state.copies[\"['x'][0]\"]"


PROGRAM = """HloModule m, is_scheduled=true

%body (t: (s32[], bf16[24,256,128])) -> (s32[], bf16[24,256,128]) {
  %t = (s32[], bf16[24,256,128]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %w = bf16[24,256,128]{2,1,0} get-tuple-element(%t), index=1
  %f = bf16[256,128]{1,0} custom-call(%w), custom_call_target="f"
  %add = bf16[256,128]{1,0} add(%f, %f), metadata={op_name="jit(f)/x/add"}
  ROOT %r = (s32[], bf16[24,256,128]{2,1,0}) tuple(%i, %w)
}

%condition (t.1: (s32[], bf16[24,256,128])) -> pred[] {
  %bound = s32[] constant(24)
  %t.1 = (s32[], bf16[24,256,128]{2,1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%t.1), index=0
  ROOT %lt = pred[] compare(%i.1, %bound), direction=LT
}

ENTRY %main (a: bf16[24,256,128], x: f32[3,100,64]) -> bf16[24,256,128] {
  %a = bf16[24,256,128]{2,1,0} parameter(0), metadata={op_name="a"}
  %x = f32[3,100,64]{2,1,0} parameter(1), metadata={op_name="x"}
  %y = f32[3,100,64]{1,2,0} copy(%x)
  %start = s32[] constant(0)
  %state = (s32[], bf16[24,256,128]{2,1,0}) tuple(%start, %a)
  %loop = (s32[], bf16[24,256,128]{2,1,0}) while(%state), condition=%condition, body=%body
  ROOT %out = bf16[24,256,128]{2,1,0} get-tuple-element(%loop), index=1
}
"""

ASSIGNMENT = """BufferAssignment:
allocation 0: size 1572864, parameter 0, shape |bf16[24,256,128]| at ShapeIndex {}:
 value: <1 a @0> (size=1572864,offset=0): bf16[24,256,128]{2,1,0:T(8,128)(2,1)}
allocation 1: size 100, page 0, parameter 1, shape |f32[3,100,64]| at ShapeIndex {}, maybe-live-out:
allocation 2: size 7, constant:
 value: <3 bound @0> (size=7,offset=0): s32[]
allocation 3: size 1000, preallocated-temp:
 value: <4 y @0> (size=300,offset=0): f32[3,100,64]{1,2,0:T(8,128)}
 value: <5 f @0> (size=300,offset=0): bf16[256,128]{1,0}
 value: <6 cs{1} @0> (size=500,offset=400): f32[3,100,64]{1,2,0}
 value: <7 t{1} (phi) @0> (size=400,offset=300): bf16[24,256,128]{2,1,0}
 value: <8 add @0> (size=100,offset=900): bf16[256,128]{1,0}
allocation 4: size 9999, color 1, page 0, preallocated-temp:
 value: <9 cd @1> (size=9999,offset=0): f32[3,100,64]{1,2,0:T(8,128)S(1)}
"""

LIVES = """HloLiveRange (max 9):
  InstructionSequence:
    0:a
    1:x
    2:y
  BufferLiveRange:
    y{}:0-1
    cs{1}:0-3
    f{}:2-6
    t{1}:4-6
    add{}:6-8
  Live ranges at 0 (peak):
    y{}: 1 bytes (cumulative: 1 bytes)
"""


def test_what_is_in_memory_when_most_is_needed():
    found = parse_assignment(ASSIGNMENT, LIVES, Module(PROGRAM))
    assert [buffer.bytes for buffer in found.arguments] == [1572864, 100]
    assert found.temporary == 1000 and found.other == 7 and found.total == 1572864 + 100 + 1007
    # y and cs, then f and cs, then f, t and add: 800, 800 and 800; the first of them counts.
    assert {(b.instruction, b.bytes) for b in found.live} == {("y", 300), ("cs{1}", 500)}
    assert found.gaps == 200
    later = LIVES.replace("t{1}:4-6", "t{1}:4-6\n    h{}:4-6")
    grown = ASSIGNMENT.replace("<8 add @0> (size=100", "<8 add @0> (size=101")
    found = parse_assignment(grown, later, Module(PROGRAM))
    assert [(b.instruction, b.bytes) for b in found.live] == [
        ("t{1}", 400),
        ("f", 300),
        ("add", 101),
    ]
    # What a loop only hands on is called by what it is given.
    assert [b.name for b in found.live] == ["a", "f", "jit(f)/x/add"]
    assert found.live[2].shape == "bf16[256,128]"
    assert not any(buffer.is_saved for buffer in found.live)


# Collectives ----------------------------------------------------------------------------------


@pytest.mark.compile
def test_collectives_of_a_program():
    (program,) = compile_jobs(TARGETS["v5e"], [job("lower_collectives", whole_topology=True)])
    found = {}
    for c in collectives(program.module, program.info["mesh"]):
        found.setdefault((c.kind, c.axes), []).append((c.devices, c.calls, c.bytes))
    size = 4 * SENT
    assert found == {
        # Half of the two devices' arrays, which are twice as large together.
        ("all-gather", ("inner",)): [(2, LAYERS, LAYERS * size)],
        ("reduce-scatter", ("inner",)): [(2, LAYERS, LAYERS * size)],
        # Twice half of an array.
        ("all-reduce", ("outer",)): [(2, LAYERS, LAYERS * size)],
        ("all-to-all", ("outer",)): [(2, 1, size // 2)],
        ("collective-permute", ("inner",)): [(2, 1, size)],
    }


# Topologies -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("v5e:16x16", (16, 16), {}),
        ("v5e:1x1", (1, 1), {"chips_per_host_bounds": [1, 1, 1]}),
        ("v5p:4x4x8", (4, 4, 8), {}),
        ("tpu7x:1x1x1", (1, 1, 1), {"chips_per_host_bounds": [1, 1, 1]}),
    ],
)
def test_topologies(name, shape, options):
    target = parse_topology(name)
    assert target.shape == shape and target.name == name.partition(":")[0]
    assert target.options == {"platform": "tpu", "topology_name": name} | options
    assert target.label == name
    several = parse_topology(name, 3)
    assert several.options == target.options | {"num_slices": 3}
    assert several.label == f"3 slices of {name}"


@pytest.mark.parametrize(
    "name",
    [
        "v5e",
        "v7:2x2",
        "v5e:3x3",
        "v5e:2x2x1",
        "v5e:16x32",
        "v5e:2x128",
        "v6e:32x8",
        "v5e:axb",
        "v5p:2x2",
        "v6e:0x2",
        "h100:9",
    ],
)
def test_topologies_that_are_none(name):
    with pytest.raises(ValueError, match=rf"^'{name}' is .*; legal: v5e:AxB and v6e:AxB"):
        parse_topology(name)


def test_gpus_have_no_slices():
    with pytest.raises(
        ValueError, match=r"^'h100:8' has several slices, but only TPUs can have more than one$"
    ):
        parse_topology("h100:8", 2)


def test_peaks_are_the_makers():
    peaks = {name: round(target.peak_flops / 1e12) for name, target in estimator.DEVICES.items()}
    # A TPU7x device is half a chip; there is no model of a GPU's time.
    assert peaks == {"v5e": 197, "v5p": 459, "v6e": 918, "tpu7x": 1153} | dict.fromkeys(
        ("a100", "h100", "h200", "b200"), 0
    )


def test_no_compiler_for_gpus(monkeypatch):
    target = parse_topology("h100:2")
    with monkeypatch.context() as patched:
        patched.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(
            CompilerError, match=r"CUDA plugin is not installed.* pip install --no-deps"
        ):
            next(compile_jobs(target, [job("lower_gradient")]))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CompilerError, match="ptxas is not on the PATH"):
        next(compile_jobs(target, [job("lower_gradient")]))
