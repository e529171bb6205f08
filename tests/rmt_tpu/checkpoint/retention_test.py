"""Which checkpoints stay, and how the others go."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rmt_tpu.checkpoint import Checkpointer, Retention
from rmt_tpu.errors import RunError, UsageError
from rmt_tpu.storage import Fault
from rmt_tpu.storage.local import LocalFolder
from tests.rmt_tpu.checkpoint.checkpoints import (
    assert_same,
    attempt_of,
    damage_commit,
    damage_flip,
    small_tree,
)


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def reports() -> list[str]:
    return []


LOSSES = {0: 9.0, 10: 5.0, 20: 3.0, 25: None, 30: 4.0, 40: 3.0, 45: 8.0}


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({"last": 1}, {45}),
        ({"last": 3}, {30, 40, 45}),
        ({"last": 99}, set(LOSSES)),
        ({"last": 1, "every": 20}, {0, 20, 40, 45}),
        ({"last": 2, "every": 7}, {0, 40, 45}),
        # Of two equal ones the later.
        ({"last": 1, "best": 1}, {40, 45}),
        ({"last": 1, "best": 3}, {20, 30, 40, 45}),
        ({"last": 1, "best": 99}, set(LOSSES) - {25}),
        ({"last": 2, "every": 25, "best": 1}, {0, 25, 40, 45}),
    ],
)
def test_what_the_rules_keep(rules, kept):
    assert Retention(**rules).retained_steps(LOSSES) == kept
    assert Retention(**rules).retained_steps({}) == set()


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"last": 0}, "last=0 checkpoints cannot be kept; legal: at least 1"),
        ({"every": -1}, "every=-1 must not be negative; legal: at least 0"),
        ({"best": -2}, "best=-2 must not be negative; legal: at least 0"),
    ],
)
def test_rules_that_cannot_be(rules, reason):
    with pytest.raises(UsageError, match=reason):
        Retention(**rules)


def test_a_loss_is_in_commit_and_outlives_the_checkpointer(root):
    losses = {1: 2.0, 2: 0.5, 3: float("nan"), 4: 3, 5: None, 6: 0.75}
    for step, loss in losses.items():
        # Each time by another one, as a run is that was interrupted.
        saver = Checkpointer(str(root), retention=Retention(last=1, best=2))
        saver.save(step, small_tree(step), {}, loss=loss)
    assert saver.steps() == [2, 6]
    assert json.loads((root / "2/COMMIT").read_text())["loss"] == 0.5
    assert_same(saver.restore(small_tree(0), 2)[1], small_tree(2))


def test_steps_without_a_finite_loss_are_none_of_the_best(root):
    saver = Checkpointer(str(root), retention=Retention(last=1, best=3))
    for step, loss in {1: None, 2: float("nan"), 3: float("inf"), 4: 1.0, 5: 2.0}.items():
        saver.save(step, small_tree(step), {}, loss=loss)
    assert saver.steps() == [4, 5]


def test_a_damaged_commit_has_no_loss_and_nothing_of_its_step_is_lost(root, reports):
    saver = Checkpointer(str(root), retention=Retention(last=2, best=1), report=reports.append)
    saver.save(1, small_tree(1), {}, loss=0.1)
    damage_commit(saver.root, 1)
    saver.save(2, small_tree(2), {}, loss=5.0)
    # Who repairs COMMIT has the step back.
    assert saver.steps() == [1, 2] and attempt_of(saver.root, 1)
    saver.save(3, small_tree(3), {}, loss=6.0)
    assert saver.steps() == [2, 3] and reports == []


def test_only_the_last_steps_are_kept_and_nothing_of_the_others_remains(root):
    saver = Checkpointer(str(root), retention=Retention(last=2))
    for step in (1, 5, 10, 11):
        saver.save(step, small_tree(step), {})
    assert saver.steps() == [10, 11]
    assert sorted(path.name for path in root.iterdir()) == ["10", "11"]
    assert_same(saver.restore(small_tree(0), step=10)[1], small_tree(10))


def test_folders_of_steps_are_listed_at_the_same_time(root, monkeypatch):
    """They are listed one after the other while the interpreter exits and threads cannot start."""
    for step in range(6):
        (root / f"{step}").mkdir(parents=True)
        (root / f"{step}/COMMIT").write_text("")
    saver, all_at_once, names = Checkpointer(str(root)), threading.Barrier(6), LocalFolder.names

    def listed(self, name=""):
        if name:
            all_at_once.wait(60)
        return names(self, name)

    monkeypatch.setattr(LocalFolder, "names", listed)
    assert saver.steps() == list(range(6))

    def refuse(*_):
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(LocalFolder, "names", names)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    assert saver.steps() == list(range(6))


def test_what_is_not_ours_is_neither_counted_nor_deleted(root):
    saver = Checkpointer(str(root), retention=Retention(last=1))
    saver.save(1, small_tree(1), {})
    foreign = ["notes.txt", "007/COMMIT", "1.bak/x", "-5/COMMIT", "latest/COMMIT", "1/notes.txt"]
    foreign += ["1/attempt-mine/x", "4/log.txt"]
    for name in foreign:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("mine")
    saver.save(2, small_tree(2), {})
    assert saver.steps() == [2]
    assert not list(root.glob("1/attempt-????????????????"))
    assert all((root / name).read_text() == "mine" for name in foreign)


def test_damaged_steps_do_not_push_out_good_ones(root, reports):
    saver = Checkpointer(str(root), retention=Retention(last=2), report=reports.append)
    for step in (1, 3):
        saver.save(step, small_tree(step), {})
    damage_flip(saver.root, 3)
    assert saver.restore(small_tree(0))[0] == 1
    saver.save(2, small_tree(2), {})
    assert saver.steps() == [1, 2, 3]
    saver.save(4, small_tree(4), {})
    assert saver.steps() == [2, 4]


def test_a_replaced_step_counts_as_a_good_one_again(root, reports):
    saver = Checkpointer(str(root), retention=Retention(last=2), report=reports.append)
    for step in (1, 3):
        saver.save(step, small_tree(step), {})
    damage_flip(saver.root, 3)
    saver.restore(small_tree(0))
    saver.save(3, small_tree(3), {})
    saver.save(4, small_tree(4), {})
    assert saver.steps() == [3, 4]


def test_a_run_that_goes_back_in_time_keeps_what_it_saves(root):
    saver = Checkpointer(str(root), retention=Retention(last=2))
    for step in (10, 20, 5):
        saver.save(step, small_tree(step), {})
    assert saver.steps() == [5, 10, 20]
    saver.save(6, small_tree(6), {})
    assert saver.steps() == [6, 10, 20]


def test_commit_goes_before_what_it_names(root, reports, monkeypatch):
    saver = Checkpointer(str(root), retention=Retention(last=1), report=reports.append)
    saver.save(1, small_tree(1), {})

    def refuse(name):
        raise Fault("disk says no")

    with monkeypatch.context() as patch:
        patch.setattr(saver.root, "delete_folder", refuse)
        saver.save(2, small_tree(2), {})
    # The save counts, and of the old step there is no half that could be read.
    assert reports == [f"cannot delete old checkpoints in {root}: disk says no"]
    assert saver.steps() == [2] and attempt_of(saver.root, 1)
    saver.save(3, small_tree(3), {})
    assert sorted(path.name for path in root.iterdir()) == ["3"]


def test_a_step_whose_commit_cannot_be_deleted_stays_whole(root, reports, monkeypatch):
    saver = Checkpointer(str(root), retention=Retention(last=1), report=reports.append)
    saver.save(1, small_tree(1), {})

    def refuse(name, **conditions):
        raise Fault("no permission to delete")

    with monkeypatch.context() as patch:
        patch.setattr(saver.root, "delete", refuse)
        saver.save(2, small_tree(2), {})
    assert reports == [f"cannot delete old checkpoints in {root}: no permission to delete"]
    assert saver.steps() == [1, 2]
    assert_same(saver.restore(small_tree(0), 1)[1], small_tree(1))


def test_partial_steps_are_invisible_and_collected_later(root, reports):
    saver = Checkpointer(str(root), report=reports.append)
    for step in (1, 2, 3, 4):
        saver.save(step, small_tree(step), {})
    # Step 4 dies before its COMMIT, and step 3 has a dead attempt beside the committed one.
    saver.root.delete("4/COMMIT")
    dead = "3/attempt-00000000000000aa"
    saver.root.write(f"{dead}/arrays/a/w/c/0/0", b"half")
    assert saver.steps() == [2, 3]
    assert saver.restore(small_tree(0))[0] == 3

    saver.save(4, small_tree(44), {})
    assert_same(saver.restore(small_tree(0), step=4)[1], small_tree(44))
    assert not (root / dead).exists()
    assert_same(saver.restore(small_tree(0), step=3)[1], small_tree(3))
    # Beside what was just saved another writer may still be at work.
    assert len(list(root.glob("4/attempt-*"))) == 2
    saver.save(5, small_tree(5), {})
    assert len(list(root.glob("4/attempt-*"))) == 1
    assert_same(saver.restore(small_tree(0), step=4)[1], small_tree(44))


def test_a_save_that_fails_deletes_nothing_old(root):
    saver = Checkpointer(str(root), retention=Retention(last=1))
    saver.save(1, small_tree(1), {})

    def refuse():
        raise Fault("no metrics")

    with pytest.raises(RunError, match=f"^cannot save step 2 in {root}: no metrics$"):
        saver.save(2, {"x": np.zeros(2)}, {}, before_commit=refuse)
    assert sorted(path.name for path in root.iterdir()) == ["1"]
    assert_same(saver.restore(small_tree(0))[1], small_tree(1))


@pytest.mark.parametrize("rules", [Retention(last=1), Retention(last=1, every=1000)])
def test_a_step_that_is_deleted_while_it_is_read_is_not_damaged(root, reports, rules, monkeypatch):
    """The reader gets the newer step, not an older one that is kept for other reasons."""
    writer, tree = Checkpointer(str(root), retention=rules), small_tree(1)
    for step in (1000, 1990):
        writer.save(step, tree, {})
    reader = Checkpointer(str(root), report=reports.append)
    listings = iter([reader.steps()])
    writer.save(1995, tree, {})
    monkeypatch.setattr(reader, "steps", lambda: next(listings, None) or Checkpointer.steps(reader))
    step, restored, _ = reader.restore(tree)
    assert (step, reports) == (1995, [])
    assert_same(restored, tree)
