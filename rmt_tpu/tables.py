"""Markdown tables, and their alignment for display in a terminal."""

import itertools
from collections.abc import Sequence


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, without a newline at its end.

    Args:
      lines: the titles of the columns, and then the cells of each row. A line is a list of cells,
        or one text with " | " between cells.
    """
    head, *rows = (line if isinstance(line, str) else " | ".join(line) for line in lines)
    rule = "---|" * (head.count(" | ") + 1)
    return "\n".join([f"| {head} |", f"|{rule}", *(f"| {row} |" for row in rows)])


def scaled(value: int | float | None, scale: int | float, form: str = ".1f") -> str:
    """Return `value * scale` as text in the format `form`, or "-" for None."""
    return "-" if value is None else format(value * scale, form)


def fitted(text: str, width: int) -> str:
    """Return Markdown text with aligned tables, for a terminal of `width` characters.

    A table that is too wide loses its last columns, and a line states how many.
    """
    lines = []
    for is_table, block in itertools.groupby(text.splitlines(), lambda line: line.startswith("|")):
        if not is_table:
            lines += block
            continue
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block]
        # A cell may contain a "|", such as a compiler's message: it is then in several parts.
        last = len(rows[0]) - 1
        rows = [[*row[:last], " ".join(row[last:])] for row in rows]
        rows = [[*row, *[""] * (last + 1 - len(row))] for row in rows]
        columns = [[row[i] for row in rows] for i in range(len(rows[0]))]
        widths = [max(map(len, column)) for column in columns]
        ends = itertools.accumulate((size + 3 for size in widths), initial=1)
        shown = max(1, sum(end <= width for end in ends) - 1)
        for row in rows:
            fill = "-" if set("".join(row)) == {"-"} else " "
            cells = (cell.ljust(size, fill) for cell, size in zip(row, widths, strict=True))
            lines.append(f"| {' | '.join(list(cells)[:shown])} |")
        if shown < len(widths):
            lines.append(f"(columns only in the file: {len(widths) - shown})")
    return "\n".join(lines) + "\n"
