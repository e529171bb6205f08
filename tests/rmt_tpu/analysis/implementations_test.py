"""docs/implementations.md says which implementation each op uses, as the code chooses it."""

from pathlib import Path

import jax
import pytest

import pallas_kernels
from pallas_kernels.platform import collecting_calls
from pallas_kernels.target import lowering_for
from rmt_tpu.analysis import implementations
from tests.pallas_kernels.public_ops import CALLS

# The source tree itself: under Bazel, this file is a link to there.
PAGE = Path(__file__).resolve().parents[3] / "docs/implementations.md"
WITHOUT_KERNELS = {"delta_step", "merged", "to_fixed_point"}


def test_the_page_has_the_tables_of_the_code(tmp_path):
    """`python -m rmt_tpu.analysis.implementations docs/implementations.md` writes the page."""
    written = tmp_path / "page.md"
    written.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    implementations.write(written)
    assert written.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")


def test_every_op_and_group_has_a_row():
    rows = implementations.rows()
    assert {row.group for row in rows} == set(implementations.groups())
    assert {op for row in rows for op in row.ops} == CALLS.keys() - WITHOUT_KERNELS
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`{op}`" in text for op in WITHOUT_KERNELS)


def test_a_kernel_that_is_the_default_on_no_platform_is_on_request():
    text = implementations.tables()
    assert "| `store_norm_retrieve`, " in text and "; `triton` or `mosaic_gpu` on request" in text
    (line,) = (line for line in text.splitlines() if line.startswith("| `grouped_matmul` "))
    assert [cell.strip() for cell in line.split("|")[2:5]] == [
        "`mosaic_tpu`",
        "`triton`",
        "plain JAX",
    ]


def test_a_page_without_markers_is_refused(tmp_path):
    (tmp_path / "page.md").write_text("# Page\n")
    with pytest.raises(ValueError, match="lacks the comments"):
        implementations.write(tmp_path / "page.md")


@pytest.mark.slow
@pytest.mark.parametrize("op", sorted(CALLS))
def test_public_ops_ask_the_groups_of_their_rows(op):
    call = CALLS[op]
    given = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in call.given.items()}
    with lowering_for("TPU v5 lite"), collecting_calls() as calls:
        jax.eval_shape(lambda given: call.run("pallas", given), given)
    named = {row.group for row in implementations.rows() if op in row.ops}
    assert {called.name for called in calls} <= named
    assert bool(calls) == (op not in WITHOUT_KERNELS) and hasattr(pallas_kernels, op)
