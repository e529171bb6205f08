"""Checkpoints outlive kills at random instants and every failure of storage."""

import random

import pytest

from tests import storage_failures, storage_kills
from tests.storage_failures import FAILURES

# Trials of `make test` and of `make test-all`.
FEW, MANY = 4, 50


@pytest.fixture(scope="module")
def new_place():
    with storage_kills.places() as new:
        yield new


def assert_killed(kills, trials):
    print(storage_kills.kill_table([kills]))
    assert kills.phases.total() == kills.restored_newest == trials
    assert kills.saves >= storage_kills.KEPT


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "processes"), [("local", 2), ("gs", 1)])
def test_kill(new_place, kind, processes):
    trials = FEW // processes
    assert_killed(storage_kills.kill(new_place(kind), processes, trials), trials)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("kind", ["local", "gs"])
def test_many_kills(new_place, kind, processes):
    kills = storage_kills.kill(new_place(kind), processes, MANY, seed=1)
    assert_killed(kills, MANY)
    assert len(kills.phases) > 2  # the instants are spread over a save


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=pytest.mark.slow if kind != f.places[0] else ())
        for name, f in FAILURES.items()
        for kind in f.places
    ],
)
def test_failure(new_place, kind, name):
    storage_failures.fail(name, new_place, kind, trials=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for name, f in FAILURES.items() for kind in f.places]
)
def test_failure_often(new_place, kind, name):
    storage_failures.fail(name, new_place, kind, trials=10, seed=1)


# Trials that cannot fail would show nothing -------------------------------------------------------


def test_a_step_that_is_lost_is_noticed(new_place, monkeypatch):
    place = new_place("local")
    usual = storage_kills.Savers.end

    def end(savers):
        outcome = usual(savers)
        for name in place.names():
            if name.split("/")[0] == str(outcome[0]):
                place.files.write(name, None).result()
        return outcome

    storage_kills.kill(place, 1, 0)
    monkeypatch.setattr(storage_kills.Savers, "end", end)
    with pytest.raises(AssertionError):
        storage_kills.kill(place, 1, 1)


def test_damage_that_is_not_noticed_is_noticed(new_place):
    place = new_place("local")
    storage_failures.save(place, 1)
    storage_failures.save(place, 2)
    trial = storage_failures.damaged(lambda place, files, rng: "array")
    with pytest.raises(AssertionError):
        trial(place, random.Random(0))
