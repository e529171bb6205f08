"""The tables of docs/benchmarks are what the command writes from the recipes' JSON files."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from rmt_tpu.analysis import benchmark_tables
from rmt_tpu.analysis.benchmark_layouts import (
    decode,
    gpu_programs,
    gpu_traffic,
    moments,
    ops,
    residuals,
    storage,
)
from rmt_tpu.analysis.benchmark_tables import SOURCES, TABLES, Pages, taken
from rmt_tpu.runs.environment import describe

# The source tree itself: under Bazel, this file is a link to there.
FOLDER = Path(__file__).resolve().parents[3] / "docs/benchmarks"
NAMES = set(
    re.findall(r"<!-- table: (.*) -->", "".join(p.read_text() for p in FOLDER.glob("*.md")))
)


@pytest.fixture
def pages(tmp_path):
    """A copy of the pages, to write to."""
    shutil.copytree(FOLDER, tmp_path / "benchmarks")
    return Pages(tmp_path / "benchmarks")


def texts(folder):
    return {page.name: page.read_text(encoding="utf-8") for page in folder.glob("*.md")}


def picture(folder):
    return (folder / "step_cost.png").read_bytes()


def test_the_pages_have_the_tables_of_the_files(pages):
    """`python -m rmt_tpu.analysis.benchmark_tables docs/benchmarks` changes nothing."""
    pages.write()
    assert texts(pages.folder) == texts(FOLDER)
    assert picture(pages.folder) == picture(FOLDER)


def test_every_table_is_on_a_page_and_every_file_belongs_to_a_source():
    assert set(TABLES) <= NAMES
    parts = {f"{name}.{part}.json" for name, source in SOURCES.items() for part in source.parts}
    assert {file.name for file in (FOLDER / "data").iterdir()} <= parts


def test_a_changed_number_changes_one_row(pages):
    file = pages.file("step_16", "rmt-305m@v5e")
    values = json.loads(file.read_text())
    values["report"]["steps"][0]["cycles_by_model"]["best guess"] = 25.99e6
    file.write_text(json.dumps(values))
    assert set(pages.write()) == {name for name in NAMES if pages.region(name) is None}
    before, after = (texts(f)["train_step.md"].splitlines() for f in (FOLDER, pages.folder))
    changed = [line for line in after if line not in before]
    assert len(before) == len(after) and len(changed) == 1
    assert picture(pages.folder) != picture(FOLDER)
    other = json.loads(pages.file("step_16", "gpt2-405m@v5e").read_text())["report"]["steps"][0]
    cycles = other["cycles_by_model"]["best guess"]
    ratio = f"26.0 / {cycles / 1e6:.1f} = **{25.99e6 / cycles:.2f}**"
    assert changed[0].startswith(f"| 16 x 512 | best guess | {ratio} |")


def test_a_table_whose_files_are_missing_stays_and_is_named(pages, capsys, monkeypatch):
    pages.file("decode_host", "host").unlink()
    monkeypatch.setattr(sys, "argv", ["benchmark_tables", str(pages.folder)])
    assert benchmark_tables.main() == 0
    assert texts(pages.folder) == texts(FOLDER)
    command = f"rmt_tpu.analysis.benchmark_tables {pages.folder} --take decode_host.host\n"
    assert f"files: decode_host; to make them:\n  python -m {command}" in capsys.readouterr().out


def test_a_region_of_an_unknown_table_is_refused(pages):
    (pages.folder / "page.md").write_text("<!-- table: nothing -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match=r"table: nothing --> is unknown; legal: ops, "):
        pages.write()


def test_what_a_recipe_writes_is_stored_with_its_command_and_commit(pages, monkeypatch):
    """The program below stands for a recipe."""
    program = "import json, sys; json.dump({'rows': [2]}, open(sys.argv[1] + '/r.json', 'w'))"
    source = SOURCES["counts"]._replace(
        taking=f'python -c "{program.replace("{", "{{").replace("}", "}}")}" {{folder}}',
        output="r.json",
    )
    monkeypatch.setitem(SOURCES, "counts", source)
    pages.take("counts", "paper", describe() | {"git_commit": "a" * 40 + "-dirty"})
    values = json.loads(pages.file("counts", "paper").read_text())
    assert values["report"] == {"rows": [2]} and values["command"].startswith("python -c")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", values["date"]) and "jax" in values["versions"]
    assert str(pages.folder.parent) not in values["command"] and "/tmp" not in values["command"]
    assert f"{values['date']} (aaaaaaa-dirty). jax " in pages.region("taken counts")


def test_flags_of_a_part_go_into_its_command(pages, monkeypatch):
    program = "import json, sys; print(json.dumps(sys.argv[1:]))"
    source = SOURCES["residuals_160m"]._replace(
        taking=f"python -c '{program}' --targets={{chip}} {{flags}}", output=""
    )
    monkeypatch.setitem(SOURCES, "residuals_160m", source)
    pages.take("residuals_160m", "wide@v5e", describe())
    values = json.loads(pages.file("residuals_160m", "wide@v5e").read_text())
    assert values["report"] == ["--targets=v5e", "--set=model.mixer=wide_streams"]
    pages.take("residuals_160m", "plain@v5e", describe())
    assert json.loads(pages.file("residuals_160m", "plain@v5e").read_text())["report"] == [
        "--targets=v5e"
    ]


def test_residuals_have_their_ratio_over_the_plain_one():
    def report(least, best, most, temporary=1e9):
        cycles = {"least": least, "best guess": best, "most": most}
        step = {"preset": "a", "cycles_by_model": cycles, "temporary_bytes": temporary}
        return {"steps": [step]}

    reports = {"plain@v5e": report(1e8, 2e8, 4e8), "x@v5e": report(1.5e8, 2.2e8, 4e8, 3.26e9)}
    lines = residuals(reports).splitlines()
    assert lines[0] == "| residual | a, v5e | a: temporary memory, GB |"
    assert lines[2:] == ["| plain | 200.0 million cycles | 1.0 |"] + [
        "| x | **1.10** (1.00 to 1.50) | 3.3 |"
    ]
    with_another = residuals(reports, {"plain@v5e": report(1e8, 2e8, 4e8)}).splitlines()
    assert with_another[3] == "| x | **1.10** (1.00 to 1.50) | - | 3.3 | - |"
    first, both = {"plain@v5e": report(1e8, 2e8, 4e8)}, reports
    assert residuals(first, both).splitlines()[3] == "| x | - | **1.10** (1.00 to 1.50) | - | 3.3 |"


def test_moments_have_the_differences_of_each_seed():
    runs = lambda a, b: [{"name": "x", "seed": n, "held_out_loss": v} for n, v in enumerate((a, b))]
    lines = moments({"float32": runs(1.0, 2.0), "bfloat16": runs(1.5, 1.9)}).splitlines()
    assert lines[2:] == ["| `x` | 1.5000 | 1.7000 | +0.5000, -0.1000 | +0.2000 |"]


def test_programs_for_gpus_have_a_number_for_each():
    report = {"launches": 1234, "memory_bytes": {"temporaries": 3 * 2**20}, "used_bytes": 2**31}
    lines = gpu_programs({"a@h100": report, "b@h100": report, "a@b200": report}).splitlines()
    assert lines[2:] == [
        "| `a` | 1,234, 1,234 | 3, 3 | 2.00, 2.00 |",
        "| `b` | 1,234, - | 3, - | 2.00, - |",
    ]


def test_traffic_of_gpus_that_agree_has_one_number():
    moved = lambda size: {"bytes": size, "launches": 7}
    row = {"op": "key_vector", "size": "K=1", "least": 2e6, "xla": moved(5e6)}
    h100 = row | {"triton": moved(3e6), "mosaic_gpu": None}
    b200 = h100 | {"xla": moved(6e6)}
    assert gpu_traffic({"h100": [h100], "b200": [b200]}).splitlines()[2] == (
        "| key vector | K=1 | 2 | 5, 6 | 3 | - | 7; 7; - |"
    )


def test_what_was_transcribed_says_so():
    """A file that no recipe wrote names the page and the commit that its figures are from."""
    for file in (FOLDER / "data").iterdir():
        values = json.loads(file.read_text(encoding="utf-8"))
        # The reports of some recipes have no versions.
        without = file.name.startswith(
            (
                "compare",
                "counts",
                "systems",
                "recent_systems",
                "gpu_programs",
                "gpu_traffic",
                "moments",
                "peers",
            )
        )
        written = "versions" in values["report"] or without
        assert written != ("transcribed" in values), file.name
    lines = (FOLDER / "decoding.md").read_text(encoding="utf-8").splitlines()
    assert any("transcribed from docs/benchmarks/decoding.md of 3feb6d0" in x for x in lines)


def test_decode_steps_that_do_not_fit_have_no_time():
    row = {"case": {"preset": "a", "batch": 32, "context": 8192}, "least_seconds": 2e-3}
    fits = row | {"seconds": 4e-3, "of_bandwidth": 0.5, "cost": {"temporary_bytes": 3e6}}
    full = row | {"seconds": None, "of_bandwidth": None, "cost": None}
    table = decode({"v5e": {"rows": [full]}, "v5p": {"rows": [fits]}})
    assert "| a | 32 | 8,192 | 2.00 / 2.00 | - / 4.00 | - / 0.50 | - / 3.0 |" in table


def test_ops_have_a_line_per_case_with_both_passes_and_the_ratios_of_all_chips():
    def report(speedup):
        sizes = {"work": {"bytes": 2e8}, "cost": {"bytes": 3e8}, "portable_cost": {"bytes": 9e8}}
        row = {"op": "key_vector", "case": "K=64", "direction": "forward", "speedup": speedup}
        return {"rows": [row | sizes, row | sizes | {"direction": "training", "speedup": 4}]}

    table = ops({"v5e": report(1.5), "v6e": report(3)})
    line = "| key vector, K=64 | 200; 200 | 300; 300 | 900; 900 | 1.50 / 3.00 | 4.00 / 4.00 |"
    assert line in table and "plain time over kernel's, v5e / v6e | training |" in table


def test_dates_commits_and_versions_are_said_once():
    values = {"date": "2026-11-27", "commit": "a" * 40, "versions": {"jax": "1", "flax": "2"}}
    assert taken({"a": {"v5e": values, "v6e": values}}) == "2026-11-27 (aaaaaaa). jax 1."
    copied = values | {"commit": None, "transcribed": "x.md of b"}
    assert taken({"a": {"v5e": values, "v5p": values, "v6e": copied}}) == (
        "v6e: 2026-11-27, transcribed from x.md of b; all others: 2026-11-27 (aaaaaaa). jax 1."
    )
    other = values | {"versions": {"jax": "3"}}
    assert taken({"a": {"v5e": values, "v5p": values}, "b": {"v6e": other}}) == (
        "b v6e: 2026-11-27 (aaaaaaa), jax 3; all others: 2026-11-27 (aaaaaaa), jax 1."
    )
    parts = dict.fromkeys(("x@v5e", "y@v5e", "x@v6e"), copied) | {
        f"{n}@v5p": values for n in "abcd"
    }
    assert taken({"a": parts | {"y@v6e": values}}).startswith("on v5e, x@v6e: 2026-11-27, tran")


def test_storage_has_the_share_of_a_save_that_blocks():
    row = {"name": "Orbax", "save": 2.0, "blocked": 0.01, "restore": 1.5, "stored_bytes": 9.24e8}
    assert "| Orbax | 2.00 | 0.0100 | 0.50% | 1.50 | 0.924 |" in storage({"local": {"rows": [row]}})


def test_a_folder_without_pages_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmark_tables", str(tmp_path)])
    with pytest.raises(SystemExit, match="^2$"):
        benchmark_tables.main()
    assert "has no pages; legal: a folder with .md files" in capsys.readouterr().err
