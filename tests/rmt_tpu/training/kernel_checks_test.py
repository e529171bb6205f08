"""A run's kernels are checked once on a device; an op that differs is plain from then on."""

import contextlib
import dataclasses
import json

import jax
import pytest

from pallas_kernels.platform import Implementations, collecting_calls
from pallas_kernels.shapes import Depth, Heads, KeyVector
from pallas_kernels.target import lowering_for
from rmt_tpu.analysis import device_cases_depth as depth
from rmt_tpu.analysis import device_cases_layers as layers
from rmt_tpu.analysis import device_cases_residual as residual
from rmt_tpu.analysis import device_check
from rmt_tpu.analysis.device_check import CheckRow
from rmt_tpu.config.presets import run as preset_run
from rmt_tpu.storage import Fault, open_folder
from rmt_tpu.training import kernel_checks
from rmt_tpu.training.run import PreparedRun

CASES = {
    "causal_attention": layers.attention(Heads(2, 64), (1, 128)),
    "grouped_matmul": layers.grouped(128, 128, 128, 2),
    "delta_attention": layers.delta((1, 128), Heads(1, 128)),
}
CONFIG, RUN = preset_run("rmt-tiny"), PreparedRun._make([None] * len(PreparedRun._fields))


class Device:
    """A TPU that is not there.

    Attributes:
      faults: the ops whose kernels differ.
      full: the ops whose checks find no memory.
      checked: the ops that were checked, in order.
      traced: how often a step was.
    """

    def __init__(self, calls):
        self.faults, self.checked, self.traced, self._calls = set(), [], 0, calls
        self.full = set()

    def check(self, case, implementation, *, timed):
        assert implementation is None and not timed
        self.checked.append(case.op)
        wrong = case.op in self.faults
        if case.op in self.full:
            words = "RuntimeError: RESOURCE_EXHAUSTED: out of memory"
            return CheckRow(case.op, case.size, "auto", error=words, inconclusive=True)
        return CheckRow(case.op, case.size, "mosaic_tpu", {"d_x": 0.5 * wrong}, {"d_x": 0.1})

    def calls_of(self, config, run):
        """Those of ops that are not taken plain."""
        self.traced += 1
        return [call for call in self._calls if call.name in taken_of()]


@pytest.fixture(scope="module")
def calls():
    with lowering_for("TPU v5 lite"), collecting_calls() as found:
        for case in CASES.values():
            inputs = jax.eval_shape(case.inputs)
            jax.eval_shape(lambda inputs, f=case.function: f("pallas", **inputs), inputs)
    return found


@pytest.fixture
def device(monkeypatch, tmp_path, calls):
    made = Device(calls)
    monkeypatch.setattr(kernel_checks, "accelerator_platform", lambda: "tpu")
    monkeypatch.setattr(kernel_checks, "calls_of", made.calls_of)
    monkeypatch.setattr(device_check, "check", made.check)
    monkeypatch.setenv(kernel_checks.VARIABLE, str(tmp_path / "cache"))
    return made


def taken_of():
    """The ops that take a kernel here where no implementation is asked for."""
    served = type("Kernels", (), {"unsupported": staticmethod(lambda *args: None)})
    served.op = staticmethod(lambda x, interpret=False: x + 1)
    plain = type("Plain", (), {"op": staticmethod(lambda x: x)})
    ops = {
        name: Implementations(plain, {"mosaic_tpu": served}, ("tpu",), name=name) for name in CASES
    }
    with lowering_for("TPU v5 lite"), collecting_calls() as found:
        for op in ops.values():
            jax.eval_shape(
                lambda x, op=op: op.run(None, "op", x), jax.ShapeDtypeStruct((2,), "float32")
            )
    return {call.name for call in found}


def start(folder, *, restart=False, how="auto"):
    """The ops that take kernels in this start of the run, and what is said."""
    said = []
    given = CONFIG, RUN, open_folder(folder), said.append
    with kernel_checks.check_kernels(*given, restart=restart, how=how):
        return taken_of(), said


@pytest.mark.parametrize("op", CASES)
def test_an_op_that_differs_is_plain_alone_and_stays_so(device, tmp_path, monkeypatch, op):
    device.faults = {op}
    others = CASES.keys() - {op}
    taken, (line,) = start(tmp_path / "run")
    assert taken == others
    assert op in line and "differs: d_x" in line and CASES[op].size in line
    assert sorted(device.checked) == sorted(CASES)
    # The same run again; and on another machine, whose kernels of that op are right.
    assert start(tmp_path / "run") == (others, [])
    device.faults = set()
    monkeypatch.setenv(kernel_checks.VARIABLE, str(tmp_path / "other cache"))
    assert start(tmp_path / "run") == (others, [])
    assert start(tmp_path / "run", how="off") == (others, [])
    assert start(tmp_path / "run", restart=True) == (CASES.keys(), [])
    assert start(tmp_path / "run") == (CASES.keys(), [])


def test_a_device_is_checked_once(device, tmp_path, monkeypatch):
    device.faults = {"delta_attention"}
    first, (line,) = start(tmp_path / "one")
    device.checked.clear()
    # Another run has the decision by the record, and says it too.
    assert start(tmp_path / "two") == (first, [line]) and not device.checked
    key = kernel_checks.record_key
    newer = lambda *given: key(*given) | {"compiler": "newer"}
    monkeypatch.setattr(kernel_checks, "record_key", newer)
    start(tmp_path / "three")
    assert sorted(device.checked) == sorted(CASES)
    for file in (tmp_path / "cache" / "kernels").iterdir():
        file.write_text("{")
    device.checked.clear()
    start(tmp_path / "four")
    assert sorted(device.checked) == sorted(CASES)


def test_a_lack_of_memory_is_told_and_not_recorded(device, tmp_path):
    device.full, device.faults = {"grouped_matmul"}, {"delta_attention"}
    taken, (note, line) = start(tmp_path / "run")
    assert taken == CASES.keys() - {"delta_attention"} and line.startswith("delta_attention")
    assert note.startswith("note: grouped_matmul is checked at the next start")
    assert "RESOURCE_EXHAUSTED: out of memory" in note
    assert [*json.loads((tmp_path / "run" / "kernels.json").read_text())["plain"]] == [
        "delta_attention"
    ]
    device.full = set()
    device.checked.clear()
    assert start(tmp_path / "run") == (taken, []) and device.checked == ["grouped_matmul"]


def test_off_checks_nothing(device, tmp_path):
    device.faults = set(CASES)
    assert start(tmp_path / "run", how="off") == (CASES.keys(), []) and not device.traced


def test_a_cpu_costs_nothing(device, tmp_path, monkeypatch):
    monkeypatch.undo()
    assert jax.default_backend() == "cpu" and kernel_checks.accelerator_platform() is None
    folder = open_folder(tmp_path)
    monkeypatch.setattr(type(folder), "read", lambda *given: pytest.fail("it was read"))
    with kernel_checks.check_kernels(CONFIG, RUN, folder, pytest.fail, restart=False) as plain:
        assert plain == {}


@pytest.mark.parametrize("text", ["{", "[]", '{"plain": 3}', '{"plain": {"logits": 1}}'])
def test_a_damaged_file_is_told_and_kernels_are_checked_again(device, tmp_path, text):
    (tmp_path / "kernels.json").write_text(text)
    device.faults = {"grouped_matmul"}
    _, (note, line) = start(tmp_path)
    assert note.startswith("note: ") and "kernels.json" in note and "grouped_matmul" in line
    assert [*json.loads((tmp_path / "kernels.json").read_text())["plain"]] == ["grouped_matmul"]


def test_a_folder_that_refuses_ends_no_run(device, tmp_path, monkeypatch):
    device.faults = {"grouped_matmul"}

    def refuse(self, name, data):
        raise Fault(f"{name}: No space left on device")

    monkeypatch.setattr(type(open_folder(tmp_path)), "write", refuse)
    taken, (_, note) = start(tmp_path)
    assert "grouped_matmul" not in taken and "cannot be saved" in note
    with contextlib.suppress(FileNotFoundError):
        monkeypatch.setenv(kernel_checks.VARIABLE, "/dev/null")
        assert start(tmp_path)[0] == taken


def test_what_one_process_finds_is_decided_for_all():
    failures = {}, {"logits": "a"}, {"logits": "b", "token_rows": "c"}
    assert kernel_checks.merge_failures(failures) == {"logits": "a", "token_rows": "c"}
    assert kernel_checks.merge_failures([{}, {}]) == {}


# On a GPU -------------------------------------------------------------------------------------

H100 = "NVIDIA H100 80GB HBM3"
# Whether each of these ops' kernels is the default on a GPU.
GPU_CASES = {
    "causal_attention": (layers.attention(Heads(2, 64), (1, 128)), True),
    "key_vector": (residual.site(KeyVector(16, 16, 2, 3), (1, 128)), False),
    "depth_attention": (depth.depth_attention(Depth(1, 3, 128), (1, 128)), False),
}


class Gpu:
    """A stand-in for a GPU.

    Attributes:
      faults: the ops whose kernels differ.
      seconds: of a call of each op, in its kernel and in plain JAX.
      timed: the ops that were timed, in order.
    """

    def __init__(self):
        self.faults, self.timed = set(), []
        self.seconds = {
            "store_norm_retrieve": (1e-3, 2e-3),
            "depth_attention_partial": (3e-3, 2e-3),
        }

    def check(self, case, implementation, *, timed):
        assert not timed
        wrong = case.op in self.faults
        return CheckRow(case.op, case.size, "triton", {"d_x": 0.5 * wrong}, {"d_x": 0.1})

    def time_case(self, case, implementation):
        self.timed.append(case.op)
        return self.seconds[case.op][("pallas", "xla").index(implementation)]

    def calls_of(self, config, run):
        with lowering_for(H100), collecting_calls() as found:
            for case, _ in GPU_CASES.values():
                inputs = jax.eval_shape(case.inputs)
                jax.eval_shape(lambda inputs, f=case.function: f(None, **inputs), inputs)
        return found


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    made = Gpu()
    monkeypatch.setattr(kernel_checks, "accelerator_platform", lambda: "cuda")
    monkeypatch.setattr(kernel_checks, "calls_of", made.calls_of)
    monkeypatch.setattr(device_check, "check", made.check)
    monkeypatch.setattr(device_check, "time_case", made.time_case)
    monkeypatch.setenv(kernel_checks.VARIABLE, str(tmp_path / "cache"))
    return made


def start_on_gpu(gpu, folder, config=CONFIG):
    """The ops that take kernels on a GPU in this start of the run, and what is said."""
    said = []
    given = config, RUN, open_folder(folder), said.append
    with kernel_checks.check_kernels(*given, restart=False):
        calls = gpu.calls_of(None, None)
        return {call.name for call in calls if "cuda" in call.platforms}, said


def test_a_gpu_takes_the_faster_of_kernel_and_plain_jax(gpu, tmp_path):
    usual = {name for name, (_, by_default) in GPU_CASES.items() if by_default}
    taken, (one, two) = start_on_gpu(gpu, tmp_path / "run")
    assert taken == usual | {"key_vector"}
    assert "key_vector uses its kernels" in one and "1 ms in its kernels, 2 ms in plain" in one
    assert "depth_attention uses plain JAX" in two and "3 ms in its kernels, 2 ms" in two
    assert sorted(set(gpu.timed)) == sorted(gpu.seconds)
    # The run keeps its choices when it resumes on a machine where the times are reversed.
    gpu.seconds = {name: pair[::-1] for name, pair in gpu.seconds.items()}
    assert start_on_gpu(gpu, tmp_path / "run") == (taken, [])
    # An implementation that the config asks for takes precedence over the faster one.
    plain = dataclasses.replace(CONFIG, model=CONFIG.model.replace(kernels="xla"))
    assert "key_vector" not in start_on_gpu(gpu, tmp_path / "run", plain)[0]
    # Another run uses the recorded times, so that nothing is timed again.
    gpu.timed.clear()
    assert start_on_gpu(gpu, tmp_path / "other") == (taken, [one, two]) and not gpu.timed


def test_a_gpu_kernel_that_differs_is_not_taken_for_its_speed(gpu, tmp_path):
    gpu.faults = {"store_norm_retrieve"}
    taken, said = start_on_gpu(gpu, tmp_path / "run")
    assert "key_vector" not in taken and "failed its check" in said[0]
    assert "store_norm_retrieve" not in gpu.timed
    assert start_on_gpu(gpu, tmp_path / "run") == (taken, [])


def test_a_gpu_kernel_that_cannot_be_checked_is_not_taken_for_its_speed(gpu, tmp_path, monkeypatch):
    row = CheckRow("a", "1", "auto", error="no memory", inconclusive=True)
    monkeypatch.setattr(device_check, "check", lambda *given, timed: row)
    taken, said = start_on_gpu(gpu, tmp_path / "run")
    assert "key_vector" not in taken and not gpu.timed
    assert len(said) == len(GPU_CASES) and "no memory" in said[0]


def test_a_kernel_that_cannot_be_timed_ends_no_run(gpu, tmp_path, monkeypatch):
    def time_case(case, implementation):
        if case.op == "store_norm_retrieve":
            raise RuntimeError("RESOURCE_EXHAUSTED:\nout of memory")
        return gpu.time_case(case, implementation)

    monkeypatch.setattr(device_check, "time_case", time_case)
    taken, said = start_on_gpu(gpu, tmp_path / "run")
    (note,) = [line for line in said if "key_vector" in line]
    assert "key_vector" not in taken
    assert note.startswith("note: ") and "RESOURCE_EXHAUSTED: out of memory" in note
    assert (
        "key_vector" not in json.loads((tmp_path / "run" / "kernels.json").read_text())["seconds"]
    )


@pytest.mark.parametrize("kernels", ["xla", "pallas"])
def test_kernels_that_are_configured_are_not_timed(gpu, tmp_path, kernels, monkeypatch):
    monkeypatch.setattr(gpu, "check", lambda *given, timed: CheckRow("", "", ""))
    monkeypatch.setattr(device_check, "check", gpu.check)
    config = dataclasses.replace(CONFIG, model=CONFIG.model.replace(kernels=kernels))
    _, said = start_on_gpu(gpu, tmp_path / "run", config)
    assert not gpu.timed and not said and not (tmp_path / "run" / "kernels.json").exists()
