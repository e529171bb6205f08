"""Hooks of MkDocs: they add the front page, lead links to code, and check the search.

README.md is the first page and CONTRIBUTING.md another: neither is written twice. A link to a
module leads to the module's place in the reference, and a link to any other file becomes the file's
name.
"""

import json
import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
REFERENCE = ("pallas_kernels", "rmt_tpu", "sharding")
EXPORTED = "rmt_tpu/hub/torch/"  # code for exported folders, which the reference does not have
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
SEARCHED = ("store_norm_retrieve", "AttnRes", "D_k")  # the search must find these words
FENCE = re.compile(r"^(```.*?^```$)", re.DOTALL | re.MULTILINE)


def on_files(files, config):
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    source = {page: source for source, page in PAGES.items()}.get(page.file.src_uri)
    place = PurePosixPath(source or f"docs/{page.file.src_uri}")

    def led(match: re.Match) -> str:
        if "://" in match[3]:
            return match[0]
        target = os.path.normpath(place.parent / match[3])
        return _link(target, match, PurePosixPath(page.file.src_uri).parent)

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(led, part) for part in parts)


def on_post_build(config):
    """Fail the build if the search index lacks a word, or splits it."""
    index = json.loads(Path(config.site_dir, "search/search_index.json").read_text("utf-8"))
    text = " ".join(f"{page['title']} {page['text']}" for page in index["docs"])
    tokens = set(re.split(index["config"]["separator"], re.sub(r"<[^>]*>", " ", text)))
    if missing := [word for word in SEARCHED if word not in tokens]:
        raise PluginError(f"the search does not find {', '.join(missing)}")


def _link(target: str, match: re.Match, folder: PurePosixPath) -> str:
    """A link of a page in `folder` of docs/ to a file of the repository."""
    image, words, _, anchor = match.groups()
    inside = PAGES.get(target) or target.removeprefix("docs/")
    if inside != target:
        return f"{image}[{words}]({os.path.relpath(inside, folder)}{anchor or ''})"
    if target.split("/")[0] in REFERENCE and not target.startswith(EXPORTED):
        module = target.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return f"[{words}][{module}]"
    return f"`{target}`" if words.strip("`") in target else f"{words} (`{target}`)"
