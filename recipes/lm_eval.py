"""Run the command line of lm-evaluation-harness with models from run folders.

    python -m recipes.lm_eval run --model_args workdir=runs/a --tasks gsm8k
    python -m recipes.lm_eval run --model_args workdir=runs/a --tasks arc_easy --data_dir eval

All arguments after `recipes.lm_eval` are passed to the harness (see `run --help`). The model is
`rmt_tpu`, and its arguments are described in `rmt_tpu.evaluation.harness.RmtTpu`. This recipe adds
two features. With --data_dir, the tasks that `recipes.evaluate` supports are read from files. With
--use_cache, the file name includes the identity of the checkpoint, so that answers of another model
are never used.
"""

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

from recipes import program
from rmt_tpu.errors import UsageError, arguments_as_flags


def main() -> None:
    """Run the harness's command line.

    Raises:
      UsageError: the harness is not installed, or an argument is not valid.
    """
    try:
        from lm_eval._cli import HarnessCLI
        from lm_eval.utils import setup_logging
    except ImportError:
        raise UsageError(
            "recipes.lm_eval needs lm-evaluation-harness: pip install 'rmt_tpu[lm-eval]'"
        ) from None
    own_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own_parser.add_argument("--data_dir")
    options, sys.argv[1:] = own_parser.parse_known_args()
    setup_logging()
    command = HarnessCLI()
    arguments = command.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.command == "run":
            with arguments_as_flags():
                _run(arguments, options.data_dir, Path(scratch))
        command.execute(arguments)


def _run(arguments: argparse.Namespace, data_dir: str | None, scratch: Path) -> None:
    """Check the model's arguments, and adjust those for --data_dir and --use_cache."""
    from rmt_tpu.evaluation import documents, harness

    arguments.model = arguments.model or harness.MODEL
    if data_dir is not None:
        if not arguments.tasks:
            raise UsageError(f"--data_dir={data_dir} needs --tasks, the tasks whose data it has")
        tasks = documents.find_tasks(arguments.tasks)
        harness.write_tasks([documents.read_task(task, data_dir) for task in tasks], scratch)
        arguments.tasks = [str(scratch / f"{task.name}.yaml") for task in tasks]
        _without_defaults()
    # A file of --config may have the arguments of the model; --use_cache needs them here.
    in_file = arguments.config and not (arguments.model_args or arguments.use_cache)
    if arguments.model == harness.MODEL and not in_file:
        harness.check_arguments(arguments.model_args or {})
    if arguments.use_cache is not None:
        arguments.use_cache = harness.cache_path(arguments.use_cache, **arguments.model_args)


def _without_defaults() -> None:
    """Prevent the harness from indexing its own tasks, which would take many seconds.

    The harness has an option `include_defaults` for this, but its command line does not set it.
    """
    from lm_eval import tasks

    tasks.TaskManager = partial(tasks.TaskManager, include_defaults=False)


def run() -> None:
    """Run `main` as a program that parses its own arguments; `rmt-lm-eval` calls this function."""
    own_help = sys.argv[1:] in (["-h"], ["--help"], ["--version"])
    (program.start if own_help else program.start_unparsed)(main)


if __name__ == "__main__":
    run()
