"""The documents: links lead somewhere; the navigation has every page, the reference every module.

They are read in the source tree itself: under Bazel, this file is a link to there. `make docs`
builds the site, where a warning is an error.
"""

import re
from pathlib import Path

import pytest

from tests.rmt_tpu.example import FILES

ROOT = Path(__file__).resolve().parents[1]
FRONT = ("README.md", "CONTRIBUTING.md")  # pages of the site by docs/hooks.py
FENCE = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`]*`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


def pages(root: Path) -> list[Path]:
    return [
        *(root / name for name in (*FRONT, "recipes/README.md")),
        *sorted((root / "docs").rglob("*.md")),
    ]


def links(text: str) -> list[str]:
    """Targets of the links in Markdown, without those to other hosts."""
    prose = CODE.sub("``", FENCE.sub("", text))
    return [target for target in LINK.findall(prose) if "://" not in target]


def anchors(text: str) -> set[str]:
    """Of the headings, those that GitHub and the site give alike."""
    found = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        kept = re.sub(r"[^\w\s-]", "", plain).strip().lower()
        if (anchor := kept.replace(" ", "-")) == re.sub(r"[-\s]+", "-", kept):
            found.add(anchor)
    return found


def broken(root: Path) -> list[str]:
    """`page: link` of each relative link or anchor that leads nowhere."""
    found = []
    for page in pages(root):
        for link in links(page.read_text(encoding="utf-8")):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            there = target.exists() and target.is_relative_to(root)
            if there and anchor:
                there = anchor in anchors(target.read_text(encoding="utf-8"))
            if not there:
                found.append(f"{page.relative_to(root)}: {link}")
    return found


def navigation(text: str) -> list[str]:
    """The pages that mkdocs.yml names, in order."""
    return re.findall(r"^ +- (?:.*: )?(\S+\.md)$", text.partition("\nnav:\n")[2], re.MULTILINE)


def test_every_link_leads_somewhere():
    assert broken(ROOT) == []


def test_links_that_lead_nowhere_are_found(tmp_path):
    for folder in ("docs", "recipes", "rmt_tpu"):
        (tmp_path / folder).mkdir()
    (tmp_path / "rmt_tpu/decoder.py").touch()
    (tmp_path / "docs/a.md").write_text(
        "# The *page*, `a`\n[x](b.md) [x](../rmt_tpu/decoder.py) [x](../rmt_tpu/no.py)\n"
        "```\n# In code\n[x](in_code.md)\n```\n`[x](quoted.md)` [x](#the-page-a) [x](#in-code)\n"
        "[two\nlines](c.md#two) [there](https://example.com/no.md) ![x](no.png) [x](../../a.md)\n"
    )
    (tmp_path / "docs/c.md").write_text("## One - two\n")
    (tmp_path / "README.md").write_text("[x](docs/a.md#the-page-a) [x](docs/c.md#one---two)")
    for name in ("CONTRIBUTING.md", "recipes/README.md"):
        (tmp_path / name).touch()
    assert broken(tmp_path) == [
        "README.md: docs/c.md#one---two",
        "docs/a.md: b.md",
        "docs/a.md: ../rmt_tpu/no.py",
        "docs/a.md: #in-code",
        "docs/a.md: c.md#two",
        "docs/a.md: no.png",
        "docs/a.md: ../../a.md",
    ]


def test_every_page_is_in_the_navigation():
    named = navigation((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    there = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(named) == sorted([*there, "index.md", "contributing.md"])


@pytest.mark.parametrize("package", ["rmt_tpu", "pallas_kernels", "sharding"])
def test_every_module_is_in_the_reference(package):
    """By its own name, or that of a package around it."""
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs/api").glob("*.md"))
    named = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    alone = set(
        re.findall(r"^::: (\S+)\n +options:\n +show_submodules: false$", text, re.MULTILINE)
    )
    for file in (ROOT / package).rglob("*.py"):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        around = {module.rsplit(".", n)[0] for n in range(1, module.count(".") + 1)} - alone
        assert module in named or around & named, module


def blocks(text: str) -> list[str]:
    """Of Python, in Markdown."""
    return re.findall(r"^```python\n(.*?)\n```$", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("guide", ["add_system", "add_core", "add_kernel"])
def test_what_is_added_in_a_guide_is_code_that_is_tested(guide):
    """By `example_test.py`, which adds a mixer and a core, or because it is a kernel's own."""
    changes = [[change] if isinstance(change, str) else change for change in FILES.values()]
    tested = [change if isinstance(change, str) else change[1] for c in changes for change in c]
    kernels = (ROOT / "pallas_kernels/grouped_matmul").glob("*.py")
    tested += [file.read_text(encoding="utf-8") for file in kernels]
    found = blocks((ROOT / f"docs/guides/{guide}.md").read_text(encoding="utf-8"))
    assert len(found) == 3
    assert [block for block in found if not any(block in text for text in tested)] == []
