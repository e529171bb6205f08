"""lm-evaluation-harness's own command line, with the models of run folders.

    python -m recipes.lm_eval run --model_args workdir=runs/a --tasks gsm8k
    python -m recipes.lm_eval run --model_args workdir=runs/a --tasks arc_easy --data_dir eval

All after `recipes.lm_eval` is the harness's (`run --help` says what there is); the model is
`rmt_tpu`, with the arguments of `rmt_tpu.evaluation.harness.RmtTpu`. Two things are added:
--data_dir, for tasks of `recipes.evaluate` from its files, without a network; and that --use_cache
has the checkpoint's identity in its name, so that another model's answers are not taken.
"""

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

from recipes import program
from rmt_tpu.errors import UsageError, arguments_as_flags


def main() -> None:
    """
    Raises:
      UsageError: the extra is not installed, or an argument cannot be.
    """
    try:
        from lm_eval._cli import HarnessCLI
        from lm_eval.utils import setup_logging
    except ImportError:
        raise UsageError(
            "recipes.lm_eval needs lm-evaluation-harness: pip install 'rmt_tpu[lm-eval]'"
        ) from None
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--data_dir")
    given, sys.argv[1:] = own.parse_known_args()
    setup_logging()
    command = HarnessCLI()
    arguments = command.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.command == "run":
            with arguments_as_flags():
                _run(arguments, given.data_dir, Path(scratch))
        command.execute(arguments)


def _run(arguments: argparse.Namespace, data_dir: str | None, scratch: Path) -> None:
    """What the harness's `run` is given, with what is added."""
    from rmt_tpu.evaluation import documents, harness

    arguments.model = arguments.model or "rmt_tpu"
    if data_dir is not None:
        tasks = documents.find_tasks(arguments.tasks or [])
        harness.write_tasks([documents.read_task(task, data_dir) for task in tasks], scratch)
        arguments.tasks = [str(scratch / f"{task.name}.yaml") for task in tasks]
        _without_defaults()
    if arguments.use_cache is not None:
        arguments.use_cache = harness.cache_path(arguments.use_cache, **arguments.model_args)


def _without_defaults() -> None:
    """No task of the harness is looked up: to read the files of all takes many seconds.

    Its command line makes the manager itself, and passes no `include_defaults`.
    """
    from lm_eval import tasks

    tasks.TaskManager = partial(tasks.TaskManager, include_defaults=False)


def run() -> None:
    own = sys.argv[1:] in (["-h"], ["--help"], ["--version"])
    (program.start if own else program.start_unparsed)(main)


if __name__ == "__main__":
    run()
