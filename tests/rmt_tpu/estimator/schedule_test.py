"""The cost model for kernels: exact on schedules and programs that can be counted by hand."""

import dataclasses
import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rmt_tpu.estimator import (
    TARGETS,
    CompilerError,
    Failure,
    Job,
    compile_jobs,
    lower,
    measure,
    program_cost,
    report,
)
from rmt_tpu.estimator.cost import MODELS, ProgramCost
from rmt_tpu.estimator.hlo import Bytes, Module
from rmt_tpu.estimator.ops import OPS, MinimumWork, Op, OpCase, cases, elements_per_sublayer
from rmt_tpu.estimator.schedule import parse_schedule

ROWS, INNER, COLUMNS, BLOCK, CHUNK, LAYERS = 4096, 512, 512, 1024, 256, 5

# What the worker processes compile ------------------------------------------------------------


def product(x, y):
    """x @ y as a kernel: a grid over blocks of rows, in each a loop unrolled by two."""

    def kernel(x, y, out):
        def body(i, _):
            rows = pl.ds(i * CHUNK, CHUNK)
            chunk = jnp.dot(x[rows, :], y[...], preferred_element_type=jnp.float32)
            out[rows, :] = chunk.astype(out.dtype)

        jax.lax.fori_loop(0, BLOCK // CHUNK, body, None, unroll=2)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((ROWS, COLUMNS), x.dtype),
        grid=(ROWS // BLOCK,),
        in_specs=[
            pl.BlockSpec((BLOCK, INNER), lambda i: (i, 0)),
            pl.BlockSpec((INNER, COLUMNS), lambda i: (0, 0)),
        ],
        out_specs=pl.BlockSpec((BLOCK, COLUMNS), lambda i: (i, 0)),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        name="product",
    )(x, y)


def lower_product(device):
    return lower(product, (array(ROWS, INNER), array(INNER, COLUMNS)), device)


def lower_scan(device, layers):
    """A product a layer, with the weights of all layers in one array."""

    def apply(x, weights):
        step = lambda x, w: (jnp.tanh(jnp.dot(x, w)), None)
        return jax.lax.scan(step, x, weights)[0]

    return lower(apply, (array(4096, 2048), array(layers, 2048, 2048)), device)


def lower_turned_product(device):
    """A product with tokens last, whose weights XLA turns: their layout is not the compiler's."""
    here = jax.sharding.SingleDeviceSharding(device)
    shapes = (4, 2 * INNER, COLUMNS), (2 * INNER, 2 * COLUMNS)
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=here) for shape in shapes]
    multiply = lambda x, w: jnp.einsum("bkn,kd->bdn", x, w)
    return jax.jit(multiply, out_shardings=here).lower(*given)


def lower_nothing(device):
    raise ValueError("no such\nprogram")


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def job(name, **arguments):
    return Job(f"tests.rmt_tpu.estimator.schedule_test:{name}", arguments)


# Compiled for real ----------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parametrize("name", TARGETS)
def test_product_is_what_is_counted_by_hand(name):
    target = TARGETS[name]
    (program,) = compile_jobs(target, [job("lower_product")])
    (kernel,) = program_cost(program).kernels
    matrix = target.matrix
    # 16 rows at a time through every tile of the right-hand side, over all units of all cores.
    issues = ROWS // 16 * (INNER // matrix.size) * (COLUMNS // matrix.size)
    assert kernel.mxu_cycles == issues * matrix.rows16 // matrix.units // target.cores
    flops = 2 * ROWS * INNER * COLUMNS
    assert kernel.mxu_cycles == pytest.approx(flops / target.peak_flops * target.clock)
    assert kernel.trips == (ROWS // BLOCK // target.cores, BLOCK // CHUNK // 2)
    # No kernel is faster than its matrix units, and this one waits little for them.
    assert kernel.mxu_cycles < kernel.cycles < 2.5 * kernel.mxu_cycles
    assert kernel.unit_use["MXU"] == pytest.approx(kernel.mxu_cycles / kernel.cycles, rel=0.5)
    moved = 2 * (ROWS * INNER + INNER * COLUMNS + ROWS * COLUMNS)
    assert kernel.bytes.total == moved
    longer = max(kernel.cycles / target.clock, moved / target.bandwidth)
    assert kernel.seconds == pytest.approx(longer)
    # Blocks of rows twice, for the pipeline.
    assert 2 * 2 * 2 * BLOCK * INNER <= kernel.vmem_bytes < target.vmem


@pytest.mark.compile
@pytest.mark.parametrize("name", ["v5e", "v5p"])
def test_products_of_rows_that_a_unit_keeps_add_up_to_the_flops(name):
    """Two thirds of the products of this instruction are `vmatmul.lmr`, on these chips alone."""
    target = TARGETS[name]
    (program,) = compile_jobs(target, [job("lower_turned_product")])
    (found,) = [s for s in program.schedules.values() if s.mxu_cycles]
    flops = 2 * 4 * (2 * INNER) * COLUMNS * (2 * COLUMNS)
    assert found.mxu_cycles == pytest.approx(flops / target.peak_flops * target.clock)


@pytest.mark.compile
def test_scan_counts_every_layer_and_slices_of_stacked_weights():
    target, told = TARGETS["v5e"], []
    jobs = [job("lower_scan", layers=n) for n in (LAYERS, 2 * LAYERS)]
    jobs.insert(1, job("lower_nothing"))
    short, failed, long = compile_jobs(target, jobs, told.append)
    assert failed == Failure("ValueError: no such program", "ValueError")
    assert [line.split(":")[0] for line in told] == ["v5e"] * 3 and "failed" in told[1]
    # Every layer runs one product, which reads its own weights and not those of all layers.
    for program, layers in ((short, LAYERS), (long, 2 * LAYERS)):
        (ran,) = [r for r in program.module.run() if r.depth and "tanh" in r.instruction.name]
        assert ran.times == layers
        traffic = program.module.traffic(ran.computation, ran.instruction)
        moved = 2 * (2 * 4096 * 2048 + 2048 * 2048)
        assert moved <= traffic.total < 1.01 * moved
    # A layer takes at least what the matrix units take, and not twice that.
    short, long = (program_cost(program).seconds for program in (short, long))
    floor = 2 * 4096 * 2048 * 2048 / target.peak_flops
    assert floor <= (long - short) / LAYERS < 2 * floor


def test_no_compiler(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CompilerError, match=r"libtpu is not installed; pip install"):
        next(compile_jobs(TARGETS["v5e"], [job("lower_product")]))


@pytest.mark.compile
def test_process_that_dies():
    with pytest.raises(CompilerError, match=r"compiling for v5e exited with code 3: goodbye"):
        list(compile_jobs(TARGETS["v5e"], [job("leave")]))


def leave(device):
    import os
    import sys

    print("goodbye", file=sys.stderr, flush=True)
    os._exit(3)


# Schedules ------------------------------------------------------------------------------------

MATRIX = TARGETS["v5e"].matrix


def schedule(*bundles, **options):
    """A dump with these bundles: `tag depth text`, and the multiplier used as often as it says."""
    lines, use = [], []
    for i, (head, text) in enumerate(bundles):
        lines.append(f"  {hex(i) if i else '0'} {head} {{ {text} }}")
        use.append(f"{text.count('vmatmul')} 1")
    utilization = "\n".join(["== CAPACITY:", "MXU, SALU", "4 2", "== UTILIZATION:", *use])
    return parse_schedule(
        "= control target key end\n" + "\n".join(lines), utilization, MATRIX, **options
    )


def loop(depth, index, bound, *body, step=1, start=0, region=7):
    """The bundles of a loop over `index` with a body between its first and last bundle."""
    marks = ">" * depth
    first = f"%s{index} = sphi %s{index}9, %s{index}1 }} /* Start region {region}"
    test = f"%p{index} = scmp.ge.s32.totalorder %s{index}1, {bound} /* loop exit test */"
    return [
        ("  :" + ">" * (depth - 1), f"%s{index}9 = smov {start}"),
        ("LB: " + marks, first),
        (f"  : {marks}", f"%s{index}1 = sadd.s32 {step}, %s{index}"),
        *body,
        (f"  : {marks}", f"{test}  ;;  %9 = sbr.rel (!%p{index}) target = $region{region}"),
    ]


def test_nested_loops():
    inner = loop(2, 2, 20, step=4, start=4, region=8)
    found = schedule(("  :", "nop"), *loop(1, 1, 3, *inner), ("  :", "nop"))
    outer, innermost = found.program.inner[0], found.program.inner[0].inner[0]
    assert (outer.trips, innermost.trips) == (3, 4)
    # Two bundles and the start of the loop; three and the start of the inner one; three.
    assert (found.program.bundles, outer.bundles, innermost.bundles) == (3, 4, 3)
    assert found.cycles == found.bundles == 3 + 3 * (4 + 4 * 3)
    assert found.unknown_loops == 0
    assert found.unit_use["SALU"] == 0.5 and found.unit_use["MXU"] == 0


def test_grid_runs_two_more_iterations():
    bundles = loop(1, 1, 18)
    bundles[1] = (bundles[1][0], bundles[1][1] + " iteration index, stage = 0")
    assert schedule(*bundles).program.inner[0].trips == 16


def test_index_that_goes_round_through_a_copy():
    copied = ("  : >", "%s12 = smov %s11")
    # Or through memory, where registers run out; the loop's end then tests what it got back.
    spilled = ("  : >", "%3 = sst [smem:[#allocation7_spill]] %s11")
    filled = ("  : >", "%s12 = sld [smem:[#allocation7_spill]]")
    for copies in ([copied], [spilled, filled]):
        first, phi, step, last = loop(1, 1, 6)
        phi, last = ((head, text.replace("%s11", "%s12")) for head, text in (phi, last))
        assert schedule(first, phi, step, *copies, last).program.inner[0].trips == 6


def test_of_two_ways_the_longer_counts():
    """And what only the first or last step does is left out; none of it in other kernels."""

    def region(number, length):
        branch = ("  : >", f"%9 = sbr.rel (%p2) target = $region{number}")
        inside = [("  : >", "nop")] * (4 + length)  # four of them are executed in any case
        return [branch, *inside, ("PF: >", f"nop }} /* Start/End empty region {number}")]

    body = [bundle for n, length in ((20, 1), (22, 5), (24, 3)) for bundle in region(n, length)]
    bundles = loop(1, 1, 10, *body)
    every, one = schedule(*bundles), schedule(*bundles, longest_branch_only=True)
    assert every.program.inner[0].bundles - one.program.inner[0].bundles == 1 + 3
    assert one.program.inner[0].trips == 10


@pytest.mark.parametrize("behind", [0, 6])
def test_index_that_is_kept_in_memory(behind):
    """From before the loop on: there is no phi of it. It may be stored behind the branch back."""
    _, (head, phi), _, (tail, end) = loop(1, 1, 10)
    slot = "[smem:[#allocation7_spill]]"
    stored = ("  : >", f"%4 = sst {slot} %s11")
    found = schedule(
        ("  :", "%s4 = smov 2"),
        ("  :", f"%3 = sst {slot} %s4"),
        (head, phi.replace("%s1 ", "%s8 ")),
        ("  : >", f"%s10 = sld {slot}"),
        ("  : >", "%s11 = sadd.s32 1, %s10"),
        *([] if behind else [stored]),
        (tail, end),
        *[("  : >", "nop")] * behind,
        *([stored] if behind else []),
        ("  :", f"%5 = sst {slot} %s7"),
    )
    assert found.program.inner[0].trips == 8


def test_unknown_trips_count_once_and_are_told():
    found = schedule(*loop(1, 1, "%s5"))
    assert found.program.inner[0].trips is None and found.unknown_loops == 1
    assert found.bundles == 4


def test_units_waited_for():
    result = ("  :", "%v2 = vpop.f32.mrf.mxu0")
    multiply = ("  :", "%v1 = vmatmul.bf16.gmra.mxu0 %v0")
    # Nothing waits for a result, and the second product for the unit.
    assert schedule(multiply, result).cycles == 2
    two = schedule(multiply, multiply, result, result)
    assert two.cycles == 1 + MATRIX.rows16 + 2
    assert two.mxu_cycles == 2 * MATRIX.rows16
    # Other units work at the same time.
    other = ("  :", "%v1 = vmatmul.bf16.gmra.mxu1 %v0")
    assert schedule(multiply, other).mxu_cycles == MATRIX.rows16
    assert schedule(multiply, other).cycles == 2
    # A product of float32 rows is shorter.
    narrow = ("  :", "%v1 = vmatmul.f32.gmra.mxu0 %v0")
    assert schedule(narrow).mxu_cycles == MATRIX.rows8_float32
    assert schedule(narrow, multiply).cycles == 1 + MATRIX.rows8_float32
    # So is one of rows that the unit keeps.
    kept = ("  :", "%v1 = vmatmul.lmr.bf16.gmra.16.mxu0")
    assert schedule(kept).mxu_cycles == MATRIX.rows16 // 2
    assert schedule(kept, multiply).cycles == 1 + MATRIX.rows16 // 2
    # What a unit has just loaded, it uses a little later.
    push = ("  :", "%1 = vmatpush.bf16.msra.mxu0 %v3")
    assert schedule(push, multiply).cycles == 1 + MATRIX.push_to_product
    assert schedule(push, push).cycles == 1 + MATRIX.push


def test_copies_within_vmem_are_told():
    fetch = ("  :", "%7 = dma.hbm_to_vmem [thread:$0] %s1")
    copy = ("  :", "%7 = dma.vmem_to_vmem [thread:$0] %s1")
    assert not schedule(fetch).copies_in_vmem and schedule(fetch, copy).copies_in_vmem


def test_dump_that_is_not_whole():
    with pytest.raises(ValueError, match="0 bundles, and its file of unit usage has 0;"):
        schedule()


# Programs -------------------------------------------------------------------------------------

# As a compiler writes it: its lines are long.
PROGRAM = """HloModule m, is_scheduled=true

%fused_slice (p0: bf16[24,256,128], p1: s32[]) -> bf16[256,128] {
  %p0 = bf16[24,256,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p1 = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %ds = bf16[1,256,128]{2,1,0:T(8,128)(2,1)} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,256,128}
  ROOT %b = bf16[256,128]{1,0:T(8,128)(2,1)} bitcast(%ds)
}

%fused_update (q0: bf16[24,256,128], q1: bf16[256,128], q2: s32[]) -> bf16[24,256,128] {
  %q0 = bf16[24,256,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %q1 = bf16[256,128]{1,0:T(8,128)(2,1)} parameter(1)
  %c = bf16[1,256,128]{2,1,0:T(8,128)(2,1)} bitcast(%q1)
  %q2 = s32[]{:T(128)} parameter(2)
  %zero.1 = s32[]{:T(128)} constant(0)
  ROOT %dus = bf16[24,256,128]{2,1,0:T(8,128)(2,1)} dynamic-update-slice(%q0, %c, %q2, %zero.1, %zero.1)
}

%body (t: (s32[], bf16[24,256,128])) -> (s32[], bf16[24,256,128]) {
  %t = (s32[]{:T(128)}, bf16[24,256,128]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%t), index=0
  %w = bf16[24,256,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%t), index=1
  %f = bf16[256,128]{1,0:T(8,128)(2,1)} fusion(%w, %i), kind=kLoop, calls=%fused_slice, backend_config={"estimated_cycles":"70"}
  %add = bf16[256,128]{1,0:T(8,128)(2,1)S(1)} add(%f, %f), metadata={op_name="jit(f)/x/add"}
  %u = bf16[24,256,128]{2,1,0:T(8,128)(2,1)} fusion(%w, %add, %i), kind=kLoop, calls=%fused_update
  ROOT %r = (s32[]{:T(128)}, bf16[24,256,128]{2,1,0:T(8,128)(2,1)}) tuple(%i, %u)
}

%condition (t.1: (s32[], bf16[24,256,128])) -> pred[] {
  %bound = s32[]{:T(128)} constant(24)
  %t.1 = (s32[]{:T(128)}, bf16[24,256,128]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%t.1), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i.1, %bound), direction=LT
}

ENTRY %main (a: bf16[24,256,128], x: f32[3,100,64]) -> bf16[24,256,128] {
  %a = bf16[24,256,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %x = f32[3,100,64]{2,1,0:T(8,128)} parameter(1)
  %y = f32[3,100,64]{1,2,0:T(8,128)} copy(%x)
  %cs = (f32[3,100,64]{1,2,0:T(8,128)S(1)}, f32[3,100,64]{1,2,0:T(8,128)}, u32[]{:S(2)}) copy-start(%y)
  %cd = f32[3,100,64]{1,2,0:T(8,128)S(1)} copy-done(%cs)
  %start = s32[]{:T(128)} constant(0)
  %state = (s32[]{:T(128)}, bf16[24,256,128]{2,1,0:T(8,128)(2,1)}) tuple(%start, %a)
  %loop = (s32[]{:T(128)}, bf16[24,256,128]{2,1,0:T(8,128)(2,1)}) while(%state), condition=%condition, body=%body
  ROOT %out = bf16[24,256,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%loop), index=1
}
"""  # noqa: E501 (the lines are the compiler's)


# A product, during which another array is gathered; the fusion passes on all arrays of the gather.
GATHERED_MEANWHILE = """HloModule m

%async_collective_fusion (part: bf16[64,128], whole: bf16[256,128], x: bf16[8,128], w: bf16[128,16]) -> (bf16[8,16], bf16[64,128], bf16[256,128], bf16[256,128]) {
  %x = bf16[8,128]{1,0} parameter(2)
  %w = bf16[128,16]{1,0} parameter(3)
  %product = bf16[8,16]{1,0} convolution(%x, %w), dim_labels=bf_io->bf
  %part = bf16[64,128]{1,0} parameter(0)
  %whole = bf16[256,128]{1,0} parameter(1)
  %gather = bf16[256,128]{1,0} all-gather(%part), replica_groups=mesh['a'=4] {'a'}, dimensions={0}
  ROOT %t = (bf16[8,16]{1,0}, bf16[64,128]{1,0}, bf16[256,128]{1,0}, bf16[256,128]{1,0}) tuple(%product, %part, %whole, %gather)
}

ENTRY %main (part.1: bf16[64,128], whole.1: bf16[256,128], x.1: bf16[8,128], w.1: bf16[128,16]) -> (bf16[8,16], bf16[64,128], bf16[256,128], bf16[256,128]) {
  %part.1 = bf16[64,128]{1,0} parameter(0)
  %whole.1 = bf16[256,128]{1,0} parameter(1)
  %x.1 = bf16[8,128]{1,0} parameter(2)
  %w.1 = bf16[128,16]{1,0} parameter(3)
  ROOT %f = (bf16[8,16]{1,0}, bf16[64,128]{1,0}, bf16[256,128]{1,0}, bf16[256,128]{1,0}) fusion(%part.1, %whole.1, %x.1, %w.1), kind=kOutput, output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {}), {3}: (1, {})}, calls=%async_collective_fusion
}
"""  # noqa: E501 (the lines are the compiler's)


@pytest.mark.parametrize("reads_part", [False, True])
def test_a_gather_during_a_product_moves_no_bytes_of_the_product(reads_part):
    text = GATHERED_MEANWHILE
    if reads_part:
        text = text.replace("convolution(%x, %w)", "convolution(%part, %w)")
    module = Module(text)
    (ran,) = (r for r in module.run() if r.instruction.name == "f")
    read = 2 * (64 * 128 if reads_part else 8 * 128) + 2 * 128 * 16
    assert module.traffic(ran.computation, ran.instruction) == Bytes(hbm=read + 2 * 8 * 16)


def test_bytes_and_times_of_a_program():
    module = Module(PROGRAM)
    ran = {r.instruction.name: r for r in module.run()}
    assert ran["f"].times == 24 and ran["f"].depth == 1 and ran["y"].times == 1
    assert ran["f"].instruction.cycles == 70 and ran["y"].instruction.cycles is None
    assert "ds" not in ran and "bound" not in ran
    traffic = {name: module.traffic(r.computation, r.instruction) for name, r in ran.items()}
    slice_, scalar = 2 * 256 * 128, 4
    # A slice of the stack is read and written, with the index beside it.
    assert traffic["f"] == Bytes(hbm=2 * slice_ + scalar)
    assert traffic["add"] == Bytes(hbm=2 * slice_, vmem=slice_)
    # Only the updated slice of the stack is written, and none of it read.
    assert traffic["u"] == Bytes(hbm=slice_ + scalar, vmem=slice_)
    # Padded to 104 x 128 as it is given, and to 64 x 128 as it is copied.
    assert traffic["y"] == Bytes(hbm=4 * 3 * (104 * 128 + 64 * 128))
    assert traffic["cs"] == Bytes(hbm=4 * 3 * 64 * 128, vmem=4 * 3 * 64 * 128)
    assert traffic["cd"] == traffic["loop"] == traffic["out"] == Bytes()
    assert ran["cs"].instruction.is_prefetch and not ran["y"].instruction.is_prefetch
    moves = {name for name, r in ran.items() if module.moves_only(r.instruction)}
    assert moves == {"f", "u", "y"}
    assert ran["add"].instruction.op_name == "jit(f)/x/add"
    assert module.launches() == 2 + 3 * 24  # a copy, the start of one, and what the loop has


def test_a_view_in_another_tiling_moves_nothing():
    """As fusions have them on tpu7x, of the stack that they take a slice of or change one in."""
    kind, aliased = (
        "bf16[24,256,128]{2,1,0:T(8,128)(2,1)}",
        "output_to_operand_aliasing={{}: (0, {})}",
    )
    copied = f"%copied (v: bf16[24,256,128]) -> bf16[24,256,128] {{\n  %v = {kind} parameter(0)\n"
    text = f"{copied}  ROOT %w.1 = {kind} copy(%v)\n}}\n\n{PROGRAM}"
    for stack, user in (("p0", " dynamic-slice"), ("q0", " dynamic-update-slice")):
        view = f"  %view = {kind} fusion(%{stack}), kind=kLoop, {aliased}, calls=%copied\n"
        defined = f"  %{stack} = {kind} parameter(0)\n"
        assert text.count(defined) == text.count(f"{user}(%{stack},") == 1
        text = text.replace(defined, defined + view).replace(f"{user}(%{stack},", f"{user}(%view,")
    moved = [
        {r.instruction.name: module.traffic(r.computation, r.instruction) for r in module.run()}
        for module in map(Module, (PROGRAM, text))
    ]
    assert moved[0] == moved[1]


SCATTER = """
%fused_scatter (s0: bf16[24,512,128], s1: s32[32], s2: bf16[32,128]) -> bf16[24,512,128] {
  %s0 = bf16[24,512,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %s1 = s32[32,2]{1,0:T(8,128)} parameter(1)
  %s2 = bf16[32,128]{1,0:T(8,128)(2,1)} parameter(2)
  ROOT %sc = bf16[24,512,128]{2,1,0:T(8,128)(2,1)} scatter(%s0, %s1, %s2), to_apply=%put
}

ENTRY %main (a: bf16[24,512,128], i: s32[32,2], x: bf16[32,128]) -> bf16[24,512,128] {
  %a = bf16[24,512,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %i = s32[32,2]{1,0:T(8,128)} parameter(1)
  %x = bf16[32,128]{1,0:T(8,128)(2,1)S(1)} parameter(2)
  %f = bf16[24,512,128]{2,1,0:T(8,128)(2,1)} fusion(%a, %i, %x), kind=kCustom, calls=%fused_scatter
  ROOT %o = bf16[24,512,128]{2,1,0:T(8,128)(2,1)} scatter(%f, %i, %x), to_apply=%put
}
"""


def test_a_scatter_writes_what_it_is_given():
    module = Module(SCATTER)
    ran = {r.instruction.name: r for r in module.run()}
    traffic = {name: module.traffic(r.computation, r.instruction) for name, r in ran.items()}
    rows, indices = 2 * 32 * 128, 4 * 32 * 128
    assert traffic["f"] == Bytes(hbm=rows + indices, vmem=rows)
    assert traffic["o"] == Bytes(vmem=2 * rows)


def test_loop_of_unknown_length():
    module = Module(PROGRAM.replace("constant(24)", "parameter(1)"))
    ran = {r.instruction.name: r for r in module.run()}
    assert ran["loop"].unknown_trips and ran["f"].times == 1
    known = PROGRAM.replace("constant(24)", "parameter(1)").replace(
        "body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"6"}}'
    )
    assert {r.times for r in Module(known).run() if r.depth} == {6}


@pytest.mark.parametrize("step,times", [(1, 24), (2, 12), (5, 5)])
def test_a_loop_of_several_iterations_in_one(step, times):
    """XLA unrolls loops whose products hide collectives."""
    next_iteration = f"""  %step = s32[]{{:T(128)}} constant({step})
  %next = s32[]{{:T(128)}} add(%i, %step)
  ROOT %r"""
    text = PROGRAM.replace("  ROOT %r", next_iteration).replace("tuple(%i, %u)", "tuple(%next, %u)")
    assert {r.times for r in Module(text).run() if r.depth} == {times}


def test_text_without_a_program():
    with pytest.raises(ValueError, match="has no ENTRY computation"):
        Module("HloModule empty")


# Ops ------------------------------------------------------------------------------------------


def test_traffic_of_the_papers_schedules():
    least = {case.name: case.forward.bytes for case in cases("depth_attention").values()}
    per_sublayer = elements_per_sublayer(least)
    # Reads N / S and writes 1; then reads 2 and writes 1: the paper's 5.5 less an addition.
    assert per_sublayer["Block, two-phase"] == pytest.approx(8 / 16 + 1 + 3, rel=0.01)
    # (S + N - 2) / 2 + 2 where each sublayer's output is one array and not two, and the prior.
    assert per_sublayer["Full, two-phase"] == pytest.approx(56 / 16 + 1 + 8 + 2, rel=0.01)


def test_traffic_table_has_only_what_was_compiled():
    work = {name: case.forward for name, case in cases("depth_attention").items()}
    cost = lambda factor, w: program_cost_of(int(factor * w.bytes))
    rows = [
        report.OpRow("depth_attention", name, "forward", "v5e", 1e12, "mosaic_tpu", w, 1.0, 1.0,
                     cost=cost(1, w), portable_cost=cost(3, w))
        for name, w in work.items()
    ]  # fmt: skip
    assert "| v5e | Block, two-phase | 4.50 | 4.50 | 13.51 | 5.5 |" in report.traffic_table(rows)
    assert report.traffic_table(rows[:-1]) == ""


def program_cost_of(moved):
    return ProgramCost(moved, dict.fromkeys(MODELS, 1.0), ())


@pytest.mark.parametrize("op", OPS)
def test_least_work_of_the_ops(op):
    for case in cases(op).values():
        forward, arguments, _ = case.program("forward", "xla")
        size = lambda tree: sum(
            math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree)
        )
        once = size(arguments) + size(jax.eval_shape(forward, *arguments))
        if "merge" in case.name:  # what is passed on is neither read again nor written
            once -= size(arguments[0])
        # Every operand and result once; beside them only sums of each token.
        assert case.forward.bytes == pytest.approx(once, rel=0.02)
        training, arguments, _ = case.program("training", "xla")
        assert case.forward.bytes < case.backward.bytes
        both = case.work("training")
        assert both.flops == case.forward.flops + case.backward.flops
        # What comes and goes in training: less than both passes, which hand over arrays.
        assert size(arguments) + size(jax.eval_shape(training, *arguments)) < both.bytes * 1.5


class Clock:
    """Seconds that pass only while a program runs, as many as it says."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def advance(self, seconds):
        self.now += float(seconds)
        return np.float32(1)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(measure, "time", clock)
    return clock


def small_case(clock):
    def function(implementation, x, segments):
        seconds = {"xla": 1.0, "slow": 60.0}[implementation]
        one = io_callback(clock.advance, jax.ShapeDtypeStruct((), jnp.float32), seconds)
        x = jnp.sin(x) * one
        return x * segments, x[:1]

    arguments = (array(16, 128, dtype=jnp.float32), array(1, 128, dtype=jnp.int32))
    return OpCase("small", function, arguments, MinimumWork(1, 2), MinimumWork(3, 4), carried=True)


def test_training_program_gives_results_and_gradients(clock):
    function, shapes, donated = small_case(clock).program("training", "xla")
    x, segments, d_out, d_first = (np.random.default_rng(0).normal(size=s.shape) for s in shapes)
    segments = np.ones(segments.shape, np.int32) * 3
    assert donated == (0, 2)
    results, gradients = jax.jit(function)(x, segments, d_out, d_first)
    np.testing.assert_allclose(results[0], 3 * np.sin(x), rtol=1e-5, atol=1e-6)
    expected = 3 * d_out * np.cos(x)
    expected[:1] += d_first * np.cos(x[:1])
    np.testing.assert_allclose(gradients[0], expected, rtol=1e-4, atol=1e-5)


def test_measured_times_are_those_of_each_program(clock):
    times = measure.measure(small_case(clock), "forward", ("xla", "slow"), jax.devices()[0])
    rounds = measure.ROUNDS
    assert {name: t.seconds for name, t in times.items()} == {
        "xla": (1.0,) * rounds,
        "slow": (60.0,) * rounds,
    }


def test_measured_rows(clock, monkeypatch):
    # A kernel that is slower than the portable form, and one that there is not.
    for name, kernel in (("slow_op", "slow"), ("no_op", "nothing")):
        monkeypatch.setitem(OPS, name, Op(lambda: [small_case(clock)], {"cpu": kernel}))
    slow, slow_training, missing, _ = report.time_ops(["slow_op", "no_op"], jax.devices()[0])
    assert slow.direction == "forward" and slow_training.direction == "training"
    assert (
        slow.speedup == slow_training.speedup == 1 / 60
        and slow.device == "cpu"
        and slow.failures == {}
    )
    assert missing.speedup is None and missing.failures == {"nothing": "KeyError: 'nothing'"}
    assert missing.seconds is None and missing.portable_seconds == 1
    table = report.op_table([slow, missing])
    assert f"| {slow.seconds * 1e6:.1f} | {slow.portable_seconds * 1e6:.1f} |" in table
    assert "cpu, no_op small, forward, nothing: KeyError" in report.failure_lines([slow, missing])


@pytest.mark.parametrize("where", ["compile", "run"])
def test_a_failure_of_plain_jax_is_its_own(clock, monkeypatch, where):
    """The kernel keeps its time, whether plain JAX fails in the compiler or while it runs."""

    case = small_case(clock)

    def function(implementation, x, segments):
        if implementation == "xla" and where == "compile":
            raise MemoryError("no room")
        return case.function(implementation, x, segments)

    def seconds_of(program, arguments):
        started = clock.now
        jax.block_until_ready(program(*arguments()))
        if clock.now - started < 60:
            raise MemoryError("no room")
        return 60.0

    monkeypatch.setattr(measure, "seconds_of", seconds_of)
    other = dataclasses.replace(case, function=function)
    monkeypatch.setitem(OPS, "large_op", Op(lambda: [other], {"cpu": "slow"}))
    for row in report.time_ops(["large_op"], jax.devices()[0]):
        assert (row.seconds, row.portable_seconds) == (60.0, None)
        assert row.failures == {"xla": "MemoryError: no room"}


def test_an_op_without_a_kernel_for_the_device_has_only_the_time_of_plain_jax(clock, monkeypatch):
    monkeypatch.setitem(OPS, "tpu_op", Op(lambda: [small_case(clock)], {"tpu": "slow"}))
    row, _ = report.time_ops(["tpu_op"], jax.devices()[0])
    assert (row.kernel, row.seconds, row.speedup) == (None, None, None)
    assert row.portable_seconds == 1.0 and not row.failures
    assert "| tpu_op | small | forward | cpu | - | 1000000.0 | - |" in report.op_table([row])
