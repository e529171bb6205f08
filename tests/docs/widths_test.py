"""No code or table of a page is wider than the site's column (docs/site.css); pages are short.

`docs/hooks.py` checks the search of the site when `make docs` builds it.
"""

import re
from pathlib import Path

import pytest

# The source tree itself: under Bazel, this file is a link to there.
ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
# The column has 908 pixels where the window has 1440; a letter of code has about 8.
CODE_COLUMNS = 106
# Of the longest words of a table's columns, with three more letters for each column's padding.
TABLE_COLUMNS = 140


def code_lines(text: str) -> list[str]:
    return [line for block in FENCE.finditer(text) for line in block[0].splitlines()]


def least_columns(table: str) -> int:
    """Return the letters of a table's narrowest form, where cells break between words."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", table).replace("`", "").replace("*", "")
    rows = [line.strip("|").split("|") for line in plain.splitlines() if set(line) - set("|- :")]
    words = [[max(map(len, cell.split()), default=0) for cell in row] for row in rows]
    return sum(max(column) + 3 for column in zip(*words, strict=True))


def test_widths_are_those_of_lines_and_words():
    text = "# Page\n```bash\nab \\\n  c\n```\nText.\n"
    assert max(map(len, code_lines(text))) == len("```bash")
    assert least_columns("| a | b c |\n|---|---|\n| [abc](x.md) `de` | long |\n") == 3 + 3 + 4 + 3


@pytest.mark.parametrize("page, most", [("train_step", 150), ("decoding", 120), ("systems", 195)])
def test_pages_of_figures_stay_short(page, most):
    lines = (ROOT / f"docs/benchmarks/{page}.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= most


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_code_or_table_is_wider_than_the_page(page):
    text = page.read_text(encoding="utf-8")
    assert [line for line in code_lines(text) if len(line) > CODE_COLUMNS] == []
    tables = TABLE.findall(FENCE.sub("", text))
    wide = [table.splitlines()[0] for table in tables if least_columns(table) > TABLE_COLUMNS]
    assert wide == []
