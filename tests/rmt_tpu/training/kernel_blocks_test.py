"""A run keeps its kernels' block sizes, whatever tables say later."""

import pytest

from pallas_kernels import tuned
from pallas_kernels.causal_attention.mosaic_tpu_whole import KERNELS, WholeBlocks
from pallas_kernels.target import Target
from pallas_kernels.tuned import Table
from rmt_tpu.storage import Fault, open_folder
from rmt_tpu.training import kernel_blocks
from tests.rmt_tpu.entries import V5E, entry

KERNEL = KERNELS["attention_forward"]
KEY = dict(entry(512).key)


@pytest.fixture(autouse=True)
def on_a_tpu(monkeypatch):
    monkeypatch.setattr(tuned.lookup, "target", lambda: Target("TPU v5 lite"))


def start(folder, *tables, restart=False, key=KEY):
    """What a start of the run takes, and what it says."""
    said = []
    with (
        tuned.tuned(*tables),
        kernel_blocks.pinned_block_sizes(folder, said.append, restart=restart) as blocks,
    ):
        chosen = tuned.look_up(KERNEL, key, 512, WholeBlocks(512))
        blocks.write()
        blocks.write()
    return chosen.queries, said


def test_a_new_table_changes_no_run_that_goes_on(tmp_path):
    folder, mine = open_folder(tmp_path), Table("mine", (entry(512, 256),))
    assert start(folder) == (512, [])
    (kept,) = tuned.parse(folder.read(kernel_blocks.FILE).data, "").entries
    assert (kept.device, kept.source, dict(kept.blocks)) == (V5E, "heuristic", {"queries": 512})
    assert start(folder, mine) == (512, [])
    # What the run has not had yet is looked up, and kept too.
    other = KEY | {"alibi": True}
    table = Table("mine", (tuned.Entry(**(vars(entry(512)) | {"key": tuned.items(other)})),))
    chosen, (line,) = start(folder, table, key=other)
    assert chosen == 128 and line.endswith("kernel_blocks.json: attention_forward (measured)")
    assert start(folder, key=other)[0] == 128 and start(folder)[0] == 512
    assert "mine" in {
        e.table for e in tuned.parse(folder.read("kernel_blocks.json").data, "").entries
    }
    assert start(folder, mine, restart=True)[0] == 256


def test_a_damaged_or_refused_file_is_told_and_no_more(tmp_path, monkeypatch):
    folder = open_folder(tmp_path)
    folder.write(kernel_blocks.FILE, b"{")
    chosen, (note,) = start(folder)
    assert chosen == 512 and note.startswith("note: ") and note.endswith("chosen again")
    folder.delete(kernel_blocks.FILE)

    def refuse(self, name, data):
        raise Fault(f"{name}: No space left on device")

    monkeypatch.setattr(type(folder), "write", refuse)
    chosen, (note,) = start(folder)
    assert chosen == 512 and "No space left on device; the run continues" in note
