"""A test that no test replaces a private name of the product.

What a test replaces is a promise of the module that has it, so its name has no underscore.
"""

import re
from pathlib import Path

import pytest

# Names of other libraries, which have no public name for the same thing.
OTHERS = {"os._exit", "signals.os._exit", "request._data"}
PATCHES = (
    re.compile(r"""setattr\(\s*([\w.]+),\s*["'](_[a-zA-Z]\w*)["']"""),
    re.compile(r"""setattr\(\s*["']([\w.]+)\.(_[a-zA-Z]\w*)["']"""),
    re.compile(r"""(?:^|[;"'])\s*((?!self\b|cls\b)\w[\w.]*)\.(_[a-zA-Z]\w*) = """, re.MULTILINE),
)


def private_patches(text: str) -> set[str]:
    """Return the private names that a test's source replaces, also within texts of programs."""
    found = (".".join(match.groups()) for patch in PATCHES for match in patch.finditer(text))
    return set(found) - OTHERS


def test_no_private_name_is_replaced():
    found = {}
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        if path != Path(__file__) and (names := private_patches(path.read_text(encoding="utf-8"))):
            found[path.name] = names
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        'monkeypatch.setattr(loop, "_step", step)',
        'patch.setattr(\n    loop.Loop, "_step", step)',
        'monkeypatch.setattr("rmt_tpu.loop._STEPS", 3)',
        "    Loop._step = step",
        '"import rmt_tpu.runs.workdir as w; w._SECONDS = 0.1; "',
    ],
)
def test_each_form_is_found(line):
    assert len(private_patches(line)) == 1


@pytest.mark.parametrize(
    "line", ['setattr(os, "_exit", leave)', 'setattr(loop, "step", 1)', "self._step = 1"]
)
def test_other_forms_are_allowed(line):
    assert not private_patches(line)
