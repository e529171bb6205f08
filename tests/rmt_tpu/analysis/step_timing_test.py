"""Measurement of whole train steps: the same step as a run's, and its tables."""

import pytest

from rmt_tpu.analysis import step_timing
from rmt_tpu.analysis.step_cost import TrainStep
from rmt_tpu.analysis.step_timing import StepTime

SLOW = StepTime(
    "rmt-305m",
    8192,
    0.1,
    [0.1, 0.1, 0.2],
    7.0,
    2**30,
    0.08,
    [("a", 24, 0.06), ("b", 1, 0.02)],
    (9, 8),
)
FAST = SLOW._replace(preset="gpt2-405m", seconds=0.05, busy_seconds=0, instructions=[])


def test_tables():
    first, second = step_timing.table([SLOW, FAST]).splitlines()[2:]
    assert first == "| rmt-305m | 100.00 | 2.00 | 81,920 | 25 | 1,024 | 7 |"
    assert second == "| gpt2-405m | 50.00 | 1.00 | 163,840 | - | 1,024 | 7 |"
    largest = step_timing.largest_table(SLOW).splitlines()[2:]
    assert largest == ["| `a` | 24 | 2500 | 60.00 | 75% |", "| `b` | 1 | 20000 | 20.00 | 25% |"]


@pytest.mark.slow
def test_a_step_is_timed_while_it_trains():
    changes = {"model.compute_dtype": "float32", "train.batch_size": 2, "data.seq_len": 32}
    t = step_timing.time_step(TrainStep("gpt2-tiny", 4, 8, changes))
    assert t.tokens == 64 and t.preset.startswith("gpt2-tiny model.compute_dtype=float32 ")
    assert min(t.rounds) <= t.seconds <= max(t.rounds) and len(t.rounds) == 3
    assert t.losses[1] < t.losses[0] - 1 and t.temporary_bytes > 0
    assert t.instructions == [] and t.busy_seconds == 0  # a CPU's profile has no device
