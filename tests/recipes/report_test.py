"""recipes.report: figures of the papers from formulas."""

from tests import cli


def test_resource_scaling(tmp_path):
    folder = tmp_path / "new" / "reports"
    done = cli.succeed("report", "--figure=resource_scaling", f"--output={folder}")
    picture = folder / "resource_scaling.png"
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    table = (folder / "resource_scaling.md").read_text()
    assert table in done.stdout and str(picture) in done.stdout
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert rows[0] == ["model", "residual", "parameters", "GFLOPs a token"]
    assert {row[0] for row in rows[2:]} == {"Transformer", "RMT"}
    # A larger residual costs a Transformer most of its parameters again, and an RMT next to none.
    growth = {}
    for model in ("Transformer", "RMT"):
        sizes = [float(row[2].removesuffix("M")) for row in rows if row[0] == model]
        growth[model] = sizes[-1] / sizes[0]
    assert growth["Transformer"] > 3 and growth["RMT"] < 1.1
