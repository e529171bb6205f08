"""A run goes back to an older checkpoint: the later ones are gone at once, or not at all."""

import uuid

import pytest

from rmt_tpu.checkpoint import Checkpointer, Retention
from rmt_tpu.errors import RunError, UsageError
from rmt_tpu.storage import Fault
from tests.rmt_tpu.checkpoint.checkpoints import assert_same, small_tree

ALL = Retention(last=9)


@pytest.fixture(params=["local", "gs"])
def root(request, tmp_path):
    if request.param == "local":
        return str(tmp_path / "checkpoints")
    request.getfixturevalue("server")
    return f"gs://bucket/run-{uuid.uuid4().hex[:8]}/checkpoints"


@pytest.fixture
def saver(root):
    """Holds the committed steps 1 to 4."""
    saver = Checkpointer(root, retention=ALL)
    for step in (1, 2, 3, 4):
        saver.save(step, small_tree(step), {"branch": "old"})
    return saver


def test_later_steps_are_gone_and_may_be_saved_again(saver, root):
    saver.go_back(2)
    assert saver.steps() == [1, 2] and saver.root.names() == ["1/", "2/"]
    assert_same(saver.restore(small_tree(0))[1], small_tree(2))
    saver.save(3, small_tree(30), {"branch": "new"})
    assert saver.meta() == {"branch": "new"} and saver.meta(2) == {"branch": "old"}
    with pytest.raises(UsageError, match=r"^step=4 is not a checkpoint in .*; available: 1, 2, 3$"):
        saver.go_back(4)
    assert Checkpointer(root).steps() == [1, 2, 3]


class Killed(Exception):
    pass


def test_killed_anywhere_it_is_done_or_nothing_is(saver, root, monkeypatch):
    """Whoever opens the folder then never sees a later step but 4, and step 2 is whole."""
    kind, left = type(saver.root), [0]
    for name in ("write", "delete", "delete_folder"):
        usual = getattr(kind, name)

        def change(self, *args, usual=usual, **options):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return usual(self, *args, **options)

        monkeypatch.setattr(kind, name, change)
    seen = []
    for number in range(9):
        left[0] = number
        try:
            saver.go_back(2)
        except Killed:
            pass
        left[0] = -1
        found = Checkpointer(root, retention=ALL)
        seen.append(found.steps())
        assert_same(found.restore(small_tree(0))[1], small_tree(found.steps()[-1]))
        if number % 2:  # the next save does the rest, and is not taken for an abandoned one
            found.save(3, small_tree(30), {})
            assert Checkpointer(root).steps() == [1, 2, 3]
            assert_same(found.restore(small_tree(0))[1], small_tree(30))
            found.go_back(2)
        if found.steps() == [1, 2]:
            for step in (3, 4):
                found.save(step, small_tree(step), {})
        saver = Checkpointer(root, retention=ALL)
    assert seen == [[1, 2, 3, 4], *[[1, 2]] * 8]


def test_what_cannot_be_known_is_told(saver):
    saver.root.write("BACK", b"}garbage")
    with pytest.raises(RunError, match="BACK is damaged: it contains no step") as told:
        saver.steps()
    assert isinstance(told.value, Fault)
