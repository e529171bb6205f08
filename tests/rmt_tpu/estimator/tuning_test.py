"""What a compiler says of candidates, in processes that may hang; the calls that they are of."""

import dataclasses
import itertools
import math
import re
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuned
from pallas_kernels.target import lowering_for, slug
from pallas_kernels.tuned import KERNELS
from rmt_tpu.estimator import (
    DEVICES,
    CompilerError,
    Failure,
    Job,
    Worker,
    measure,
    timing,
    tuning,
)
from rmt_tpu.estimator.cost import KernelCost, ProgramCost
from rmt_tpu.estimator.hlo import Bytes, Module
from rmt_tpu.estimator.programs import Program
from rmt_tpu.estimator.search import Rating, Refusal
from rmt_tpu.estimator.spaces import SPACES, Problem, TuningCall, lower_call
from rmt_tpu.estimator.tuning import Compiler, Usage, gpu_rating, parse_usage, target_of

KEYS = {
    "key_vector": dict(K=32, V=32, R=4, P=8),
    "depth_attention": dict(N=3, S=2, D=256, dtype="bfloat16"),
    "attention": dict(
        heads=2, size=32, dtype="bfloat16", rows="size_major", alibi=True, segments=True
    ),
}
KINDS = {"tpu": "TPU v5 lite", "cuda": "NVIDIA H200"}


def problem(platform: str, kernel: str, tokens: int = 256) -> Problem:
    key = next(key for name, key in KEYS.items() if kernel.startswith(name))
    if "blocks" in kernel:
        key = key | {"kv_heads": 2, "value_size": 32}
        tokens = max(tokens, 2048)  # of shorter ones, another kernel is faster
    if kernel.startswith("key_vector"):
        own = ["dtype"] if platform == "cuda" else ["residual_dtype", "data_dtype"]
        key = key | dict.fromkeys(own, "bfloat16")
        key |= {"P": 0} if kernel.endswith("store") else {}
        key |= {"R": 0} if kernel.endswith("read") else {}
        key |= {"A": 4 * kernel.endswith("rebuild")} if platform == "tpu" else {}
    if kernel.endswith(("merge", "merge_backward")):
        key = key | {"S": 1}
    if "merge" in kernel:
        key |= {"N": 1} if platform == "cuda" else {"N": 0, "dtype": "float32"}
    if kernel.endswith(("scores", "gradients", "backward_sums")):
        key = key | ({"S": 16, "D": 1024} if "depth" in kernel else {"K": 512, "V": 64})
    return Problem(slug(KINDS[platform]), platform, kernel, tuned.items(key), tokens)


def test_every_kernel_can_be_tuned():
    assert SPACES.keys() == KERNELS.keys()
    for platform, kernel in KERNELS:
        given = problem(platform, kernel)
        assert set(dict(given.key)) == set(given.tuned_kernel.key)
        first, *others = given.candidates()
        assert first == given.default() and others and first not in others
        assert len(set(others)) == len(others)
        refused = [
            given.tuned_kernel.refused(dict(given.key), given.tokens, c) for c in (first, *others)
        ]
        assert not any(refused)
        assert set(SPACES[platform, kernel].grows) <= set(tuned.fields(first))


FEW = [
    ("tpu", "key_vector_backward"),
    ("tpu", "attention_backward"),
    ("cuda", "depth_attention_merge"),
]


@pytest.mark.parametrize(
    "platform, kernel",
    [pytest.param(*k, marks=() if k in FEW else pytest.mark.slow) for k in KERNELS],
)
def test_a_problems_call_takes_the_candidates_blocks(platform, kernel):
    """And gives what plain JAX gives: arrays of the same shapes and dtypes."""
    given = problem(platform, kernel)
    call = SPACES[platform, kernel].call(dict(given.key), given.tokens)
    blocks = given.candidates()[-1]
    own = tuned.Table("candidate", (given.entry(blocks, "heuristic"),), exact=True)
    with lowering_for(KINDS[platform]), tuned.tuned(own), tuned.collecting() as looks:
        got = jax.eval_shape(call.function(call.kernels), *call.arguments)
    assert [look.chosen for look in looks if look.kernel == given.tuned_kernel] == [blocks]
    want = jax.eval_shape(call.function(call.portable), *call.arguments)
    assert jax.tree.map(lambda x: x.shape, got) == jax.tree.map(lambda x: x.shape, want)


def test_what_any_blocks_have_to_move():
    """Each array once; of a stack of sites, the one that is merged."""
    row, token = 2 * 256 * 256, 4 * 256  # of 256 numbers, for each of 256 tokens
    few = 4 + 1  # which site, and whether the running sum is active
    forward = 3 * row + token + 2 * token + few  # site, sum, z; log sums; query and gain
    assert problem("tpu", "depth_attention_merge").bytes() == forward
    backward = forward + 3 * row + token + 2 * token
    assert problem("tpu", "depth_attention_merge_backward").bytes() == backward


def test_attention_to_values_of_another_size_has_a_call():
    """As MLA's; both passes, traced."""
    for op in ("forward", "backward"):
        given = problem("tpu", f"attention_blocks_{op}")
        key = dict(given.key) | {"size": 48, "rows": "head_major"}
        given = dataclasses.replace(given, key=tuned.items(key))
        call = SPACES["tpu", given.kernel].call(key, given.tokens)
        with lowering_for(KINDS["tpu"]), tuned.collecting() as looks:
            jax.eval_shape(call.function(call.kernels), *call.arguments)
        assert [(look.kernel, look.key) for look in looks] == [(given.tuned_kernel, given.key)]


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_attention_is_compared_with_the_form_that_programs_fall_back_to(op):
    """The fallback never holds all logits of a block of queries, of which there may be many."""
    given = problem("tpu", f"attention_blocks_{op}", tokens=16384)
    call = SPACES["tpu", given.kernel].call(dict(given.key), given.tokens)
    program = str(jax.make_jaxpr(call.function(call.portable))(*call.arguments))
    shapes = re.findall(r"f32\[([\d,]+)\]", program)
    sizes = [math.prod(map(int, shape.split(","))) for shape in shapes]
    assert max(sizes) <= math.prod(call.arguments[0].qkv.shape)


# Ratings -----------------------------------------------------------------------------------------

PTX = """
.version 8.7
.target sm_90a
.visible .entry key_vector_forward(
	.param .u64 .ptr .global .align 1 key_vector_forward_param_0
)
.reqntid 128, 1, 1
{
"""
LOG = """ptxas info    : Compiling entry function 'key_vector_forward' for 'sm_90a'
ptxas info    : Function properties for key_vector_forward
    0 bytes stack frame, 64 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 127 registers, used 1 barriers
"""


def test_a_gpus_rating():
    usage = parse_usage(PTX, LOG)
    assert usage == {"key_vector_forward": Usage(127, 64, 128)}
    assert usage["key_vector_forward"].warps_at_a_time == 16
    rate = lambda use: gpu_rating(use, 4 * 10**6, 2e12)
    assert rate(Usage(127, 0, 128))[:2] == (2e-6, 127 * 128 * 4)
    assert rate(usage["key_vector_forward"]).seconds == pytest.approx(3e-6)
    assert rate(Usage(255, 0, 256)).seconds == pytest.approx(2e-6)
    assert rate(Usage(255, 0, 32)).seconds == pytest.approx(2e-6)
    assert rate(Usage(168, 0, 256)).words == "168 registers, 0 bytes spilled, 8 concurrent warps"
    assert rate(None).seconds is None


def test_a_tpus_rating(monkeypatch):
    """The floor is what any blocks move, or what this candidate does, if that is less."""
    cost = KernelCost("k", 2, 100, 90, 50, Bytes(4 * 10**6), 2**20, (8,), {}, 5e-6)
    target = dataclasses.replace(DEVICES["v5e"], bandwidth=1e12)
    program = Program(target, Module("ENTRY %main () -> () {\n}"), {}, {}, 0.0, [])

    def rate(needed, **changed):
        kernels = (dataclasses.replace(cost, **changed), cost)
        found = ProgramCost(0, {}, kernels)
        monkeypatch.setattr(tuning, "program_cost", lambda program: found)
        return tuning.tpu_rating(program, needed)

    assert rate(12 * 10**6) == Rating(
        2e-5, 2**20, "400 cycles, 360 bundles, memory traffic 16.0 us", pytest.approx(12e-6)
    )
    assert rate(10**9).floor == pytest.approx(16e-6)
    assert rate(0, cycles=None) == Rating(None, words="the compiler wrote no schedule of a kernel")
    assert rate(0, trips=(None, 4)) == Rating(None, words="the length of a grid is unknown")
    assert rate(0, trips=(4, None)).seconds == 2e-5


class Outcomes:
    """A worker that is given what comes of jobs."""

    def __init__(self, target, given=()):
        self.given = list(given)

    def compile(self, job, limit):
        outcome = self.given.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def close(self):
        pass


@pytest.mark.parametrize(
    "outcome, fate",
    [
        (Failure("no result within 1 s", "TimeLimit"), "time limit"),
        (Failure("RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom", "XlaError"), "no room"),
        (Failure("Shared memory size limit exceeded", "XlaError"), "no room"),
        (Failure("out of memory is what no candidate says", "RuntimeError"), "failed"),
        (Failure("Not implemented", "NotImplementedError"), "failed"),
        (CompilerError("compiling for v5e exited with code -11"), "failed"),
    ],
)
def test_what_becomes_of_a_candidate_that_does_not_compile(monkeypatch, outcome, fate):
    workers = lambda target: Outcomes(target, [outcome])
    monkeypatch.setattr("rmt_tpu.estimator.tuning.Worker", workers)
    compiler = Compiler(DEVICES["v5e"], 1.0)
    given = problem("tpu", "attention_forward")
    assert compiler.rate(given, given.default()) == Refusal(
        fate, str(getattr(outcome, "message", outcome))
    )


def test_a_gpus_candidate_is_rated_by_its_own_kernel(monkeypatch):
    """The program of a large residual's backward pass has a second kernel, with a longer name."""
    uses = {
        "key_vector_backward_sums": Usage(255, 0, 256),
        "key_vector_backward": Usage(64, 0, 256),
    }
    program = types.SimpleNamespace(ptx="", memory={"argument": 10**6, "output": 10**6})
    monkeypatch.setattr(tuning, "Worker", lambda target: Outcomes(target, [program] * 2))
    monkeypatch.setattr(tuning, "ptxas_usage", lambda ptx: uses)
    compiler = Compiler(DEVICES["h100"], 1.0)
    for kernel, use in uses.items():
        given = problem("cuda", kernel)
        assert compiler.rate(given, given.default()).words.startswith(f"{use.registers} registers")


def test_the_target_of_a_device():
    assert target_of("TPU v6 lite", DEVICES) is DEVICES["v6e"]
    assert target_of("TPU v6e", DEVICES) is DEVICES["v6e"]
    assert target_of("cpu", DEVICES) is None


# Times -------------------------------------------------------------------------------------------


def test_results_are_held_to_plain_ones():
    plain = [np.array([1.0, -2.0]), np.array([np.nan, 1.0])]
    assert timing.errors_of([np.array([1.0, -1.0]), plain[1]], plain) == [0.5, 0.0]
    (_, error) = timing.errors_of([plain[0], np.array([1.0, 1.0])], plain)
    assert np.isnan(error)
    assert timing.wrong([0.1, 0.2], [0.1, 0.2]) == ""
    assert timing.wrong([0.1, 0.3], [0.1, 0.2]).startswith("result 1 differs by 0.3 of")
    assert timing.wrong([float("nan")], [1.0])
    same = lambda x: timing.errors_of([np.array(x)], [np.array(x)])[0]
    assert same([np.inf, 1.0]) == 0 == same([]) and np.isnan(same([np.nan, np.nan]))


def timed_problem(monkeypatch, programs, **in_turn) -> list:
    """Time "candidates" that are functions of an array x, in order; plain JAX is 2 x.

    `in_turn` has the outcomes of timing some of them, in place of 1 s.
    """
    call = TuningCall(lambda m: None, timing, timing, (jax.ShapeDtypeStruct((8, 8), "float32"),))

    def lowered(device, problem, call, blocks):
        run = (lambda x: 2 * x) if blocks is None else programs[blocks]
        return jax.jit(run).lower(*call.arguments)

    given = problem("tpu", "attention_forward")
    space = dataclasses.replace(SPACES["tpu", given.kernel], call=lambda key, tokens: call)
    monkeypatch.setattr(timing, "SPACES", {("tpu", given.kernel): space})
    monkeypatch.setattr(timing, "lower_call", lowered)
    good = timing.Timing((1.0,))
    timed = lambda programs, *given: {p: in_turn.get(f"of_{p}", good) for p in programs}
    monkeypatch.setattr(timing, "seconds_in_turn", timed)
    return timing.time_candidates(given, list(range(len(programs))), jax.devices()[0])


def test_candidates_are_held_to_the_default_and_the_default_to_a_bound(monkeypatch):
    def fails(x):
        raise RuntimeError("no room\nfor it")

    off = lambda error: lambda x: (2 + error) * x
    found = timed_problem(monkeypatch, [off(5e-6), off(2e-6), off(1e-3), fails, off(5e-6)])
    good = timing.Timing((1.0,))
    assert [found[n] for n in (None, 0, 1, 4)] == [good] * 4
    assert found[2].wrong.startswith("result 0 differs by 0.0005 of its largest value")
    assert found[3] == timing.Timing(failed="RuntimeError: no room for it")
    # Without the default, there is nothing to hold the others to.
    for default in (fails, off(0.5), lambda x: x * jnp.nan):
        found = timed_problem(monkeypatch, [default, off(0), off(1e-3)])
        assert found.keys() == {None, 0} and found[None] == good
        assert found[0].failed or "legal" in found[0].wrong


@pytest.mark.parametrize("fails", [0, 1])
def test_a_candidate_may_fail_while_it_is_timed(monkeypatch, fails):
    same, failed = (lambda x: 2 * x), timing.Timing(failed="no room for five calls")
    found = timed_problem(monkeypatch, [same, same], **{f"of_{fails}": failed})
    good = timing.Timing((1.0,))
    assert found == ({None: good, 0: failed} if fails == 0 else {None: good, 0: good, 1: failed})


@pytest.mark.parametrize("kernel", ["attention_backward", "depth_attention_partial_backward"])
def test_a_backward_pass_is_timed_with_results_of_its_forward_pass(kernel):
    """With any others, exponentials overflow."""
    call = SPACES["tpu", kernel].call(dict(problem("tpu", kernel).key), 16)
    kinds = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), list(tree))
    assert kinds(jax.eval_shape(call.complete, *call.arguments)) == kinds(call.arguments)
    run = jax.jit(lambda *drawn: call.function(call.portable)(*call.complete(*drawn)))
    for x in jax.tree.leaves(run(*measure.draw(call.arguments, call.counts))):
        assert np.isfinite(np.asarray(x, np.float32)).all()


def test_an_int16_residual_is_drawn_as_it_is_stored():
    X, count = measure.draw([jax.ShapeDtypeStruct((64, 64), t) for t in ("int16", "int32")])
    assert X.dtype == jnp.int16 and 490 < np.std(np.asarray(X, np.float32)) < 530
    assert not count.any()


def test_time_on_a_device_is_without_gaps():
    assert measure.covered([]) == 0
    assert measure.covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.5)]) == 4.0


def test_arguments_and_times_of_a_call():
    """Of plain JAX on a CPU, whose profile has no device: by the wall clock."""
    shapes = (
        jax.ShapeDtypeStruct((8,), jnp.float32),
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct((2,), jnp.bool_),
    )
    call = TuningCall(lambda m: lambda x, n, b: (x * n, b), timing, timing, shapes, (0,), {1: 3})
    arguments = measure.draw(call.arguments, call.counts)
    assert int(arguments[1]) == 3 and bool(arguments[2].all()) and float(arguments[0].std()) > 0
    program = jax.jit(call.function(timing), donate_argnums=0).lower(*shapes).compile()
    first = timing._results(program, call, arguments)
    assert np.array_equal(first[0], np.asarray(arguments[0]) * 3)  # which are still there
    fresh = lambda: measure.program_arguments(program, arguments, call.donated)
    assert measure.wall_seconds(program, fresh, 2) > 0
    timing_of = measure.seconds_of(program, fresh)
    assert 0 < timing_of < 1


@pytest.mark.parametrize(
    ("call", "starts", "expected"),
    [
        (0.5, (1e-3, 1e-3), 0.5),
        (2e-4, (1e-3, 1e-3), 2e-4),
        (1e-6, (3e-3, 1e-3), 1e-6 + 1e-3 / 15),
    ],
    ids=["long", "after some rounds", "no difference but noise"],
)
def test_a_short_call_is_not_timed_by_noise(monkeypatch, call, starts, expected):
    """Five calls may take longer to start than fifteen."""
    noise = itertools.cycle(starts)
    monkeypatch.setattr(measure, "wall_seconds", lambda *given: next(noise) + given[2] * call)
    program = jax.jit(lambda: 0).lower().compile()
    assert measure.seconds_of(program, tuple) == pytest.approx(expected)


# Processes ---------------------------------------------------------------------------------------


def hang(device):
    import subprocess
    import sys

    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    raise_in = time.monotonic() + 600
    while time.monotonic() < raise_in:
        time.sleep(1)
    return child


def leave(device):
    import os

    os._exit(3)


def nothing(device):
    raise ValueError("nothing to compile")


@pytest.mark.compile
def test_a_job_that_hangs_or_dies_ends_with_its_process_alone():
    job = lambda name: Job(f"{MODULE}:{name}")
    worker = Worker(DEVICES["v5e"])
    assert worker.compile(job("nothing")).message == "ValueError: nothing to compile"
    group = worker._process.pid
    assert worker.compile(job("hang"), 3.0) == Failure("no result within 3 s", "TimeLimit")
    assert alive(group) == []
    with pytest.raises(CompilerError, match="exited with code 3"):
        worker.compile(job("leave"))
    assert worker.compile(job("nothing")).error == "ValueError"
    worker.close()
    worker.close()


@pytest.mark.slow
def test_a_compile_ends_with_the_process_that_waits_for_it(tmp_path):
    import subprocess
    import sys

    told = tmp_path / "group"
    code = (
        "from tests.rmt_tpu.estimator.tuning_test import *\n"
        "worker = Worker(DEVICES['v5e'])\n"
        "worker._start()\n"
        f"open({str(told)!r}, 'w').write(str(worker._process.pid))\n"
        f"worker.compile(Job('{MODULE}:hang'))\n"
    )
    waiting = subprocess.Popen([sys.executable, "-c", code])
    until = time.monotonic() + 120
    # The worker and its child.
    while not (told.exists() and told.read_text() and len(alive(int(told.read_text()))) == 2):
        assert waiting.poll() is None and time.monotonic() < until
        time.sleep(0.2)
    waiting.kill()
    waiting.wait()
    while alive(int(told.read_text())):
        assert time.monotonic() < until
        time.sleep(0.2)


MODULE = "tests.rmt_tpu.estimator.tuning_test"


def alive(group: int) -> list[int]:
    """Processes of a group that are no zombies."""
    import pathlib

    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.compile
def test_candidates_of_a_small_kernel_by_the_real_compiler():
    given = problem("tpu", "attention_forward")
    compiler = Compiler(DEVICES["v5e"], 300.0)
    try:
        ratings = [compiler.rate(given, blocks) for blocks in given.candidates()]
    finally:
        compiler.close()
    assert len(ratings) == 2 and all(isinstance(r, Rating) for r in ratings)
    assert all(r.seconds >= r.floor > 0 and r.on_chip > 0 for r in ratings)
    assert ratings[0].seconds != ratings[1].seconds


def test_a_call_that_does_not_take_its_blocks_is_refused():
    """The machine's devices are none that the kernel is for."""
    given = problem("tpu", "attention_forward")
    call = SPACES["tpu", given.kernel].call(dict(given.key), given.tokens)
    call = dataclasses.replace(call, function=lambda module: lambda *arrays: arrays[0])
    with pytest.raises(RuntimeError, match="compiled with no look-up of block sizes, instead of"):
        lower_call(jax.devices()[0], given, call, given.default())


@pytest.mark.slow
@pytest.mark.parametrize("target", [t for t in DEVICES.values() if t.platform == "tpu"])
def test_what_is_shipped_compiles(target):
    compiler, device = Compiler(target, 600.0), slug(target.kind)
    try:
        for name in (name for kind, name in tuned.shipped() if kind == device):
            for entry in tuned.package_table(device, name).entries:
                given = Problem(device, "tpu", name, entry.key, entry.tokens)
                outcome = compiler.rate(given, given.tuned_kernel.build_blocks(dict(entry.blocks)))
                assert isinstance(outcome, Rating), (entry, outcome)
    finally:
        compiler.close()
