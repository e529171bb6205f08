"""A run's kernels are checked once on a device; an op that differs is plain from then on."""

import contextlib
import json

import jax
import pytest

from pallas_kernels.platform import Implementations, collecting_calls
from pallas_kernels.shapes import Heads
from pallas_kernels.target import lowering_for
from rmt_tpu.analysis import device_cases_layers as layers
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
      checked: the ops that were checked, in order.
      traced: how often a step was.
    """

    def __init__(self, calls):
        self.faults, self.checked, self.traced, self._calls = set(), [], 0, calls

    def check(self, case, implementation, *, timed):
        assert implementation is None and not timed
        self.checked.append(case.op)
        wrong = case.op in self.faults
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
    monkeypatch.setattr(kernel_checks, "_platform", lambda: "tpu")
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
    key = kernel_checks._key
    newer = lambda *given: key(*given) | {"compiler": "newer"}
    monkeypatch.setattr(kernel_checks, "_key", newer)
    start(tmp_path / "three")
    assert sorted(device.checked) == sorted(CASES)
    for file in (tmp_path / "cache" / "kernels").iterdir():
        file.write_text("{")
    device.checked.clear()
    start(tmp_path / "four")
    assert sorted(device.checked) == sorted(CASES)


def test_off_checks_nothing(device, tmp_path):
    device.faults = set(CASES)
    assert start(tmp_path / "run", how="off") == (CASES.keys(), []) and not device.traced


def test_a_cpu_costs_nothing(device, tmp_path, monkeypatch):
    monkeypatch.undo()
    assert jax.default_backend() == "cpu" and kernel_checks._platform() is None
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
    texts = [json.dumps(x) for x in ({}, {"logits": "a"}, {"logits": "b", "token_rows": "c"})]
    assert kernel_checks.merge_failures(texts) == {"logits": "a", "token_rows": "c"}
    assert kernel_checks.merge_failures(["{}", "{}"]) == {}
