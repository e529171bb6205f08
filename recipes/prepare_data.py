"""Tokenise text into a token store, which recipes.train reads as --data.

    python -m recipes.prepare_data --input='a.jsonl.gz,books/*.txt' --tokenizer=gpt2-bpe/ \
        --output=stores/books
    python -m recipes.train --data=stores/books --workdir=runs/books

--output may be gs://bucket/path. The same command again goes on where it was interrupted. The
store has its own held-out part, and the tokenizer that it was made with. Should a store be damaged,
delete its manifest.json: the same command then does the damaged parts again.
"""

import signal
import sys
import time

from absl import flags
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from recipes import common

_INPUT = flags.DEFINE_string(
    "input", None, "stdlib, or comma-separated .txt and .jsonl files and globs, which may end in "
    ".gz or .zst", required=True,
)  # fmt: skip
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", "byte", "byte, a folder with encoder.json and vocab.bpe, or a tokenizer.json"
)
_OUTPUT = flags.DEFINE_string("output", None, "folder of the store, or gs://...", required=True)
_EVAL_FRACTION = flags.DEFINE_float("eval_fraction", 0.02, "share of the documents to hold out")
_SEED = flags.DEFINE_integer("seed", 0, "of which documents are held out")
_WORKERS = flags.DEFINE_integer("workers", None, "processes; default one for each CPU")

_LINE_SECONDS = 5.0


class _Progress:
    """A bar on a terminal, elsewhere a line now and then."""

    def __init__(self):
        self._last_line = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("[bold]tokenising"),
                BarColumn(),
                DownloadColumn(),
                TimeRemainingColumn(),
                TextColumn("left"),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("tokenising", total=None)

    def __enter__(self) -> "_Progress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, done: int, total: int) -> None:
        """Show that `done` bytes of `total` are in the store."""
        now = time.monotonic()
        if self._bar:
            self._bar.update(self._task, completed=done, total=total)
        elif now - self._last_line >= _LINE_SECONDS:
            self._last_line = now
            print(
                f"tokenised {done / 1e6:,.1f} of {total / 1e6:,.1f} MB ({done / total:.0%})",
                file=sys.stderr,
                flush=True,
            )


def main() -> int:
    from rmt_tpu.data.prepare import prepare

    # So that it too leaves neither processes nor semaphores.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.monotonic()
    with _Progress() as progress:
        totals = prepare(
            _INPUT.value,
            _TOKENIZER.value,
            _OUTPUT.value,
            eval_fraction=_EVAL_FRACTION.value,
            seed=_SEED.value,
            workers=_WORKERS.value,
            progress=progress.update,
        )
    for name, split in {"train": totals.train, "held out": totals.held_out}.items():
        print(f"{name}: {split.tokens:,} tokens of {_count(split.documents, 'document')}")
    kept = f", {totals.kept} of which were there" if totals.kept else ""
    seconds = time.monotonic() - started
    print(f"{_OUTPUT.value} is complete: {_count(totals.parts, 'part')}{kept}, {seconds:.1f} s")
    return 0


def _count(number: int, of: str) -> str:
    return f"{number:,} {of}" + "s" * (number != 1)


if __name__ == "__main__":
    common.start(main)
