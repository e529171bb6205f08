"""What a compiled program sends, from texts of programs that can be counted by hand."""

import dataclasses
import re
from collections import Counter

import numpy as np
import pytest

from rmt_tpu.estimator import Collective, parse_topology, seconds_on_links
from rmt_tpu.estimator.collectives import (
    axes_of,
    collectives,
    only_communicates,
    replica_groups,
)
from rmt_tpu.estimator.hlo import Module

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
        ("collective-permute", ("key", "tensor"), 4, size, False),
        ("reduce-scatter", ("key",), 2, size // 2, False),
    ]
    entry = module.computations["main"]
    only = {name for name, i in entry.items() if only_communicates(module, i)}
    assert only == {"f", "cp", "cd", "alone", "e"}


# Starts of collectives; what stands between a start and its end is put in below.
ASYNCHRONOUS = """HloModule m

%other (p: f32[8,128]) -> f32[8,128] {
  %p = f32[8,128]{1,0} parameter(0)
  ROOT %n = f32[8,128]{1,0} negate(%p)
}

%exchange (q: f32[8,128]) -> f32[8,128] {
  %q = f32[8,128]{1,0} parameter(0)
  ROOT %e = f32[8,128]{1,0} all-to-all(%q), replica_groups=[4,2]<=[8], dimensions={0}
}

%offloaded (q.1: f32[8,128]) -> f32[8,128] {
  %q.1 = f32[8,128]{1,0} parameter(0)
  ROOT %sum = f32[8,128]{1,0} all-reduce(%q.1), replica_groups=[4,2]<=[8], to_apply=%add
}, execution_thread="sparsecore"

ENTRY %main (a: f32[8,128]) -> f32[8,128] {
  %a = f32[8,128]{1,0} parameter(0)
  %s.1 = (f32[8,128]{1,0}, f32[8,128]{1,0}) collective-permute-start(%a), source_target_pairs={{0,1},{1,0}}
  @1
  %d.1 = f32[8,128]{1,0} collective-permute-done(%s.1)
  %s.2 = (f32[8,128]{1,0}, f32[16,128]{1,0}) all-gather-start(%d.1), replica_groups=[4,2]<=[8], dimensions={0}
  @2
  %d.2 = f32[16,128]{1,0} all-gather-done(%s.2)
  %s.3 = ((f32[8,128]{1,0}), f32[8,128]{1,0}, u32[]) async-start(%d.1), calls=%exchange
  %u.3 = ((f32[8,128]{1,0}), f32[8,128]{1,0}, u32[]) async-update(%s.3), calls=%exchange
  @3
  %d.3 = f32[8,128]{1,0} async-done(%u.3), calls=%exchange
  %s.4 = ((), (), (s32[1]{0:S(2)})) call-start(), async_execution_thread="sparsecore", to_apply=%offloaded
  %early = f32[8,128]{1,0} fusion(%a), kind=kLoop, calls=%other
  %u.4 = ((f32[8,128]{1,0}), f32[8,128]{1,0}) call-update(%s.4, %early)
  @4
  ROOT %d.4 = f32[8,128]{1,0} call-done(%u.4)
}
"""  # noqa: E501 (the lines are the compiler's)
WORK = "%f = f32[8,128]{1,0} fusion(%a), kind=kLoop, calls=%other"
NO_WORK = (
    "%b = f32[8,128]{1,0} bitcast(%a)",
    '%b = f32[8,128]{1,0} custom-call(), custom_call_target="AllocateBuffer"',
    "%b = f32[8,128]{1,0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter",
)


@pytest.mark.parametrize("meanwhile", ["", *NO_WORK])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_collective_is_hidden_only_during_work(number, meanwhile):
    scattered = SPREAD[SPREAD.index("%all-reduce-scatter") : SPREAD.index("ENTRY")]
    text = ASYNCHRONOUS.replace("ENTRY", f"{scattered}ENTRY")
    for n in (1, 2, 3, 4):
        text = text.replace(f"@{n}", WORK if n == number else meanwhile.replace("%b", f"%b.{n}"))
    found = [c for c in collectives(Module(text), MESH) if c.kind != "reduce-scatter"]
    kinds = ["collective-permute", "all-gather", "all-to-all", "all-reduce"]
    assert [c.kind for c in found] == kinds
    assert [c.kind for c in found if c.overlaps] == [kinds[number - 1]]


def test_a_collective_of_a_sparse_core_reads_its_operand_once():
    module = Module(re.sub("@[1234]", "", ASYNCHRONOUS))
    entry, size = module.computations["main"], 4 * 8 * 128
    moved = [module.traffic("main", entry[name]).hbm for name in ("s.4", "u.4", "d.4")]
    assert moved == [0, 2 * size, 0]


def test_a_collective_that_a_later_iteration_completes_is_hidden():
    text = re.sub("@[1234]", "", ASYNCHRONOUS).replace("collective-permute-done(%s.1)", "copy(%a)")
    first, *others = collectives(Module(text), MESH)
    assert first.overlaps and not any(c.overlaps for c in others)


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


# Links ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topology", "mesh", "axes", "links"),
    [
        ("v5e:2x2", {"data": 2, "key": 2}, ("key",), 1),
        ("v5e:2x2", {"data": 2, "key": 2}, ("data", "key"), 2),
        ("v5e:4x4", {"data": 4, "key": 4}, ("data",), 1),
        ("v5e:16x16", {"data": 16, "key": 16}, ("data",), 2),
        ("v5e:16x16", {"data": 16, "key": 16}, ("data", "key"), 4),
        ("v5e:16x16", {"data": 32, "key": 8}, ("key",), 1),
        ("v5e:16x16", {"data": 16, "key": 16}, ("?",), 4),
        ("v5p:4x4x8", {"data": 16, "key": 8}, ("key",), 2),
        ("v5p:4x4x8", {"data": 16, "key": 8}, ("data",), 4),
        ("v5p:2x2x4", {"data": 4, "key": 4}, ("key",), 1),
        ("v5p:2x2x4", {"data": 4, "key": 4}, ("data",), 2),
    ],
)
def test_links_that_a_collective_can_use(topology, mesh, axes, links):
    target = parse_topology(topology)
    coordinates = [[*at, 0][:3] for at in np.ndindex(target.shape)]
    sent = Collective("all-gather", "", axes, 2, calls=1, bytes=10**9, overlaps=False)
    link = target.interconnect / (2 * len(target.shape))
    expected = 1e9 / (links * link)
    assert seconds_on_links(sent, target, mesh, coordinates) == pytest.approx(expected)
    passed = dataclasses.replace(sent, kind="collective-permute")
    one = 1e9 / link if axes != ("?",) else expected
    assert seconds_on_links(passed, target, mesh, coordinates) == pytest.approx(one)


def test_all_links_count_where_a_collectives_links_are_unknown():
    sent = Collective("all-gather", "", ("data",), 2, calls=1, bytes=10**9, overlaps=False)
    gpus = parse_topology("h100:2")
    assert seconds_on_links(sent, gpus, {"data": 2}, None) == 1e9 / gpus.interconnect
    assert [parse_topology(name).devices for name in ("v5p:2x2x1", "tpu7x:2x2x1")] == [4, 8]
    # Two cores of a chip, and two slices.
    chip, both = parse_topology("tpu7x:1x1x1"), 2 * [[0, 0, 0]]
    assert seconds_on_links(sent, chip, {"data": 2}, both) == 1e9 / chip.interconnect
    between = dataclasses.replace(sent, between_slices=True)
    assert seconds_on_links(between, chip, {"data": 2}, both) == 1e9 / chip.dcn
