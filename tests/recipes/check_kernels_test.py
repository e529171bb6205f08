"""A train run checks its kernels: what one of two processes finds holds for both, and later."""

import json

import pytest

from tests import cli

# A device with one kernel, which differs in one of the processes; what it takes plain is told.
DEVICE = """
import os, sys
from rmt_tpu.analysis import device_calls, device_cases, device_check
from rmt_tpu.training import kernel_checks
os.environ["RMT_TPU_CACHE"] = {cache!r}
kernel_checks.accelerator_platform = lambda: "tpu"
def cases_of(calls, platform):
    return {{"key_vector": [next(device_cases.OPS["key_vector"]("small"))]}}
def check(case, implementation, timed):
    given = {{"d_gain": {off}}}, {{"d_gain": 0.1}}
    return device_check.CheckRow(case.op, case.size, "mosaic_tpu", *given)
device_calls.cases_of, device_check.check = cases_of, check
usual = kernel_checks.taking_plain
def taking_plain(ops):
    print("plain:", *ops, file=sys.stderr)
    return usual(ops)
kernel_checks.taking_plain = taking_plain
"""


@pytest.mark.slow
def test_two_processes_decide_the_same_and_a_resumed_run_keeps_it(tmp_path):
    run = tmp_path / "run"
    flags = "--preset=rmt-tiny", *cli.TINY, "--batch_size=16", "--mesh=data=2", f"--workdir={run}"

    def start(name, *off):
        caches = [tmp_path / f"{name} {number}" for number in range(2)]
        first = tuple(
            DEVICE.format(cache=str(cache), off=o) for cache, o in zip(caches, off, strict=True)
        )
        ended = cli.launch(2, *flags, "--steps=2", devices=2, first=first)
        assert [code for code, _, _ in ended] == [0, 0], ended
        return [out + error for _, out, error in ended]

    told = start("first", 0.0, 0.5)
    assert all("plain: key_vector\n" in text for text in told)
    line = (
        "key_vector uses plain JAX on cpu, because a kernel failed its check: store_norm_retrieve"
    )
    assert told[0].count(line) == 1 and "differs: d_gain" in told[0]
    (why,) = json.loads((run / "kernels.json").read_text())["plain"].values()
    assert "differs: d_gain" in why
    told = start("elsewhere", 0.0, 0.0)
    assert all("plain: key_vector\n" in text and "uses plain JAX" not in text for text in told)


def test_the_flag_is_refused_another_value():
    assert "--check_kernels" in cli.fail("train", "--preset=rmt-tiny", "--check_kernels=on")
