"""Search for block sizes with a compiler, a device and a clock that only seem to be there."""

from typing import NamedTuple

import pytest

from rmt_tpu.estimator.search import (
    Rating,
    Refusal,
    Timing,
    Trial,
    search,
    spread,
    trials_to_time,
)


class Blocks(NamedTuple):
    tokens: int
    unroll: int


DEFAULT = Blocks(128, 2)
# As they come where none is better than the default.
NEAR = [Blocks(128, 4), Blocks(64, 2), Blocks(256, 2), Blocks(512, 2)]
ALL = [DEFAULT, *NEAR, Blocks(256, 4)]


class Machine:
    """Every candidate takes a second to compile; its clock starts at 0."""

    def __init__(self, seconds, **refused):
        self.seconds, self.refused, self.now, self.asked = seconds, refused, 0.0, []
        self.logged, self.floor = [], 0.0

    def compile(self, blocks):
        self.asked.append(blocks)
        self.now += 1
        outcome = self.seconds.get(blocks, 1.0)
        if isinstance(outcome, Refusal):
            return outcome
        return Rating(outcome, blocks.tokens, "", self.floor)

    def search(self, candidates=ALL, until=100.0, **options):
        return search(
            candidates,
            self.compile,
            fields=Blocks._asdict,
            grows=("tokens",),
            clock=lambda: self.now,
            until=until,
            log=lambda *trials: self.logged.extend(trials),
            **options,
        )


def test_the_best_estimate_is_taken_if_it_is_clearly_better():
    machine = Machine({Blocks(64, 2): 0.9})
    result = machine.search()
    assert result.best.blocks == Blocks(64, 2) and result.gain == pytest.approx(0.1)
    assert machine.asked == [t.blocks for t in machine.logged] == ALL[:5]
    assert (result.left, result.measured, result.default.blocks) == (1, False, DEFAULT)
    near = Machine({Blocks(64, 2): 0.96}).search()
    assert near.best == near.default and near.gain == 0


def test_what_is_most_like_the_best_is_tried_next():
    """And the search ends where nothing that differs in one field is better."""
    many = [Blocks(t, u) for t in (16, 32, 64, 128, 256) for u in (1, 2, 4, 8, 16)]
    machine = Machine({b: abs(b.tokens - 32) / 99 + 1 / b.unroll for b in many})
    machine.floor = -1.0
    result = machine.search([DEFAULT, *(b for b in many if b != DEFAULT)])
    assert result.best.blocks == Blocks(32, 16) and len(machine.asked) < 15
    assert result.left == len(many) - len(machine.asked)
    # One that its bytes bound ends it too.
    bound = Machine({Blocks(128, 4): 0.5})
    bound.floor = 0.49
    assert bound.search().best.blocks == Blocks(128, 4) and bound.asked == ALL[:2]


def test_of_equals_the_smallest_is_taken():
    result = Machine({Blocks(512, 2): 0.8, Blocks(128, 4): 0.801, Blocks(256, 4): 0.805}).search()
    assert result.best.blocks == Blocks(128, 4)


def test_a_smaller_one_that_gains_too_little_does_not_displace_the_fastest():
    """Within 1% of the fastest, but not 2% faster than the default."""
    times = {Blocks(256, 2): Timing((0.979,) * 3), Blocks(64, 2): Timing((0.988,) * 3)}
    result = Machine({}).search(time=timed(times))
    assert result.best.blocks == Blocks(256, 2)


def test_what_is_larger_than_what_has_no_room_is_not_compiled():
    """In the fields that take room, all others being alike."""
    machine = Machine({Blocks(256, 2): Refusal("no room", "VMEM")})
    result = machine.search(time=timed({}))
    assert Blocks(512, 2) not in machine.asked and Blocks(256, 4) in machine.asked
    fates = {t.blocks: t.fate for t in result.trials}
    assert (fates[Blocks(256, 2)], fates[Blocks(512, 2)]) == ("no room", "skipped")


@pytest.mark.parametrize("fate", ["time limit", "failed"])
def test_a_candidate_that_fails_is_recorded_and_the_next_one_tried(fate):
    result = Machine({Blocks(256, 2): Refusal(fate, "why"), Blocks(64, 2): 0.5}).search()
    (failed,) = [t for t in result.trials if t.fate == fate]
    assert failed.blocks == Blocks(256, 2) and failed.why == "why"
    assert result.best.blocks == Blocks(64, 2)


def test_a_default_that_fails_gives_way_to_any_that_does_not():
    machine = Machine({DEFAULT: Refusal("no room", "VMEM"), Blocks(64, 2): 3.0})
    result = machine.search()
    assert result.best.blocks == Blocks(128, 4) and result.gain is None
    none = Machine(dict.fromkeys(ALL, Refusal("failed", "why"))).search()
    assert none.best == none.default


def test_the_time_ends_the_search_and_the_next_goes_on_where_it_was():
    machine = Machine({Blocks(512, 2): 0.5})
    result = machine.search(until=2.5)
    assert machine.asked == ALL[:3] and result.best == result.default
    assert (result.left, result.late) == (3, True)
    again = Machine({Blocks(512, 2): 0.5})
    result = again.search(known={t.blocks: t for t in machine.logged})
    assert again.asked == ALL[3:5] and result.best.blocks == Blocks(512, 2) and not result.late
    assert [t.blocks for t in again.logged] == ALL[3:5]
    # What is known to have no room counts for those that are not known.
    known = {Blocks(256, 2): Trial(Blocks(256, 2), "no room")}
    third = Machine({Blocks(128, 4): 0.9})
    third.search(known=known)
    assert Blocks(256, 4) in third.asked and Blocks(512, 2) not in third.asked
    # The default is tried even where there is no time at all.
    assert Machine({}).search(until=-1.0).left == len(ALL) - 1


def timed(times):
    def time(chosen):
        return {b: times.get(b, Timing((1.0, 1.0, 1.0, 1.0))) for b in chosen}

    return time


def test_a_measured_gain_must_exceed_the_noise():
    estimates = {Blocks(64, 2): 0.8, Blocks(128, 4): 0.85}
    fast = {Blocks(64, 2): Timing((0.9, 0.9, 0.9, 0.9))}
    result = Machine(estimates).search(time=timed(fast))
    assert result.best.blocks == Blocks(64, 2) and result.gain == pytest.approx(0.1)
    assert result.measured and result.spread == 0
    noisy = fast | {DEFAULT: Timing((0.95, 0.99, 1.0, 1.01, 1.05))}
    result = Machine(estimates).search(time=timed(noisy))
    assert result.spread > 0.04 and result.best == result.default
    slight = {Blocks(64, 2): Timing((0.99, 0.99, 0.99))}
    assert Machine(estimates).search(time=timed(slight)).best.blocks == DEFAULT


def test_the_best_beats_plain_jax_or_not():
    assert not Machine({}).search(time=timed({})).beats_plain
    for seconds, beats in ((2.0, True), (1.01, False), (0.5, False)):
        plain = lambda chosen, s=seconds: timed({})(chosen) | {None: Timing((s,) * 3)}
        result = Machine({}).search(time=plain)
        assert result.plain == (seconds,) * 3 and result.beats_plain == beats
        assert len(result.trials) == len(ALL)


def test_what_is_wrong_is_not_taken_however_fast():
    times = {Blocks(64, 2): Timing(wrong="NaN"), Blocks(128, 4): Timing((0.7, 0.7))}
    machine = Machine({Blocks(64, 2): 0.5, Blocks(128, 4): 0.6})
    result = machine.search(time=timed(times))
    assert result.best.blocks == Blocks(128, 4)
    assert {t.blocks: t.fate for t in result.trials}[Blocks(64, 2)] == "wrong"
    assert machine.logged[-1].fate in ("wrong", "timed")


@pytest.mark.parametrize("timing", [Timing(wrong="NaN"), Timing(failed="RuntimeError: no")])
def test_a_default_that_fails_on_the_device_has_no_time(timing):
    result = Machine({}).search(time=lambda chosen: {DEFAULT: timing, None: Timing((1.0,))})
    assert result.best == result.default and result.default.time is None
    assert result.default.estimate == 1.0 and result.gain is None and not result.beats_plain
    assert result.default.fate == ("wrong" if timing.wrong else "failed")
    assert result.default.why == (timing.wrong or timing.failed)


def test_a_kernel_that_its_bytes_bound_is_left_as_it_is_without_a_device():
    machine = Machine({})
    machine.floor = 0.96
    result = machine.search()
    assert machine.asked == [DEFAULT] and result.best == result.default and result.left == 0
    fates = {t.blocks: t.fate for t in machine.logged}
    assert fates == {DEFAULT: "compiled"} | dict.fromkeys(ALL[1:], "no faster")
    # What is known of them serves another search without a device, and none with one.
    known = {t.blocks: t for t in machine.logged}
    machine.search(known=known)
    assert machine.asked == [DEFAULT]
    machine.search(known=known, time=timed({}))
    assert machine.asked == ALL
    # Nor is it known of what the rule gives by now.
    other = Machine({})
    assert other.search([ALL[1], DEFAULT], known=known).default.estimate == 1.0


def test_a_bound_near_the_best_ends_nothing_while_it_is_far_from_the_default():
    machine = Machine({ALL[1]: 0.97, ALL[-1]: 0.94})
    machine.floor = 0.93
    result = machine.search()
    assert result.best.blocks == ALL[-1] and machine.asked == [DEFAULT, ALL[1], ALL[-1]]


def test_what_is_worth_timing():
    default = Trial(DEFAULT, "compiled", estimate=1.0)
    others = [
        Trial(Blocks(n, 2), "compiled", estimate=e)
        for n, e in ((1, 0.5), (2, 0.6), (3, 0.64), (4, 0.7))
    ]
    assert [t.blocks.tokens for t in trials_to_time(default, [default, *others], 5)] == [
        128,
        1,
        2,
        3,
    ]
    assert [t.blocks.tokens for t in trials_to_time(default, [default, *others], 1)] == [128, 1]
    unrated = [Trial(Blocks(n, 2), "unrated") for n in (1, 2, 3)]
    assert len(trials_to_time(default, [default, *unrated], 2)) == 3


def test_spread():
    assert spread(()) == spread((1.0,)) == 0
    assert spread((1.0, 2.0, 3.0, 4.0)) == pytest.approx((3.75 - 1.25) / 2.5)
