"""Tokenise text into a token store, which recipes.train reads as --data.

    python -m recipes.prepare_data --input='a.jsonl.gz,books/*.txt' --tokenizer=gpt2-bpe/ \\
        --output=stores/books
    python -m recipes.train --data=stores/books --workdir=runs/books

--input and --output can be paths like gs://bucket/.... --input can also contain glob patterns and
fsspec URLs, such as hf://datasets/USER/NAME/**/*.parquet. An interrupted command resumes when it is
repeated, and reports inputs that have been edited since. The store contains a held-out part and its
tokenizer. To repair a damaged store, delete its manifest.json and repeat the command. To prepare a
store on several hosts, run the same command on each host, with the multi-host flags of
recipes.train: see docs/guides/data.md.
"""

import signal
import time

from absl import flags
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

from recipes import members, program
from rmt_tpu.errors import UsageError, shown
from rmt_tpu.progress import ProgressDisplay
from rmt_tpu.training import signals

_INPUT = flags.DEFINE_string(
    "input", None, "the text: stdlib, or comma-separated names and globs of .txt, .jsonl, .parquet "
    "and .arrow files; each may be local, gs:// or an fsspec URL; .txt and .jsonl may end in .gz "
    "or .zst",
    required=True,
)  # fmt: skip
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", "byte", "byte, a folder with encoder.json and vocab.bpe, or a tokenizer.json"
)
_OUTPUT = flags.DEFINE_string(
    "output", None, "folder of the token store, local or gs://", required=True
)
_EVAL_FRACTION = flags.DEFINE_float("eval_fraction", 0.02, "fraction of the documents to hold out")
_SEED = flags.DEFINE_integer("seed", 0, "seed that selects the held-out documents")
_WORKERS = flags.DEFINE_integer(
    "workers", None, "number of worker processes on this host; the default is one per CPU"
)
_TEXT_FIELD = flags.DEFINE_string(
    "text_field", "text", "field of .jsonl files, or column of .parquet and .arrow files, that "
    "contains the text of a document",
)  # fmt: skip
_FORMAT = flags.DEFINE_enum(
    "format", "text", ["text", "messages", "completion"],
    "format of a document; text: text only; messages: a conversation in the field messages, with a "
    "loss on the answers; completion: the fields prompt and completion, with a loss on the latter",
)  # fmt: skip
_CHAT_TEMPLATE = flags.DEFINE_string(
    "chat_template", "", "file with a chat template for --format=messages, in place of the "
    "tokenizer's",
)  # fmt: skip
members.define_distributed_flags()


class _Progress(ProgressDisplay):
    """The progress of this process, in bytes of its share of the input."""

    def __init__(self, *, line_seconds: float = 5.0, show: bool = True):
        super().__init__(
            "starting",
            None,
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
            line_seconds=line_seconds,
            show=show,
        )

    def update(self, done: int, total: int, label: str) -> None:
        """Show that `done` of `total` bytes have been processed; `label` names the current work."""
        self.show(
            lambda: (
                f"{label}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB ({done / max(total, 1):.0%})"
            ),
            completed=done,
            total=total,
            description=label,
        )


def main() -> int:
    """Tokenise the text that --input names into a token store, and return 0."""
    from rmt_tpu.data import open_store
    from rmt_tpu.data.batches import any_loss
    from rmt_tpu.data.marked import ANSWERS
    from rmt_tpu.data.prepare import SingleProcess, prepare

    _check_effects()
    # Handle other signals like Ctrl-C, so that worker processes and semaphores are cleaned up.
    for number in set(signals.STOPS.values()) - {signal.SIGINT}:
        # A program under nohup ignores SIGHUP, and must continue to ignore it.
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    group = SingleProcess()
    if members.join_processes():
        from rmt_tpu.distributed.process_group import ConnectedProcesses

        group = ConnectedProcesses("prepare_data")
    started = time.monotonic()
    with _Progress(show=group.number == 0) as progress:
        totals = prepare(
            _INPUT.value,
            _TOKENIZER.value,
            _OUTPUT.value,
            eval_fraction=_EVAL_FRACTION.value,
            seed=_SEED.value,
            workers=_WORKERS.value,
            progress=progress.update,
            group=group,
            text_field=_TEXT_FIELD.value,
            kind=_FORMAT.value,
            chat_template=_CHAT_TEMPLATE.value,
        )
    if group.number:
        return 0
    for name, split in {"train": totals.train, "held out": totals.held_out}.items():
        print(f"{name}: {split.tokens:,} tokens in {_count(split.documents, 'document')}")
        earlier = f", {totals.kept} from an earlier start" if totals.kept else ""
    seconds = time.monotonic() - started
    print(f"{_OUTPUT.value} is complete: {_count(totals.parts, 'part')}{earlier}, {seconds:.1f} s")
    if _FORMAT.value != "text" and not any_loss(open_store(_OUTPUT.value).held_out):
        print(f"note: no held-out token has a loss; only {ANSWERS} have one")
    return 0


def _check_effects() -> None:
    """Check that no flag is given that this input ignores.

    Raises:
      UsageError: a flag has no effect; the message says with which flags it has one.
    """
    from rmt_tpu.data.inputs import may_have_fields

    has_text_field = _FORMAT.value != "completion" and may_have_fields(_INPUT.value)
    for flag, has_effect, legal in (
        (
            _TEXT_FIELD,
            has_text_field,
            "--input with .jsonl, .parquet or .arrow files and the format text or messages",
        ),
        (_CHAT_TEMPLATE, _FORMAT.value == "messages", "--format=messages"),
    ):
        if flag.present and not has_effect:
            raise UsageError(
                f"--{flag.name}={shown(flag.value)} has no effect on this input; legal: {legal}, "
                f"or leave out --{flag.name}"
            )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + "s" * (number != 1)


def run() -> None:
    """Run `main` as a program; `rmt-prepare-data` calls this function."""
    program.start(main)


if __name__ == "__main__":
    run()
