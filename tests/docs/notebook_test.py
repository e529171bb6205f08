"""docs/quickstart.ipynb runs from a wheel, in an environment that has nothing but Jupyter's client.

The notebook is read in the source tree itself: under Bazel, this file is a link to there.
"""

import json
from pathlib import Path

import pytest

from rmt_tpu.runs.metrics import read_metrics, series
from tests import wheels

BOOK = Path(__file__).resolve().parents[2] / "docs/quickstart.ipynb"
# Runs each cell, and writes what it prints.
EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient

book = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(book, timeout=1500, kernel_name="python3").execute()
nbformat.write(book, sys.argv[2])
"""


def cells() -> list[dict]:
    return json.loads(BOOK.read_text(encoding="utf-8"))["cells"]


def test_the_notebook_has_its_parts_and_no_outputs():
    titles = [c["source"][0].strip("# \n") for c in cells() if c["cell_type"] == "markdown"]
    assert titles[1:] == [
        "Install",
        "Train",
        "Plot",
        "Sample",
        "Swap the residual",
        "Depth maps",
        "Go on",
    ]
    for cell in cells():
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)


@pytest.mark.slow
@pytest.mark.xdist_group("wheel")
def test_the_notebook_runs_from_a_wheel(tmp_path):
    wheel = wheels.build(tmp_path / "dist")
    commands = wheels.install(tmp_path / "venv", "nbclient", "ipykernel")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    variables = {"RMT_TPU_WHEEL": str(wheel), "JAX_PLATFORMS": "cpu"}
    done = tmp_path / "done.ipynb"
    wheels.succeed(commands / "python", "-c", EXECUTE, BOOK, done, cwd=folder, env=variables)

    _, losses = series(read_metrics(folder / "runs/plain"), "train/loss")
    assert losses[0] > 5 and losses[-1] < 3
    assert len(series(read_metrics(folder / "runs/swapped"), "train/loss")[1]) == 60
    outputs = [c.get("outputs", []) for c in json.loads(done.read_text())["cells"]]
    pictures = [o for out in outputs for o in out if "image/png" in o.get("data", {})]
    assert len(pictures) == 2
    printed = "".join("".join(o.get("text", [])) for out in outputs for o in out)
    assert "starts as the same function as runs/plain" in " ".join(printed.split())
    assert "\ndef main(" in f"\n{printed}"
