"""What instructions cost by each model, on programs that can be counted by hand."""

import re

import pytest

from rmt_tpu.estimator import BEST_GUESS, MODELS, TARGETS, Program, work_of
from rmt_tpu.estimator.cost import Work, program_cost
from rmt_tpu.estimator.flops import matmul_flops
from rmt_tpu.estimator.hlo import Bytes, Module
from rmt_tpu.estimator.schedule import Loop, Schedule

TARGET = TARGETS["v5e"]
PROGRAM = """
HloModule m

%fused (p: bf16[256,512], q: bf16[128,512]) -> bf16[256,128] {
  %p = bf16[256,512]{1,0:T(8,128)(2,1)} parameter(0)
  %q = bf16[128,512]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %conv = bf16[256,128]{1,0:T(8,128)(2,1)} convolution(%p, %q), dim_labels=bf_oi->bf
}

ENTRY %main (a: bf16[256,512], b: bf16[128,512]) -> bf16[256,128] {
  %a = bf16[256,512]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[128,512]{1,0:T(8,128)(2,1)} parameter(1)
  %stack = bf16[24,256,128]{2,1,0:T(8,128)(2,1)} custom-call(), custom_call_target="AllocateBuffer"
  %cs = (bf16[128,512]{1,0:T(8,128)(2,1)S(1)}, bf16[128,512]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%b)
  %cd = bf16[128,512]{1,0:T(8,128)(2,1)S(1)} copy-done(%cs)
  %f = bf16[256,128]{1,0:T(8,128)(2,1)} fusion(%a, %cd), kind=kOutput, calls=%fused, backend_config={"estimated_cycles":"900"}
  %e = bf16[256,128]{1,0:T(8,128)(2,1)} exponential(%f), backend_config={"estimated_cycles":"700"}
  %k = bf16[256,128]{1,0:T(8,128)(2,1)S(1)} custom-call(%e), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":"QQ==","cost_estimate":{"flops":"3000000"}}}
  ROOT %k2 = bf16[256,128]{1,0:T(8,128)(2,1)} custom-call(%k), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":"QUE="}}
}
"""  # noqa: E501 (the lines are the compiler's)
ARRAY = 2 * 256 * 128  # bytes of the result


def schedule(cycles, *, trips=1, copies_in_vmem=False):
    return Schedule(Loop(trips, cycles, cycles, 0, {}), {}, copies_in_vmem)


def works(**schedules):
    program = Program(TARGET, Module(PROGRAM), schedules, {}, 0.0, [])
    return {ran.instruction.name: work_of(program, ran) for ran in program.module.run()}


@pytest.mark.parametrize(
    "old, new",
    [
        ("dim_labels=bf_oi->bf", "dim_labels=bf_io->bf"),
        ("%a2, %cd", "%cd, %a2"),
        ('"900"', '"901"'),
        ("convolution(%p2, %q2)", "convolution(%q2, %p2)"),
    ],
)
def test_what_computes_the_same_is_alike_whatever_its_names(old, new):
    computation = PROGRAM[PROGRAM.index("%fused") : PROGRAM.index("ENTRY")]
    fusion = next(line for line in PROGRAM.splitlines() if "%f = " in line)
    renamed = lambda text: re.sub(r"%(fused|p|q|conv|f|a)\b", r"%\g<1>2", text)
    other, again = (renamed(text).replace("(p:", "(p2:") for text in (computation, fusion))
    argument = "  %a2 = bf16[256,512]{1,0:T(8,128)(2,1)} parameter(2)\n"
    named = ', metadata={op_name="again"}, backend_config'
    again = again.replace(", backend_config", named)

    def keys(other, again):
        body = PROGRAM.replace("ENTRY", f"{other}ENTRY")
        module = Module(body.replace(fusion, f"{argument}{fusion}\n{again}"))
        scope = module.computations[module.entry]
        return [module.equality_key(module.entry, scope[name]) for name in ("f", "f2")]

    first, second = keys(other, again)
    assert first == second
    first, second = keys(other.replace(old, new), again.replace(old, new))
    assert first != second


def cycles_of(size):
    return pytest.approx(size / TARGET.bandwidth * TARGET.clock)


def test_what_is_known_of_instructions():
    found = works(k=schedule(50), e=schedule(300))
    kinds = {name: work.kind for name, work in found.items()}
    assert kinds | {"a": "", "b": ""} == {
        "a": "", "b": "", "stack": "other", "cs": "asynchronous", "cd": "asynchronous",
        "f": "matmul", "e": "other", "k": "kernel", "k2": "kernel",
    }  # fmt: skip
    # Memory that is only set apart costs nothing in any model.
    assert {model(found["stack"]) for model in MODELS.values()} == {0}
    flops = 2 * 256 * 128 * 512
    assert found["f"].matrix == pytest.approx(flops / TARGET.peak_flops * TARGET.clock)
    assert found["f"].hbm == cycles_of(2 * 256 * 512 + ARRAY)
    assert found["f"].parked == cycles_of(2 * 128 * 512)
    assert (found["e"].estimate, found["e"].schedule, found["f"].schedule) == (700, 300, None)
    assert found["k2"].schedule is None


def test_an_operand_in_vmem_costs_a_kernel_what_its_schedule_copies():
    in_place = works(k2=schedule(50))["k2"]
    assert (in_place.hbm, in_place.parked) == (cycles_of(ARRAY), cycles_of(ARRAY))
    copied = works(k2=schedule(50, copies_in_vmem=True))["k2"]
    assert (copied.hbm, copied.parked) == (cycles_of(2 * ARRAY), 0)


def test_a_kernel_that_is_fused_with_an_update_is_one():
    """It reads one of a stack, as it declares, and puts what it gives into another."""
    one, stack = "bf16[256,128]{1,0:T(8,128)(2,1)}", "bf16[24,256,128]{2,1,0:T(8,128)(2,1)}"
    fused = f"""
%put (into: {stack}, from: {stack}, at: s32[]) -> {stack} {{
  %into = {stack} parameter(0)
  %from = {stack} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  %inside = {one} custom-call(%from), custom_call_target="tpu_custom_call", backend_config={{"custom_call_config": {{"body": "QUI=", "cost_estimate": {{
"bytes_accessed":{2 * ARRAY},
"flops":3000000
}}, "serialization_format": 1}}}}
  %slice = bf16[1,256,128]{{2,1,0:T(8,128)(2,1)}} bitcast(%inside)
  ROOT %update = {stack} dynamic-update-slice(%into, %slice, %at, %zero, %zero)
}}

ENTRY"""  # noqa: E501 (the lines are the compiler's)
    called = f"""
  %o = {stack} custom-call(), custom_call_target="AllocateBuffer"
  %i = s32[] constant(3)
  %kf = {stack} fusion(%o, %stack, %i), kind=kCustom, calls=%put
  ROOT %k2"""
    module = Module(PROGRAM.replace("ENTRY", fused).replace("  ROOT %k2", called))
    program = Program(TARGET, module, {"kf": schedule(50)}, {}, 0.0, [])
    found = {ran.instruction.name: work_of(program, ran) for ran in module.run()}["kf"]
    assert (found.kind, found.schedule, found.hbm) == ("kernel", 50, cycles_of(2 * ARRAY))
    assert [kernel.name for kernel in program_cost(program).kernels] == ["k", "kf", "k2"]


def test_a_program_costs_as_if_all_lay_in_hbm():
    schedules = {"k": schedule(50), "e": schedule(3000)}
    program = Program(TARGET, Module(PROGRAM), schedules, {}, 0.0, [])
    cost = program_cost(program)
    product = 2 * 256 * 512 + 2 * 128 * 512 + ARRAY
    moved = product + 3 * 2 * ARRAY  # of the exponential and of two kernels
    assert cost.bytes == moved
    kernels = 2 * 2 * ARRAY / TARGET.bandwidth
    # The product has no schedule, and at the peak takes less than its bytes.
    least = kernels + 3000 / TARGET.clock + product / TARGET.bandwidth
    best = kernels + (3000 + 900) / TARGET.clock
    expected = {"least": least, BEST_GUESS: best, "most": best + kernels / 2}
    assert cost.by_model == pytest.approx(expected) and cost.seconds == cost.by_model[BEST_GUESS]
    assert [kernel.seconds for kernel in cost.kernels] == pytest.approx([kernels / 2] * 2)


@pytest.mark.parametrize("text, cycles", [("900", 900), (str(2**63 - 1), None)])
def test_an_estimate_of_all_ones_is_none(text, cycles):
    module = Module(PROGRAM.replace('"900"', f'"{text}"'))
    assert module.computations["main"]["f"].cycles == cycles


def test_a_fusion_of_unknown_trips_counts_by_the_compiler():
    found = works(e=schedule(300, trips=None), k=schedule(50, trips=None))
    assert found["e"].schedule is None and found["k"].schedule == 50
    # What a kernel declares is looked at where its schedule does not say, as grouped products.
    peak = TARGET.grouped * TARGET.peak_flops
    declared = pytest.approx(3_000_000 / peak * TARGET.clock)
    assert found["k"].matrix == declared and works(k=schedule(50))["k"].matrix == 0


def work(kind, **changes):
    values = {"estimate": 700.0, "schedule": 300.0, "matrix": 0.0, "hbm": 200.0, "parked": 150.0}
    return Work(kind, **values | changes)


@pytest.mark.parametrize(
    ("asked", "cycles"),
    [
        # least, best guess, most
        (work("other"), [300, 300, 300]),
        (work("other", hbm=400.0), [400, 400, 400]),
        (work("other", schedule=None), [700, 700, 700]),
        (work("other", schedule=None, estimate=None), [200, 200, 200]),
        (work("matmul", matrix=180.0), [200, 300, 700]),
        (work("matmul", matrix=180.0, estimate=None), [200, 300, 300]),
        (work("matmul", matrix=180.0, schedule=None), [200, 700, 700]),
        (work("matmul", matrix=350.0), [300, 300, 700]),
        (work("kernel", estimate=None), [300, 300, 450]),
        (work("kernel", estimate=None, schedule=None), [200, 200, 300]),
        (work("kernel", estimate=None, matrix=400.0), [400, 400, 600]),
        (work("asynchronous", estimate=None), [0, 0, 0]),
        (work("collective"), [0, 0, 0]),
    ],
)
def test_cycles_by_each_model(asked, cycles):
    assert [model(asked) for model in MODELS.values()] == cycles


@pytest.mark.parametrize(
    ("text", "flops"),
    [
        # A batch is a window that covers all of it: gradients of weights.
        ("f32[64,32,1]{2,1,0} convolution(%x, %w), window={size=16}, dim_labels=0fb_0io->bf0",
         2 * 64 * 32 * 16 * 8),
        # Heads as a window over padding: of 3 x 3 taps three meet the one element that there is.
        ("f32[4,5,3,7]{3,2,1,0} convolution(%y, %v), window={size=1x3 pad=0_0x2_2 "
         "rhs_reversal=0x1}, dim_labels=0bf1_1oi0->0b1f", 2 * 4 * 5 * 3 * 7 * 6),
        ("f32[16,5]{1,0} dot(%l, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
         2 * 16 * 5 * 9),
        ("f32[64,32,1]{2,1,0} add(%x, %w)", 0),
    ],
)  # fmt: skip
def test_flops_of_matrix_products(text, flops):
    module = Module(
        "ENTRY %main (x: f32[16,8,64]) -> f32[] {\n"
        "  %x = f32[16,8,64]{2,1,0} parameter(0)\n"
        "  %w = f32[16,8,32]{2,1,0} parameter(1)\n"
        "  %y = f32[4,5,6,1]{3,2,1,0} parameter(2)\n"
        "  %v = f32[3,7,6,1]{3,2,1,0} parameter(3)\n"
        "  %l = f32[16,9]{1,0} parameter(4)\n"
        "  %r = f32[9,5]{1,0} parameter(5)\n"
        f"  ROOT %out = {text}\n"
        "}\n"
    )
    assert matmul_flops(module, "main", module.computations["main"]["out"]) == flops


def test_bytes_of_memory_that_is_set_apart():
    module = Module(PROGRAM)
    assert module.traffic("main", module.computations["main"]["stack"]) == Bytes()
