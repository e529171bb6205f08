"""Draw how writes, gradients and attention over depth vary with depth in trained models.

    python -m recipes.depth_report --workdir=runs/compare/gpt2-tiny,runs/compare/attnres-tiny

The models are compared side by side on held-out text. The picture is written to plots/depth.png in
the first run folder (or to --output), and the numbers to depth.json in the same folder. They are:

- the weights over depth, for each run that has them (Attention Residuals and its ablations, delta
  attention, DenseFormer, MUDD). A map shows the mean weight that each site gives to each earlier
  output, as in Figure 8 of Attention Residuals. A site is the input of a sublayer. For each site,
  the numbers include the entropy of the weights (1 for equal weights) and the spread of their
  logarithms (the largest minus the smallest);
- root mean squares for each write to the residual, by the embedding or a sublayer (Figure 5). They
  are over tokens and features. There is one for the written array, one for the residual after the
  write, and one for the gradient of the summed loss with respect to the written array.

The command also prints a short table.
"""

import dataclasses
import itertools

from absl import flags

from recipes import program, trained
from rmt_tpu.config import RunConfig
from rmt_tpu.errors import UsageError, arguments_as_flags, flag_errors
from rmt_tpu.storage import Folder, open_folder, writable_file

_WORKDIR = flags.DEFINE_list(
    "workdir", None, "run folders of recipes.train, local or gs://", required=True
)
_STEP = flags.DEFINE_integer(
    "step", None, "step of the checkpoints; the default is each run's last undamaged checkpoint"
)
_BATCHES = flags.DEFINE_integer("batches", 4, "maximum number of batches of held-out text")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 4, "sequences per batch")
_OUTPUT = flags.DEFINE_string(
    "output",
    None,
    ".png file for the picture; the default is plots/depth.png in the first run folder",
)


def main() -> int:
    """Compare the models in --workdir over depth, write a picture and numbers, and return 0."""
    from rmt_tpu.analysis.depth import write_report
    from rmt_tpu.runs.workdir import read_config

    for flag in (_BATCHES, _BATCH_SIZE):
        if flag.value < 1:
            raise UsageError(f"--{flag.name}={flag.value} must be positive")
    with flag_errors("workdir"):
        workdirs = [open_folder(w) for w in _WORKDIR.value]
    if not workdirs or len({w.url.rstrip("/") for w in workdirs}) < len(workdirs):
        raise UsageError(
            f"--workdir={','.join(_WORKDIR.value)} is empty or repeats a run folder; "
            "legal: one or more different folders"
        )
    with arguments_as_flags():
        configs = [read_config(w) for w in workdirs]
    folder, name = _picture(workdirs[0])
    named = zip(trained.names(workdirs), workdirs, configs, strict=True)
    profiles = {name_of_run: _profile(w, config) for name_of_run, w, config in named}
    print(write_report(profiles, folder, name))
    print(f"picture: {folder}/{name}")
    return 0


def _picture(workdir: Folder) -> tuple[Folder, str]:
    """Return the folder and the file name of the picture, after a check that it can be written.

    Args:
      workdir: the first run folder, which is known to have a run.

    Raises:
      UsageError: the name does not end in .png, or the file cannot be written.
    """
    if _OUTPUT.value is None:
        try:
            workdir.check(write=True)
        except UsageError as error:
            raise UsageError(
                f"--workdir={error}; legal: --output with a .png file for the picture"
            ) from None
        return workdir.child("plots"), "depth.png"
    if not _OUTPUT.value.endswith(".png"):
        raise UsageError(f"--output={_OUTPUT.value} must end in .png")
    with flag_errors("output"):
        return writable_file(_OUTPUT.value)


def _profile(workdir: Folder, config: RunConfig):
    import rmt_tpu
    from rmt_tpu.analysis.depth import measure
    from rmt_tpu.data.datasets import load_datasets

    with arguments_as_flags():
        decoder, tokenizer = rmt_tpu.load(workdir, _STEP.value)
    small = dataclasses.replace(config.train, batch_size=_BATCH_SIZE.value, accumulate=1)
    held_out = load_datasets(dataclasses.replace(config, train=small), tokenizer).held_out
    return measure(decoder, itertools.islice(held_out.batches(), _BATCHES.value))


def run() -> None:
    """Run `main` as a program; `rmt-depth-report` calls this function."""
    program.start(main)


if __name__ == "__main__":
    run()
