"""Markdown tables from lines of cells."""

from rmt_tpu.tables import markdown, scaled


def test_a_line_is_a_list_of_cells_or_one_text():
    expected = "| a | b |\n|---|---|\n| 1 |  |\n| 2 | 3 |"
    assert markdown(["a | b", ["1", ""], "2 | 3"]) == expected
    assert markdown([["a", "b"], "1 | ", ["2", "3"]]) == expected


def test_numbers_are_scaled_and_none_is_a_dash():
    assert [scaled(x, 1e3, ",.1f") for x in (1.25, 2, None)] == ["1,250.0", "2,000.0", "-"]
