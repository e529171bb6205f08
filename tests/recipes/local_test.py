"""Files on this machine: what cannot be written is a wrong command before, and a failure later."""

import pytest

from recipes import local
from rmt_tpu.errors import RunError, UsageError


def test_a_path_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    value = f"{tmp_path}/file/new"
    for check, where in ((local.folder, value), (local.file, value), (local.file, f"{value}/a")):
        words = f"^--output={where} cannot be written: Not a directory$"
        with pytest.raises(UsageError, match=words):
            check("output", where)


def test_a_disk_that_becomes_full_is_a_failure():
    file = local.file("json", "/dev/full")
    with (
        pytest.raises(RunError, match="^--json=/dev/full cannot be written: No space left on dev"),
        local.writing("json", "/dev/full"),
    ):
        file.write_text("{}", encoding="utf-8")
