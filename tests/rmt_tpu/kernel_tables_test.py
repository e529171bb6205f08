"""Tables in folders: two writers at one file, and what stands in it."""

import threading

import pytest

from pallas_kernels import tuned
from rmt_tpu import kernel_tables, storage
from rmt_tpu.errors import RunError, UsageError
from tests.rmt_tpu.entries import entry


@pytest.fixture(params=["local", "gs"])
def location(request, tmp_path):
    if request.param == "local":
        return str(tmp_path / "some" / "table.json")
    return f"gs://{request.getfixturevalue('server').bucket}/some/table.json"


def test_of_two_writers_none_loses_what_it_wrote(location, monkeypatch):
    """The second one writes between the first one's reading and writing, at first and later."""
    others = [entry(256), entry(1024)]
    kind = type(storage.open_folder(location.rpartition("/")[0]))
    own_read = kind.read

    def read(self, name, **options):
        found = own_read(self, name, **options)
        if others and threading.current_thread() is threading.main_thread():
            given = others.pop()
            second = threading.Thread(target=kernel_tables.add, args=(location, [given]))
            second.start()
            second.join()
        return found

    monkeypatch.setattr(kind, "read", read)
    kernel_tables.add(location, [entry(512)])
    table = kernel_tables.add(location, [entry(512, 256)])
    assert table.entries == kernel_tables.read(location).entries
    found = {e.tokens: dict(e.blocks)["queries"] for e in table.entries}
    assert found == {256: 128, 512: 256, 1024: 128}


def test_a_file_that_is_no_table_is_left_as_it_is(tmp_path):
    file = tmp_path / "table.json"
    file.write_text("mine")
    with pytest.raises(RunError, match="is not overwritten: correct it, or move it away"):
        kernel_tables.add(str(file), [entry(512)])
    assert file.read_text() == "mine"
    with pytest.raises(UsageError, match="cannot be opened"):
        kernel_tables.add("s3://bucket/table.json", [entry(512)])
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="file"):
        kernel_tables.add(str(tmp_path / "file" / "table.json"), [entry(512)])


def test_the_users_file_may_be_in_a_bucket(server, monkeypatch):
    location = f"gs://{server.bucket}/table.json"
    monkeypatch.setenv("RMT_TPU_TUNED", location)
    tuned.clear_caches()
    kernel_tables.add(location, [entry(512)])
    known = kernel_tables.tables_in_use()
    assert tuned.user_table().entries == (entry(512),) and known.file == location
    kernel_tables.add(location, [entry(256)])
    assert kernel_tables.tables_in_use() == known  # what a process has read it keeps
    tuned.clear_caches()
    assert kernel_tables.tables_in_use().fingerprint != known.fingerprint
    monkeypatch.setenv("RMT_TPU_TUNED", "off")
    assert kernel_tables.tables_in_use().file is None
    tuned.clear_caches()
