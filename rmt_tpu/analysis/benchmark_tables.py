"""The program that writes the tables of docs/benchmarks from the JSON output of recipes.

    python -m rmt_tpu.analysis.benchmark_tables docs/benchmarks
    python -m rmt_tpu.analysis.benchmark_tables docs/benchmarks --take key_vector.v5e

The first command writes every table from the files in docs/benchmarks/data. A table goes between
the comments `<!-- table: NAME -->` and `<!-- end -->` of a page. If the files of a table are
missing, the command prints how to make them. It also draws `step_cost.png` again if a number in
that picture has changed. The second command first runs a recipe, which can take
an hour. It stores the recipe's JSON in docs/benchmarks/data, with the command, the date, the commit
and the versions.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rmt_tpu.analysis import benchmark_layouts as layouts
from rmt_tpu.analysis import step_report
from rmt_tpu.estimator import versions
from rmt_tpu.runs.environment import describe

_REGION = re.compile(r"(<!-- table: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_VERSIONS = ("jax", "libtpu", "python")
# A region with this prefix in its name states when the figures of a page were made, and with which
# versions.
_TAKEN = "taken "
_CHIPS = ("v5e", "v5p", "v6e")


class Source(NamedTuple):
    """A recipe whose report has the figures for some tables.

    Each part of the report is one JSON file.

    Attributes:
      command: the command that reports all parts, in the form shown on pages.
      parts: the names of the parts. The file of a part is `<source>.<part>.json`.
      taking: the command that writes the JSON of one part; `{part}` is the part's name, and
        `{folder}` is the folder for the files.
      output: the name of the JSON file in `{folder}`; "" if the command prints the JSON.
      flags: the flags that replace `{flags}` in `taking`. The keys of this dict are the texts
        before "@" in the names of parts.
      kept: the names of the JSON values to store; () stores all.
    """

    command: str
    parts: tuple[str, ...]
    taking: str
    output: str
    flags: Mapping[str, str] = {}
    kept: tuple[str, ...] = ()


class Table(NamedTuple):
    """A table on a page of docs/benchmarks.

    Attributes:
      sources: the names of the sources that the table needs.
      layout: a function that returns the table as Markdown. It has one argument per source: a dict
        from the name of each part to its JSON values.
    """

    sources: tuple[str, ...]
    layout: Callable[..., str]


def _ops(op: str) -> Source:
    command = f"python -m recipes.kernel_report --op={op} --targets="
    taking = command + "{part} --output={folder}"
    return Source(f"{command}{','.join(_CHIPS)}", _CHIPS, taking, "kernel_report.json")


def _steps(batch: int) -> Source:
    chips = (*_CHIPS, "tpu7x")
    command = "python -m recipes.kernel_report --step --presets="
    size = f" --batch_size={batch}"
    shown = f"{command}rmt-305m,gpt2-405m --targets={','.join(chips)} \\\n {size}"
    parts = tuple(f"{preset}@{chip}" for chip in chips for preset in ("rmt-305m", "gpt2-405m"))
    taking = f"{command}{{preset}} --targets={{chip}}{size} --output={{folder}}"
    return Source(shown, parts, taking, "step_cost.json")


# The flags that select each kind of residual. They apply to a model whose preset has the standard
# residual (a plain sum).
# A block has six sublayers, as many as there are in eight blocks of gpt2-405m.
_BLOCKS = "--set=model.mixer.sublayers_per_block=6"
_RESIDUALS = {
    "plain": "",
    "attnres": f"--set=model.mixer=block_attention {_BLOCKS}",
    "delta": f"--set=model.mixer=delta_attention {_BLOCKS}",
    "scalars": "--set=model.mixer=residual_scalars",
    "wide": "--set=model.mixer=wide_streams",
    "mudd": "--set=model.mixer=mudd",
}
# Mixers of several streams in plain JAX.
_STREAMS = {
    "hc": "--set=model.mixer=hyper_connections",
    "mhc": "--set=model.mixer=mhc",
    "mhc-lite": "--set=model.mixer=mhc_lite",
}


def _residuals(preset: str, chips: tuple[str, ...], flags: dict[str, str]) -> Source:
    command = f"python -m recipes.kernel_report --step --presets={preset} --targets="
    parts = tuple(f"{residual}@{chip}" for residual in flags for chip in chips)
    taking = f"{command}{{chip}} {{flags}} --output={{folder}}"
    shown = f"{command}{','.join(chips)} FLAGS"
    return Source(shown, parts, taking, "step_cost.json", flags)


# The programs of the table for GPUs, with the flags that select each: train steps of 16 sequences,
# and decode steps of 32 rows.
_GPUS = "a100", "h100", "b200"
_GPU_PRESETS = "gpt2-405m", "llama-374m", "rmt-305m", "attnres-528m", "rmt-attnres-305m"
_GPU_KERNELS = {"triton": "pallas", "mosaic_gpu": "mosaic_gpu"}
_STEP, _ROWS = "--batch_size=16 --seq_len=512", "--prompt=512 --decode=32"
_GPU_PROGRAMS = {preset: f"--preset={preset} {_STEP}" for preset in _GPU_PRESETS}
_GPU_PROGRAMS |= {
    f"{preset}-{name}": f"--preset={preset} {_STEP} --set=model.kernels={kernels}"
    for preset in _GPU_PRESETS[2:]
    for name, kernels in _GPU_KERNELS.items()
}
_GPU_PROGRAMS |= {f"{preset}-decode": f"--preset={preset} {_ROWS}" for preset in _GPU_PRESETS[:4]}


def _gpu_programs() -> Source:
    command = "python -m recipes.preflight"
    parts = (f"{name}@{gpu}" for name in _GPU_PROGRAMS for gpu in _GPUS)
    # The Mosaic GPU kernels are not written for A100.
    parts = tuple(part for part in parts if not part.endswith("mosaic_gpu@a100"))
    shown = (
        f"{command} --preset=PRESET --topology=h100:1 {_STEP} \\\n  --set=model.kernels=KERNELS\n"
        f"{command} --preset=PRESET --topology=h100:1 {_ROWS}"
    )
    taking = f"{command} {{flags}} --topology={{chip}}:1 --json=-"
    kept = "attention", "fits", "used_bytes", "memory_bytes", "launches"
    return Source(shown, parts, taking, "", _GPU_PROGRAMS, kept)


def _peers(parts: tuple[str, ...], layout: str = "", compiles: int = 3) -> Source:
    """Return rows of the comparison with MaxText, on one chip or on a slice of this layout.

    Each side tries up to `compiles` choices.
    """
    command = "python -m recipes.peer_report"
    chips = dict.fromkeys(part.split("@")[1] + layout for part in parts)
    # The part of a name before "@" is the preset and the number of tokens per sequence.
    rows = [part.split("@")[0].rsplit("-", 1) for part in parts]
    flags = {"-".join(row): "--presets={} --seq_lens={}".format(*row) for row in rows}
    presets, lengths = (",".join(dict.fromkeys(values)) for values in zip(*rows, strict=True))
    of_rows = f"--presets={presets} --seq_lens={lengths}"
    tried = f"--compiles={compiles}"
    shown = f"{command} {of_rows} \\\n  --topologies={','.join(chips)} {tried}"
    taking = f"{command} {{flags}} --topologies={{chip}}{layout} {tried} --workdir={{folder}}"
    return Source(shown, parts, taking, "peers.json", flags)


def _decode(targets: tuple[str, ...], flags: str) -> Source:
    command = "python -m recipes.decode_report --target="
    shown = f"{command}{','.join(targets)} \\\n  {flags}"
    return Source(shown, targets, f"{command}{{part}} {flags} --json", "")


def _compare(flags: str) -> Source:
    command = "python -m recipes.compare"
    shown = f"{command} --workdir=runs/compare {flags}"
    return Source(shown, ("cpu",), f"{command} --workdir={{folder}} {flags}", "comparison.json")


_SHORT_RUNS = (
    "--seeds=0,1,2 --steps=100 \\\n  --batch_size=8 --seq_len=128 --eval_every=50 \\\n"
    "  --learning_rate=0.01 --set=train.optimizer.warmup_fraction=0.1 --presets="
)
SOURCES = {
    "key_vector": _ops("key_vector"),
    "attention": _ops("attention"),
    "step_16": _steps(16),
    "step_32": _steps(32),
    "residuals_405m": _residuals("gpt2-405m", ("v5e", "v6e"), _RESIDUALS),
    "residuals_160m": _residuals("gpt2-160m", ("v5e",), _RESIDUALS | _STREAMS),
    "peers": _peers(("llama-374m-2048@v5e", "llama-374m-2048@v5p")),
    "peers_v6e": _peers(("llama-374m-2048@v6e",), compiles=1),
    "peers_long": _peers(("llama-374m-8192@v5e", "llama-374m-8192@v5p")),
    "peers_large": _peers(("llama-1.2b-2048@v5p", "llama-1.2b-8192@v5p")),
    "peers_slice": _peers(("llama-374m-2048@v5e",), ":2x2"),
    "decode": _decode(
        _CHIPS,
        "--batch=1,32,256 \\\n  --presets=gpt2-405m,rmt-305m,rmt-attnres-305m,llama-374m,"
        "prenorm-528m,attnres-528m",
    ),
    "decode_long": _decode(
        _CHIPS[:2],
        "--batch=1,32 --context=8192 \\\n  --presets=gpt2-405m,rmt-305m,llama-374m,prenorm-528m,"
        "attnres-528m \\\n  --set=gpt2-405m:model.attention.positions.max_length=8192 \\\n  "
        "--set=rmt-305m:model.attention.positions.max_length=8192",
    ),
    "decode_host": _decode(
        ("host",), "--presets=gpt2-tiny,rmt-tiny --batch=1,32,128 --context=128"
    ),
    "compare": _compare("--presets=gpt2-tiny,rmt-tiny"),
    "systems": _compare(
        f"{_SHORT_RUNS}gpt2-tiny,highway-tiny,\\\n"
        "depth-lstm-tiny,hierarchical-tiny,denseformer-tiny,hc-tiny,mhc-tiny,mhc-lite-tiny,\\\n"
        "attnres-full-tiny,attnres-tiny,rmt-tiny,rmt-denseformer-tiny,rmt-attnres-tiny"
    ),
    "recent_systems": _compare(
        f"{_SHORT_RUNS}gpt2-tiny,mean-tiny,\\\ndelta-tiny,scalars-tiny,wide-tiny,mudd-tiny"
    ),
    "moments": Source(
        "python -m recipes.compare --presets=gpt2-tiny,rmt-tiny --seeds=0,1,2 \\\n"
        "  --learning_rate=0.01 --set=train.optimizer.warmup_fraction=0.05 \\\n"
        "  --workdir=runs/float32\n"
        "python -m recipes.compare --presets=gpt2-tiny,rmt-tiny --seeds=0,1,2 \\\n"
        "  --learning_rate=0.01 --set=train.optimizer.warmup_fraction=0.05 \\\n"
        "  --set=train.optimizer.moment_dtype=bfloat16 --workdir=runs/bfloat16",
        ("float32", "bfloat16"),
        "python -m recipes.compare --presets=gpt2-tiny,rmt-tiny --seeds=0,1,2 --workdir={folder} "
        "--learning_rate=0.01 --set=train.optimizer.warmup_fraction=0.05 "
        "--set=train.optimizer.moment_dtype={part}",
        "comparison.json",
    ),
    "storage": Source(
        "python -m recipes.storage_report --folder=/tmp/scratch --gigabytes=1 --rounds=5",
        ("local",),
        "python -m recipes.storage_report --folder={folder} --output={folder} --gigabytes=1 "
        "--rounds=5",
        "storage_report.json",
    ),
    "gpu_steps": Source(
        "python -m recipes.kernel_report --step --presets=PRESET --set=model.kernels=KERNELS",
        ("h100",),
        "python -m recipes.kernel_report --step --presets=gpt2-405m,rmt-305m,llama-374m,"
        "prenorm-528m,attnres-528m,rmt-attnres-305m --output={folder}",
        "step_times.json",
    ),
    "gpu_programs": _gpu_programs(),
    "gpu_traffic": Source(
        "python -m rmt_tpu.analysis.gpu_traffic h100\npython -m rmt_tpu.analysis.gpu_traffic b200",
        ("h100", "b200"),
        "python -m rmt_tpu.analysis.gpu_traffic {part}",
        "",
    ),
    "gpu_ops": Source(
        "python -m recipes.check_device --op=key_vector,depth_attention --implementation=pallas\n"
        "python -m recipes.check_device --op=key_vector,depth_attention --implementation=xla",
        ("kernels", "plain"),
        "python -m recipes.check_device --op=key_vector,depth_attention --implementation={part} "
        "--output={folder}/device.json",
        "device.json",
    ),
    "counts": Source(
        "python -m recipes.experiment rmt-counts",
        ("paper",),
        "python -m recipes.experiment rmt-counts --workdir={folder}",
        "tiny/rmt-counts/results.json",
    ),
}
TABLES = {
    "ops": Table(("key_vector", "attention"), layouts.ops),
    "steps": Table(("step_16", "step_32"), layouts.steps),
    "step_parts": Table(("step_16",), layouts.step_parts),
    "residuals": Table(("residuals_405m", "residuals_160m"), layouts.residuals),
    "peers": Table(
        ("peers", "peers_v6e", "peers_long", "peers_large", "peers_slice"), layouts.peer_steps
    ),
    "decode": Table(("decode", "decode_long"), layouts.decode),
    "decode_host": Table(("decode_host",), layouts.decode_host),
    "gpu_steps": Table(("gpu_steps",), layouts.measured_steps),
    "gpu_programs": Table(("gpu_programs",), layouts.gpu_programs),
    "gpu_traffic": Table(("gpu_traffic",), layouts.gpu_traffic),
    "gpu_ops": Table(("gpu_ops",), layouts.measured_ops),
    "counts": Table(("counts",), layouts.counts),
    "compare": Table(("compare",), layouts.comparison),
    "systems": Table(("systems",), layouts.comparison),
    "recent_systems": Table(("recent_systems",), layouts.comparison),
    "moments": Table(("moments",), layouts.moments),
    "storage": Table(("storage",), layouts.storage),
    "calibration_agreement": Table((), layouts.calibration_agreement),
    "calibration_calls": Table((), layouts.calibration_calls),
}


class Pages(NamedTuple):
    """The Markdown pages in a folder; the JSON files are in the folder's subfolder `data`.

    Attributes:
      folder: the folder.
    """

    folder: Path

    def file(self, source: str, part: str) -> Path:
        """Return the path of the JSON file with one part of a source's report."""
        return self.folder / "data" / f"{source}.{part}.json"

    def stored(self, source: str) -> dict[str, dict[str, Any]] | None:
        """Return the JSON values of each part of a source, or None if a file is missing."""
        files = {part: self.file(source, part) for part in SOURCES[source].parts}
        if not all(file.exists() for file in files.values()):
            return None
        return {part: json.loads(file.read_text(encoding="utf-8")) for part, file in files.items()}

    def region(self, name: str) -> str | None:
        """Return the Markdown of the region `name`, or None if a JSON file is missing.

        Raises:
          ValueError: there is no table or source of this name.
        """
        wanted = name.removeprefix(_TAKEN).split(" ") if name.startswith(_TAKEN) else []
        if not (wanted or name in TABLES) or not set(wanted) <= SOURCES.keys():
            raise ValueError(f"<!-- table: {name} --> is unknown; legal: {', '.join(TABLES)}")
        found = [self.stored(source) for source in wanted or TABLES[name].sources]
        if None in found:
            return None
        if wanted:
            commands = "\n".join(SOURCES[source].command for source in wanted)
            return f"```bash\n{commands}\n```\n\n{taken(dict(zip(wanted, found, strict=True)))}\n"
        reports = ({part: s["report"] for part, s in stored.items()} for stored in found)
        return TABLES[name].layout(*reports)

    def write(self) -> list[str]:
        """Write all regions of all pages, and return the names of regions whose JSON is missing."""
        missing = []

        def written(match: re.Match) -> str:
            text = self.region(match[2])
            if text is None:
                missing.append(match[2])
                return match[0]
            return f"{match[1]}\n{text}\n{match[3]}"

        for page in sorted(self.folder.glob("*.md")):
            before = page.read_text(encoding="utf-8")
            if (after := _REGION.sub(written, before)) != before:
                page.write_text(after, encoding="utf-8")
        self.draw()
        return missing

    def draw(self) -> None:
        """Draw `step_cost.png`, the parts of a step of 16 x 512 tokens, unless it is up to date."""
        if (stored := self.stored("step_16")) is None:
            return
        steps = [values["report"]["steps"][0] for values in stored.values()]
        used = next(iter(stored.values()))["versions"]
        note = (
            "Estimated, not measured. 16 x 512 tokens, bfloat16. "
            f"jax {used['jax']}, libtpu {used['libtpu']}"
        )
        picture = self.folder / "step_cost.png"
        if not step_report.shows_steps(steps, picture, note):
            step_report.draw_steps(steps, picture, note)

    def take(self, source: str, part: str, environment: Mapping[str, Any]) -> None:
        """Run a source's recipe for one part of its report, and store the JSON output.

        Args:
          source: the name of the source.
          part: the name of the part.
          environment: the result of `describe`: the time, the commit and the versions.

        Raises:
          subprocess.CalledProcessError: the recipe failed.
        """
        of = SOURCES[source]
        preset, _, chip = part.partition("@")
        with tempfile.TemporaryDirectory() as folder:
            names = {"part": part, "preset": preset, "chip": chip}
            taking = of.taking.replace("{flags}", of.flags.get(preset, ""))
            parsed = shlex.split(taking.replace("\\\n", ""))
            words = [word.format(**names, folder=folder) for word in parsed]
            command = [sys.executable, *words[1:]]
            done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE)
            text = (Path(folder) / of.output).read_text() if of.output else done.stdout
        report = json.loads(text)
        shown = [word.format(**names) for word in parsed if "{folder}" not in word]
        values = {
            "command": shlex.join(shown),
            "date": environment["time"][:10],
            "commit": environment["git_commit"],
            "versions": environment["versions"] | versions(),
            "report": {key: report[key] for key in of.kept} if of.kept else report,
        }
        self.file(source, part).parent.mkdir(exist_ok=True)
        self.file(source, part).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def taken(sources: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a sentence with the dates and versions of all parts of some sources."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for source, stored in sources.items():
        for part, values in stored.items():
            how = values["date"]
            if values["commit"]:
                how += f" ({', '.join(map(_short, values['commit'].split(', ')))})"
            if "transcribed" in values:
                how += f", transcribed from {values['transcribed']}"
            versions = values["versions"]
            used = (f"{name} {versions[name]}" for name in _VERSIONS if name in versions)
            groups.setdefault((how, ", ".join(used)), []).append((source, part))
    same = len({used for _, used in groups}) == 1
    *few, most = sorted(groups, key=lambda group: len(groups[group]))
    names = [", ".join(_names(groups[group], sources)) for group in few]
    names += ["all others"] if few else []
    parts = []
    for name, (how, used) in zip(names or [""], [*few, most], strict=True):
        parts.append((f"{name}: " if name else "") + (how if same else f"{how}, {used}"))
    return "; ".join(parts) + (f". {most[1]}." if same else ".")


def _names(group: list[tuple[str, str]], sources: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return short names of some parts: all parts of a source on a chip have one name."""
    names = []
    for source, stored in sources.items():
        prefix = f"{source} " if len(sources) > 1 else ""
        mine = [part for name, part in group if name == source]
        for chip in dict.fromkeys(map(_chip, mine)):
            found = [part for part in mine if _chip(part) == chip]
            if chip and 1 < len(found) == sum(_chip(part) == chip for part in stored):
                names.append(f"{prefix}on {chip}")
            else:
                names += [prefix + part for part in found]
    return names


def _chip(part: str) -> str:
    return part.partition("@")[2]


def _short(commit: str) -> str:
    return commit[:7] + ("-dirty" if commit.endswith("-dirty") else "")


def main() -> int:
    """Run the recipes that the flags name, write the pages, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the folder of the pages: docs/benchmarks")
    parts = [f"{name}.{part}" for name, source in SOURCES.items() for part in source.parts]
    parser.add_argument(
        "--take",
        nargs="+",
        default=[],
        choices=parts,
        metavar="SOURCE.PART",
        help=f"run these parts' recipes first, any of {', '.join(parts)}",
    )
    flags = parser.parse_args()
    if not any(flags.folder.glob("*.md")):
        parser.error(
            f"{flags.folder} has no pages; legal: a folder with .md files: docs/benchmarks"
        )
    pages = Pages(flags.folder)
    # Describe the checkout before the first file is written, because writing changes the checkout.
    environment = describe()
    for name in flags.take:
        pages.take(*name.split(".", 1), environment)
    for name in pages.write():
        sources = TABLES[name].sources if name in TABLES else name.split(" ")[1:]
        print(f"not written, because {pages.folder}/data lacks its files: {name}; to make them:")
        for source in sources:
            parts = (f"{source}.{part}" for part in SOURCES[source].parts)
            print(f"  python -m {__spec__.name} {pages.folder} --take {' '.join(parts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
