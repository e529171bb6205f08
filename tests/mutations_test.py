"""The slips can be made, and the table counts them right."""

import re

from tests.mutations import FAILED, ROOT, Outcome, page, summary, table
from tests.slips import SLIPS, Slip

ALL = [slip for slips in SLIPS.values() for slip in slips]


def is_there(test: str) -> bool:
    """Of a file, or a test of it by name."""
    file, *names = test.split("::")
    if not (ROOT / file).is_file():
        return False
    defined = re.findall(r"^ *(?:def|class) (\w+)", (ROOT / file).read_text("utf-8"), re.MULTILINE)
    return {name.split("[")[0] for name in names} <= {*defined}


def test_every_slip_has_its_place_and_its_tests():
    missing = [
        (slip.file, slip.old)
        for slip in ALL
        if (ROOT / slip.file).read_text(encoding="utf-8").count(slip.old) != 1
    ]
    assert missing == []
    assert [t for slip in ALL for t in slip.tests if not is_there(t)] == []
    assert len(ALL) >= 60 and len({(s.file, s.old) for s in ALL}) == len(ALL)


def test_a_failed_test_is_found_by_its_whole_name():
    lines = "FAILED tests/a_test.py::test_b[one number-x] - AssertionError: 1 - 2\nFAILED tests/c"
    assert FAILED.findall(lines) == ["tests/a_test.py::test_b[one number-x]", "tests/c"]
    assert FAILED.findall("ERROR tests/a_test.py::test_b[one number]\n") == [
        "tests/a_test.py::test_b[one number]"
    ]


def test_a_table_counts_who_noticed():
    slip = Slip("rmt_tpu/cost.py", "a | b", "a\n| c", ("tests/rmt_tpu/cost_test.py",))
    outcomes = [Outcome(slip, "tests/rmt_tpu/cost_test.py::test_x[1|2]", "fast", 1.0)] * 19
    last = Outcome(slip, "tests/x_test.py::test_y", "night", 1.0)
    assert summary([*outcomes, last]) == (
        "20 slips: 19 noticed by the fast tier, 1 at night, 0 not",
        True,
    )
    assert not summary([*outcomes[:-1], last])[1]
    assert not summary([*outcomes, last._replace(test=None, tier="")])[1]
    found = [outcomes[0], last._replace(slip=slip._replace(new=""), test=None, tier="")]
    assert table(found).splitlines() == [
        "| in | was | becomes | noticed by | tier |",
        "|---|---|---|---|---|",
        r"| cost.py | `a \| b` | `a \| c` | rmt_tpu/cost_test.py test_x[1/2] | fast |",
        r"| cost.py | `a \| b` | nothing | **nobody** |  |",
    ]
    text = page({"costs": found, "more": [last]}, "Today, in 3 minutes.")
    assert "Today, in 3 minutes.\n\n3 slips: 1 noticed by the fast tier, 1 at night, 1 not." in text
    assert "|---|---|---|---|\n| costs | 1 | 0 | 1 |\n| more | 0 | 1 | 0 |\n\n## Costs\n" in text
    assert table(found) in text and text.endswith("| night |\n")
