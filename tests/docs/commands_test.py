"""The commands of README.md and the guides run as they stand, on a fresh clone.

A block of commands that needs a cloud, an accelerator, a download or hours says so in the paragraph
before it, by a bold **need**. All other blocks of a page are run one after the other in one folder.
`launch_test.py` parses the flags of every command, also of those that are not run.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

import pytest

import recipes
from tests import cli

# The source tree itself: under Bazel, this file is a link to there.
ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", *sorted(f"docs/guides/{p.name}" for p in (ROOT / "docs/guides").glob("*.md")))
BLOCK = re.compile(r"^( *)```bash\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
NEED = re.compile(r"\*\*needs?\*\*")
# Shell commands that a block that is run may have, in addition to recipes.
SHELL = {".", "cat", "cp", "curl", "echo", "export", "make", "mkdir", "unset", "wait"}
# What a fresh clone on a machine without accelerators does not have, in a recipe's command.
ELSEWHERE = re.compile(r"gs://|/share/|gpt2-bpe|--distributed|--device\b|--preset=[\w.-]+-\d+m\b")
SERVED = "http://127.0.0.1:8000/healthz"
TIMEOUT = 1800


class Block(NamedTuple):
    """A block of commands, and whether the paragraph before it says that it needs something."""

    text: str
    needs: bool

    @property
    def lines(self) -> list[str]:
        """The commands, without comments."""
        joined = re.sub(r"\\\n\s*", " ", self.text)
        return [line for line in joined.splitlines() if line and not line.startswith("#")]


def blocks(text: str) -> list[Block]:
    """Return the blocks of commands in Markdown, in order."""
    found = []
    for match in BLOCK.finditer(text):
        before = text[: match.start()].rstrip().rsplit("\n\n", 1)[-1]
        code = "".join(line.removeprefix(match[1]) for line in match[2].splitlines(True))
        found.append(Block(code, bool(NEED.search(before))))
    return found


def run_blocks(page: str) -> list[Block]:
    return [b for b in blocks((ROOT / page).read_text(encoding="utf-8")) if not b.needs]


def program(line: str) -> str:
    """Return the program that a command starts, or "recipes.<name>"."""
    words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
    return words[2] if words[:2] == ["python", "-m"] else words[0]


RUN = [page for page in PAGES if run_blocks(page)]


@pytest.mark.parametrize("page", RUN)
def test_what_is_run_is_on_every_machine(page):
    """A command that needs something else is in a block whose paragraph says so."""
    known = SHELL | {f"recipes.{path.stem}" for path in Path(recipes.__file__).parent.glob("*.py")}
    for block in run_blocks(page):
        for line in block.lines:
            assert program(line) in known, line
            reported = "--topology=" in line or "recipes.autotune" in line
            assert reported or not ELSEWHERE.search(line), line


def test_most_guides_have_commands_that_are_run():
    named = {Path(page).stem for page in RUN}
    assert named >= {"README", "train", "data", "checkpoints", "evaluate", "serve", "tune"}
    text = "It **needs** hours:\n\n```bash\na\n```\n\nNow\n\n"
    text += "```bash\n# b\nX=1 python -m recipes.c\n```\n"
    assert [(b.lines, b.needs) for b in blocks(text)] == [
        (["a"], True),
        (["X=1 python -m recipes.c"], False),
    ]
    assert program("X=1 python -m recipes.c --d") == "recipes.c"


def clone(folder: Path) -> dict[str, str]:
    """Make a folder like a fresh clone, and return the environment of commands in it.

    `python` is this interpreter, as after `. .venv/bin/activate`, and `make train` is the command
    that the Makefile has: what it installs is installed.
    """
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name not in ("build", "runs"):
            (folder / path.name).symlink_to(path)
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").touch()
    for name in ("installed", "installed-test"):
        (folder / ".venv" / name).touch()
    for python in (folder / ".venv/bin/python", folder / "bin/python"):
        python.parent.mkdir(exist_ok=True)
        python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        python.chmod(0o755)
    variables = cli.environment() | {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    # `JAX_PERSISTENT...`: as in `cli.run_line`.
    keep_none = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9"}
    return variables | keep_none | {"PYTHONPATH": str(ROOT)}


def wait_for_server(process: subprocess.Popen) -> None:
    for _ in range(TIMEOUT):
        assert process.poll() is None
        try:
            with urllib.request.urlopen(SERVED, timeout=1):
                return
        except OSError:
            time.sleep(1)
    raise TimeoutError(SERVED)


@pytest.mark.slow
@pytest.mark.xdist_group("commands")
@pytest.mark.parametrize("page", RUN)
def test_commands_run(page, tmp_path):
    """A server runs until the next one or the end of the page; `make test` is what runs this."""
    options = {"cwd": tmp_path, "env": clone(tmp_path), "stdin": subprocess.DEVNULL}
    server = None

    def run(text):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            **options,
            capture_output=True,
            encoding="utf-8",
            timeout=TIMEOUT,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        assert "curl" not in text or '"error"' not in done.stdout, done.stdout

    def stop():
        if server is not None:
            server.send_signal(signal.SIGTERM)
            assert server.wait(TIMEOUT) == 0

    try:
        for block in run_blocks(page):
            text = re.sub(r"^make test\b.*\n", "", block.text, flags=re.MULTILINE)
            served = next((line for line in block.lines if "recipes.serve" in line), None)
            if served is None:
                run(text)
                continue
            before, after = "\n".join(block.lines).split(served)
            run(before)
            stop()
            server = subprocess.Popen(["bash", "-c", f"exec {served}"], **options)
            wait_for_server(server)
            run(after)
    finally:
        stop()
