"""Local paths that two libraries would read in two ways."""

import os

import pytest

from rmt_tpu.errors import UsageError
from rmt_tpu.storage import open_folder, writable_file

PATHS = {
    "backslash": ("a\\b", r"^'a\\\\b' cannot be opened: it has a backslash; legal: a path without"),
    "NUL": ("a\0b", r"cannot be opened: it has a NUL; legal"),
    "not UTF-8": (os.fsdecode(b"d\xd0/e"), r"cannot be opened: Python does not read file names"),
}


def test_a_file_that_cannot_be_written_is_named_as_it_was_given(tmp_path):
    assert writable_file(f"{tmp_path}/new/a.jsonl")[1] == "a.jsonl"
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=f"^{tmp_path}/file/a.jsonl cannot be written to: "):
        writable_file(f"{tmp_path}/file/a.jsonl")
    with pytest.raises(UsageError, match="^'s3://b/a.jsonl' cannot be opened; legal: a local path"):
        writable_file("s3://b/a.jsonl")


@pytest.mark.parametrize("name, message", PATHS.values(), ids=PATHS)
def test_a_path_that_libraries_do_not_agree_on_is_refused(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        open_folder(name)
    assert not list(tmp_path.iterdir())


def test_a_working_folder_with_a_backslash_is_told(tmp_path, monkeypatch):
    (tmp_path / "c\\d").mkdir()
    monkeypatch.chdir(tmp_path / "c\\d")
    with pytest.raises(UsageError, match="^'run' cannot be opened: it has a backslash, in '/"):
        open_folder("run")


def test_a_file_system_that_takes_nothing_is_told():
    with pytest.raises(
        UsageError, match="^/proc/run cannot be written to: /proc does not allow new fo"
    ):
        open_folder("/proc/run").check(write=True)


def test_a_link_to_nowhere_is_told(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone/away")
    for folder in (tmp_path / "link", tmp_path / "link/run"):
        with pytest.raises(UsageError, match="cannot be written to: .*link is a broken link"):
            open_folder(folder).check(write=True)


@pytest.mark.parametrize("write", [False, True])
def test_a_folder_that_cannot_be_looked_up_is_told(tmp_path, write):
    """A name that is too long stands for a folder that this user may not enter."""
    name = f"{tmp_path}/{'a' * 300}"
    what = "written to" if write else "read"
    for url in (name, f"{name}/run"):
        with pytest.raises(UsageError, match=f"^{url} cannot be {what}: File name too long$"):
            open_folder(url).check(write=write)
    (tmp_path / "file").touch()
    open_folder(tmp_path / "file/run").check()
    with pytest.raises(UsageError, match="file cannot be written to: Not a directory$"):
        open_folder(tmp_path / "file").check(write=True)
    with pytest.raises(UsageError, match="file cannot be read: Not a directory$"):
        open_folder(tmp_path / "file").check()


def test_a_relative_folder_stays_where_it_was_opened(tmp_path, monkeypatch):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    folder = open_folder("run")
    monkeypatch.chdir(tmp_path / "other")
    child = folder.child("checkpoints")
    assert child.local_path == tmp_path / "one/run/checkpoints"
    assert str(child) == "run/checkpoints"
    child.write("a", b"b")
    assert (tmp_path / "one/run/checkpoints/a").read_bytes() == b"b"
