"""Every command in the documents is one that the recipes take.

The documents are read in the source tree itself: under Bazel, this file is a link to there.
"""

import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

from sharding import AXES
from tests import cli

SOURCES = Path(__file__).resolve().parents[2]
DOCUMENTS = (
    "README.md",
    "docs/mup.md",
    *sorted(f"docs/guides/{f.name}" for f in (SOURCES / "docs/guides").glob("*.md")),
)
COMMAND = re.compile(
    r"""python -m recipes\.(\w+)((?:\s+--\w+(?:=(?:"[^"]*"|'[^']*'|[^\s"'`]*))?)*)"""
)
FLAG = re.compile(r"""--\w+(?:=(?:"[^"]*"|'[^']*'|[^\s"'`]*))?""")

# Takes a list of lists of flags, and answers for each what is wrong with it, or null.
CHECK = """
import importlib, json
from absl import flags
from recipes import common
from rmt_tpu.errors import RmtError

recipe, every = sys.argv[1:]
importlib.import_module("recipes." + recipe)

def wrong(given):
    for name in flags.FLAGS:
        flags.FLAGS[name].unparse()
    try:
        rest = flags.FLAGS([recipe, *given])[1:]
        if rest:
            return f"{rest} are no flags"
        if recipe == "train":
            common.run_config(common.base_config(flags.FLAGS.preset or "rmt-tiny", None))
    except (flags.Error, RmtError) as error:
        return str(error)

print(json.dumps([wrong(given) for given in json.loads(every)]))
sys.exit()
"""


def commands(text: str) -> list[tuple[str, list[str]]]:
    """The recipe and the flags of each command in a document, as a shell would pass them."""
    joined = re.sub(r"\\\n\s*", " ", text)
    found = []
    for recipe, rest in COMMAND.findall(joined):
        given = [re.sub(r"""^(--\w+=)["'](.*)["']$""", r"\1\2", f) for f in FLAG.findall(rest)]
        found.append((recipe, given))
    return found


def problems(recipe: str, given: list[list[str]]) -> list[str | None]:
    process = cli.start(recipe, recipe, json.dumps(given), first=CHECK)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return json.loads(output)


@pytest.fixture(scope="module")
def documented() -> dict[str, list[list[str]]]:
    """By recipe, the flags of each of its commands."""
    by_recipe = defaultdict(list)
    for document in DOCUMENTS:
        for recipe, given in commands((SOURCES / document).read_text(encoding="utf-8")):
            if given:  # else it is only mentioned
                by_recipe[recipe].append(given)
    return by_recipe


def test_the_commands_are_found(documented):
    assert {"train", "generate", "compare"} <= documented.keys()
    flags = {flag.partition("=")[0] for given in documented["train"] for flag in given}
    assert {"--distributed", "--coordinator", "--num_processes", "--process_id"} <= flags
    launches = (SOURCES / "docs/guides/pods.md").read_text(encoding="utf-8")
    assert sum(bool(given) for _, given in commands(launches)) >= 7


def test_the_flags_exist_and_their_values_parse(documented):
    for recipe, given in documented.items():
        # A tokenizer is files that the reader has, and a bucket is theirs too.
        readers = ("--tokenizer=", "--data=gs://")
        given = [[f for f in flags if not f.startswith(readers)] for flags in given]
        assert problems(recipe, given) == [None] * len(given)


def test_the_axes_of_meshes_exist(documented):
    meshes = [
        flag.removeprefix("--mesh=")
        for every in documented.values()
        for given in every
        for flag in given
        if flag.startswith("--mesh=")
    ]
    assert meshes
    for mesh in meshes:
        sizes = dict(part.split("=") for part in mesh.split(","))
        assert sizes.keys() <= set(AXES)
        assert all(int(size) > 0 or int(size) == -1 for size in sizes.values())


def test_wrong_commands_would_be_noticed():
    text = "run `python -m recipes.train --steps=5 \\\n  --prompt='a b' --set=model.x=1` now --no"
    assert commands(text) == [("train", ["--steps=5", "--prompt=a b", "--set=model.x=1"])]
    given = [
        ["--steps=5", "--num_processes=2"],
        ["--step=5"],
        ["--steps=five"],
        ["--preset=rmt-1"],
        ["--set=model.no=1"],
        ["--steps=6"],
    ]
    found = problems("train", given)
    assert [problem is not None for problem in found] == [False, True, True, True, True, False]
