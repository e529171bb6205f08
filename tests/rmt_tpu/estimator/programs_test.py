"""What a compiled program holds in memory and sends, exact where it can be counted by hand."""

import importlib.util
from collections import Counter

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
from rmt_tpu.estimator.collectives import (
    axes_of,
    collectives,
    only_communicates,
    replica_groups,
)
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


MESH = {"data": 2, "fsdp": 1, "key": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("attributes", "groups", "axes"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ((0, 1), (2, 3), (4, 5), (6, 7)), ("tensor",)),
        ("replica_groups={}", (tuple(range(8)),), ("data", "key", "tensor")),
        ("replica_groups=[4,2]<=[8]", ((0, 1), (2, 3), (4, 5), (6, 7)), ("tensor",)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7)), ("data",)),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}, dim",
         ((0, 4), (1, 5), (2, 6), (3, 7)), ("data",)),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}",
         ((0, 4), (1, 5), (2, 6), (3, 7)), ("data",)),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}",
         ((0, 1, 4, 5), (2, 3, 6, 7)), ("data", "tensor")),
        ("replica_groups={{0,3},{1,2},{4,7},{5,6}}", ((0, 3), (1, 2), (4, 7), (5, 6)), ("?",)),
    ],
)  # fmt: skip
def test_groups_of_devices(attributes, groups, axes):
    assert replica_groups(attributes, 8) == groups
    assert axes_of(groups, MESH) == axes


# A gather that XLA spreads over three fusions, one of them beside a product; a reduction that is
# made for its scattered result; and a permutation of a ring of four.
# As a compiler writes it: its lines are long.
SPREAD = """HloModule m

%started (p: f32[8,128]) -> (f32[8,128], f32[16,128]) {
  %p = f32[8,128]{1,0} parameter(0)
  %g = f32[16,128]{1,0} all-gather(%p), replica_groups=[4,2]<=[8], dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %s = (f32[8,128]{1,0}, f32[16,128]{1,0}) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%between (q: f32[8,128]) -> f32[8,128] {
  %q = f32[8,128]{1,0} parameter(0)
  %g.1 = f32[16,128]{1,0} all-gather(%q), replica_groups=[4,2]<=[8], dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %m = f32[8,128]{1,0} multiply(%q, %q)
}

%all-reduce-scatter (r: f32[8,128]) -> f32[4,128] {
  %r = f32[8,128]{1,0} parameter(0)
  %ar = f32[8,128]{1,0} all-reduce(%r), replica_groups={{0,2},{1,3},{4,6},{5,7}}, to_apply=%add
  %z = s32[] constant(0)
  ROOT %ds = f32[4,128]{1,0} dynamic-slice(%ar, %z, %z), dynamic_slice_sizes={4,128}
}

ENTRY %main (a: f32[8,128]) -> f32[4,128] {
  %a = f32[8,128]{1,0} parameter(0)
  %f = (f32[8,128]{1,0}, f32[16,128]{1,0}) fusion(%a), kind=kCustom, calls=%started
  %h = f32[8,128]{1,0} fusion(%a), kind=kOutput, calls=%between
  %cp = (f32[8,128]{1,0}, f32[8,128]{1,0}) collective-permute-start(%h), source_target_pairs={{0,1},{1,3},{3,2},{2,0}}
  %cd = f32[8,128]{1,0} collective-permute-done(%cp)
  %alone = f32[8,128]{1,0} all-reduce(%h), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
  ROOT %e = f32[4,128]{1,0} fusion(%cd), kind=kCustom, calls=%all-reduce-scatter
}
"""  # noqa: E501 (the lines are the compiler's)


def test_collectives_within_fusions_count_once():
    module = Module(SPREAD)
    found = [(c.kind, c.axes, c.devices, c.bytes, c.overlaps) for c in collectives(module, MESH)]
    size = 4 * 8 * 128
    assert found == [
        ("all-gather", ("tensor",), 2, size, True),
        ("collective-permute", ("key", "tensor"), 4, size, True),
        ("reduce-scatter", ("key",), 2, size // 2, False),
    ]
    entry = module.computations["main"]
    only = {name for name, i in entry.items() if only_communicates(module, i)}
    assert only == {"f", "cp", "cd", "alone", "e"}


# Four slices of four devices: what goes between them, and one collective within a slice. The
# reduction is answered after a fusion, the gather at once.
SLICES = """HloModule m

%other (p: f32[8,128]) -> f32[8,128] {
  %p = f32[8,128]{1,0} parameter(0)
  ROOT %n = f32[8,128]{1,0} negate(%p)
}

ENTRY %main (a: f32[8,128]) -> f32[8,128] {
  %a = f32[8,128]{1,0} parameter(0)
  %t = token[] after-all()
  %r = f32[8,128]{1,0} reduce-scatter(%a), replica_groups={{0,1},{2,3}}, dimensions={0}, to_apply=%add
  %s.1 = (f32[8,128]{1,0}, u32[], token[]) send(%r, %t), is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="one_0",_xla_megascale_target="{1,2,3,4}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %r.1 = (f32[8,128]{1,0}, u32[], token[]) recv(%t), is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="one_0",_xla_megascale_target="{1,2,3,4}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %f = f32[8,128]{1,0} fusion(%a), kind=kLoop, calls=%other
  %d.1 = token[] send-done(%s.1), is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}
  %e.1 = (f32[8,128]{1,0}, token[]) recv-done(%r.1), is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}
  %s.2 = (f32[8,128]{1,0}, u32[], token[]) send(%f, %t), is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="two_0",_xla_megascale_target={{100000,100001,200000,200001},{300000,300001,400000,400001}},_xla_megascale_transfer_type="ALL_GATHER"}
  %r.2 = (f32[16,128]{1,0}, u32[], token[]) recv(%t), is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="two_0",_xla_megascale_target={{100000,100001,200000,200001},{300000,300001,400000,400001}},_xla_megascale_transfer_type="ALL_GATHER"}
  %e.2 = (f32[16,128]{1,0}, token[]) recv-done(%r.2), is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}
  %s.3 = (f32[8,128]{1,0}, u32[], token[]) send(%f, %t), is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="three_0",_xla_megascale_target={{100000->300000},{300000->100000}},_xla_megascale_transfer_type="ONE_TO_ONE"}
  %r.3 = (f32[8,128]{1,0}, u32[], token[]) recv(%t), is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="three_0",_xla_megascale_target={{100000->300000},{300000->100000}},_xla_megascale_transfer_type="ONE_TO_ONE"}
  %e.3 = (f32[8,128]{1,0}, token[]) recv-done(%r.3), is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}
  %s.4 = (f32[8,128]{1,0}, u32[], token[]) send(%f, %t), is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="four_0",_xla_megascale_target={{100000,100001,200000,200001},{300000,300001,400000,400001}},_xla_megascale_transfer_type="ALL_TO_ALL"}
  %r.4 = (f32[8,128]{1,0}, u32[], token[]) recv(%t), is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="four_0",_xla_megascale_target={{100000,100001,200000,200001},{300000,300001,400000,400001}},_xla_megascale_transfer_type="ALL_TO_ALL"}
  %e.4 = (f32[8,128]{1,0}, token[]) recv-done(%r.4), is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}
  ROOT %l = f32[8,128]{1,0} fusion(%e.4), kind=kLoop, calls=%other
}
"""  # noqa: E501 (the lines are the compiler's)


def test_what_goes_between_slices_is_told_apart():
    """`data` is between slices alone; of `fsdp`, its 4 devices are in two slices of two each."""
    module, mesh = Module(SLICES), {"data": 2, "fsdp": 4, "key": 2}
    ids = [100_000 * s + d for s in (1, 2, 3, 4) for d in range(4)]
    found = collectives(module, mesh, ids)
    size = 4 * 8 * 128
    assert [(c.kind, c.axes, c.devices, c.bytes, c.overlaps, c.between_slices) for c in found] == [
        ("reduce-scatter", ("key",), 2, size // 2, False, False),
        ("all-reduce", ("data", "fsdp"), 4, 2 * 3 * size // 4, True, True),
        ("all-gather", ("fsdp", "key"), 4, 2 * size, False, True),
        ("collective-permute", ("data",), 2, size, False, True),
        ("all-to-all", ("fsdp", "key"), 4, size // 2, False, True),
    ]
    entry = module.computations["main"]
    computed = {name for name, i in entry.items() if not only_communicates(module, i)}
    assert computed == {"a", "t", "f", "l"}


# Branches -------------------------------------------------------------------------------------

# In each of 3 iterations, one of three branches, the largest of which has a conditional of its own.
BRANCHES = """HloModule m

%none (p: f32[8,128]) -> f32[8,128] {
  ROOT %p = f32[8,128]{1,0} parameter(0)
}

%one (q: f32[8,128]) -> f32[8,128] {
  %q = f32[8,128]{1,0} parameter(0)
  ROOT %send.1 = f32[8,128]{1,0} collective-permute(%q), source_target_pairs={{0,1},{1,0}}
}

%two (r: f32[8,128]) -> f32[8,128] {
  %r = f32[8,128]{1,0} parameter(0)
  %send.2 = f32[8,128]{1,0} collective-permute(%r), source_target_pairs={{0,2},{2,0}}
  %n = s32[] constant(0)
  ROOT %inner = f32[8,128]{1,0} conditional(%n, %send.2, %send.2), branch_computations={%none, %one}
}

%body (t: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %t = (s32[], f32[8,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[8,128]{1,0} get-tuple-element(%t), index=1
  %y = f32[8,128]{1,0} conditional(%i, %x, %x, %x), branch_computations={%one, %two, %none}
  ROOT %o = (s32[], f32[8,128]{1,0}) tuple(%i, %y)
}

%condition (u: (s32[], f32[8,128])) -> pred[] {
  %u = (s32[], f32[8,128]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%u), index=0
  %bound = s32[] constant(3)
  ROOT %lt = pred[] compare(%j, %bound), direction=LT
}

ENTRY %main (a: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %a = (s32[], f32[8,128]{1,0}) parameter(0)
  ROOT %loop = (s32[], f32[8,128]{1,0}) while(%a), condition=%condition, body=%body
}
"""


@pytest.mark.parametrize(
    ("branches", "sent"),
    [
        ("costliest", {"send.1": 3, "send.2": 3}),
        ("cheapest", {}),
        ("all", {"send.1": 6, "send.2": 3}),
    ],
)
def test_a_conditional_takes_one_branch(branches, sent):
    """The figures of bytes, calls and launches are those of the same branches."""
    module = Module(BRANCHES)
    if branches != "costliest":
        module = module.taking(branches)
    times = Counter()
    for ran in module.run():
        if ran.instruction.opcode == "collective-permute":
            times[ran.instruction.name] += ran.times
    assert times == sent and module.launches() == sum(sent.values())
    found = collectives(module, {"data": 2, "key": 2})
    size = 4 * 8 * 128
    assert sum(c.calls for c in found) == sum(sent.values())
    assert sum(c.bytes for c in found) == size * sum(sent.values())


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
