"""The slips can be made, and the table counts them right."""

from tests.mutations import FAILED, ROOT, Outcome, summary, table
from tests.slips import SLIPS, Slip

ALL = [slip for slips in SLIPS.values() for slip in slips]


def test_every_slip_has_its_place_and_its_tests():
    missing = [
        (slip.file, slip.old)
        for slip in ALL
        if (ROOT / slip.file).read_text(encoding="utf-8").count(slip.old) != 1
    ]
    assert missing == []
    assert [t for slip in ALL for t in slip.tests if not (ROOT / t).is_file()] == []
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
    assert table({"costs": [outcomes[0], last._replace(test=None, tier="")]}).splitlines() == [
        "| slip in | becomes | noticed by | tier |",
        "|---|---|---|---|",
        "| **costs** | | | |",
        r"| cost.py | `a \| c` | rmt_tpu/cost_test.py test_x[1/2] | fast |",
        r"| cost.py | `a \| c` | **nobody** |  |",
    ]
