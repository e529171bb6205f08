"""Evaluate trained models on tasks of lm-evaluation-harness, and by the perplexity of texts.

    python -m recipes.evaluate --workdir=runs/a --tasks=arc_easy,lambada_openai --data_dir=eval
    python -m recipes.evaluate --workdir=runs/a --text='books/*.txt' --against=runs/b

Prompts and metrics are the same as in the harness; the scorer is this project's own. --data_dir is
a folder with files <task>.jsonl (or .gz, .zst), whose lines have the format of the task's dataset
on the Hugging Face hub, or the keys "query", "choices" and "gold". With --data_dir=hub, the
datasets are downloaded from the hub. The command writes evaluation.json, evaluation.md and
plots/evaluation.png to --output. The default is the run folder. The answers of all models are
stored there, too, in the subfolder evaluation, so that an interrupted command resumes when it is
repeated. All other folders are only read.

--against compares the model on the same documents with the model of another run folder, with
`untrained` (the run's model before its first training step, with the weights that its --init_from
supplied as they are now), or with `unigram` (token frequencies in the training text).
"""

import sys
import time

from absl import flags

from recipes import interrupts, program, trained
from rmt_tpu import memory
from rmt_tpu.errors import ArgumentError, UsageError, arguments_as_flags, flag_errors
from rmt_tpu.hub.models import is_hub
from rmt_tpu.storage import Folder, open_folder

trained.define_source_flags()
trained.define_mesh_flag()
_TASKS = flags.DEFINE_list("tasks", [], "names of tasks, like arc_easy,hellaswag")
_DATA_DIR = flags.DEFINE_string(
    "data_dir",
    None,
    "folder with <task>.jsonl files, local or gs://; the value hub downloads the data from the "
    "Hugging Face hub",
)
_TEXT = flags.DEFINE_string(
    "text",
    None,
    "text to score: files and globs, or a token store, whose held-out part is scored",
)
_STRIDE = flags.DEFINE_integer(
    "stride",
    None,
    "tokens scored per window of --text, at most --max_length; the default is the whole window",
    lower_bound=1,
)
_LIMIT = flags.DEFINE_integer(
    "limit",
    None,
    "maximum number of documents per task, counted from the first; the default is all documents",
    lower_bound=1,
)
_MAX_LENGTH = flags.DEFINE_integer(
    "max_length",
    None,
    "tokens per sequence; the default is the length used in training",
    lower_bound=1,
)
_BATCH_TOKENS = flags.DEFINE_integer(
    "batch_tokens",
    16384,
    "approximate number of tokens per batch on each device; devices that share the rows of a batch "
    "count as one device",
    lower_bound=1,
)
_AGAINST = flags.DEFINE_list(
    "against",
    [],
    "models to compare with: run folders, untrained (the run's model before training, with random "
    "weights or those of the folder from which the run started) or unigram (token frequencies)",
)
_OUTPUT = flags.DEFINE_string(
    "output", None, "folder for the answers and results; the default is the run folder"
)


@interrupts.terminated()
def main() -> int:
    """Evaluate a model on the tasks and texts that the flags name, write a report, and return 0."""
    _check_flags()
    started = time.monotonic()
    source = trained.source()
    with flag_errors("workdir"):
        workdir = open_folder(source)
    if is_hub(workdir):
        _check_hub_flags()
    from rmt_tpu.evaluation import documents, subjects
    from rmt_tpu.evaluation.evaluate import check_sources, evaluate
    from rmt_tpu.evaluation.report import write_report

    folder = workdir
    if _OUTPUT.value is not None:
        with flag_errors("output"):
            folder = open_folder(_OUTPUT.value)
            folder.check(write=True)
    tasks = documents.find_tasks(_TASKS.value)
    sources = [documents.read_task(task, _DATA_DIR.value, _LIMIT.value) for task in tasks]
    with arguments_as_flags():
        compared = [_subject(source, flags.FLAGS.step)]
    if _OUTPUT.value is None:
        _check_writable(workdir)
    trained.note_missing_start(compared[0].tokenizer)
    if _TEXT.value is not None:
        model = f"the model in {workdir}"
        sources.append(documents.read_texts(_TEXT.value, compared[0].tokenizer, model))
    for name in _AGAINST.value:
        if name in (subjects.UNTRAINED, subjects.UNIGRAM):
            compared.append(getattr(subjects, name)(workdir, compared[0]))
        else:
            compared.append(_other_subject(name))
    by_name, results = _by_name(compared), {}
    # Report a model that cannot read a task or a text before the first model is run.
    for subject in by_name.values():
        check_sources(subject, sources, _STRIDE.value)
    with memory.report_out_of_memory("use a smaller --batch_tokens or --max_length"):
        for name, subject in by_name.items():
            try:
                # The folders of other models may belong to somebody else, so they are only read.
                subject = subject._replace(folder=folder)
                results[name] = evaluate(subject, sources, _STRIDE.value)
            except KeyboardInterrupt as interrupt:
                print(f"stopped; to resume:\n  {program.resume_command()}", file=sys.stderr)
                return interrupts.exit_code(interrupt)
    print(write_report(results, folder))
    print(f"picture: {folder}/plots/evaluation.png")
    print(f"took {time.monotonic() - started:.0f} s")
    return 0


def _subject(workdir: str, step: int | None = None):
    from rmt_tpu.evaluation import subjects

    return subjects.run_subject(
        workdir,
        step,
        mesh=flags.FLAGS.mesh,
        max_length=_MAX_LENGTH.value,
        batch_tokens=_BATCH_TOKENS.value,
    )


def _other_subject(workdir: str):
    try:
        return _subject(workdir)
    except ArgumentError as error:
        _, _, value_and_reason = str(error).partition("=")
        raise UsageError(f"--against={value_and_reason}") from None


def _check_writable(workdir: Folder) -> None:
    """Check that results can be written to the run folder, once it is known to have a run.

    Raises:
      UsageError: the folder cannot be written to.
    """
    try:
        workdir.check(write=True)
    except UsageError as error:
        raise UsageError(
            f"--workdir={error}; legal: --output with a folder for the answers and results"
        ) from None


def _check_flags() -> None:
    trained.check_mesh()
    if not _TASKS.value and _TEXT.value is None:
        raise UsageError("--tasks or --text is needed")
    if bool(_TASKS.value) != (_DATA_DIR.value is not None):
        raise UsageError("--tasks and --data_dir, the folder of their data, must be given together")
    if _STRIDE.value is not None and _TEXT.value is None:
        raise UsageError(f"--stride={_STRIDE.value} needs --text")


def _check_hub_flags() -> None:
    """Check that the flags are legal for a model in Hugging Face format.

    Raises:
      UsageError: --output is missing, or --against names a model that only a run has.
    """
    in_workdir = flags.FLAGS.init_from is None
    flag = "--workdir in Hugging Face format" if in_workdir else "--init_from"
    if _OUTPUT.value is None:
        raise UsageError(f"{flag} needs --output, a folder for the answers and results")
    runs = [other for other in _AGAINST.value if other in ("untrained", "unigram")]
    if runs:
        raise UsageError(
            f"--against={runs[0]} needs a --workdir that is a run folder, because the model to "
            "compare with is made from the run's config and text"
        )


def _by_name(compared: list) -> dict:
    """Return a dict that maps a short, unique name to each model: see `trained.names`."""
    from rmt_tpu.evaluation.subjects import UNIGRAM, UNTRAINED

    runs = [subject for subject in compared if subject.name not in (UNTRAINED, UNIGRAM)]
    run_names = iter(trained.names([subject.folder for subject in runs]))
    by_name: dict = {}
    for subject in compared:
        name = subject.name if subject.name in (UNTRAINED, UNIGRAM) else next(run_names)
        name = f"{name} ({len(by_name) + 1})" if name in by_name else name
        by_name[name] = subject._replace(name=name)
    return by_name


def run() -> None:
    """Run `main` as a program; `rmt-evaluate` calls this function."""
    program.start(main)


if __name__ == "__main__":
    run()
