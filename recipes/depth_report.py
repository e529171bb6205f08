"""Draw what happens over depth in trained models, side by side.

    python -m recipes.depth_report --workdir=runs/compare/gpt2-tiny,runs/compare/attnres-tiny

Over held-out text, into plots/depth.png of the first run folder (or --output), with the numbers
beside it in depth.json:

- for each run with weights over depth (Attention Residuals and its ablations, DenseFormer), a map
  of the mean weight with which each site reads each source (Figure 8 of Attention Residuals);
- the root mean square, over tokens and features, of what each sublayer writes to the residual, of
  the residual after it, and of the gradient of the loss by what was written, with the loss summed
  over tokens (Figure 5).

Prints a short table.
"""

import dataclasses
import itertools
import os
from pathlib import Path

from absl import flags

from recipes import common
from rmt_tpu.errors import UsageError

_WORKDIR = flags.DEFINE_list("workdir", None, "run folders of recipes.train", required=True)
_STEP = flags.DEFINE_integer("step", None, "of the checkpoints; default each run's last good one")
_BATCHES = flags.DEFINE_integer("batches", 4, "of held-out text, or fewer if there are fewer")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 4, "sequences at a time")
_OUTPUT = flags.DEFINE_string("output", None, "the picture; default plots/depth.png")


def main() -> int:
    from rmt_tpu.analysis.depth import write_report

    for flag in (_BATCHES, _BATCH_SIZE):
        if flag.value < 1:
            raise UsageError(f"--{flag.name}={flag.value} must be positive")
    workdirs = [Path(w) for w in _WORKDIR.value]
    if not workdirs or len(set(workdirs)) < len(workdirs):
        raise UsageError(f"--workdir={','.join(_WORKDIR.value)} must be different run folders")
    picture = Path(_OUTPUT.value or workdirs[0] / "plots" / "depth.png")
    if picture.suffix != ".png":
        raise UsageError(f"--output={picture} must end in .png")
    resolved = [w.resolve() for w in workdirs]
    names = [w.name for w in resolved]
    if len(set(names)) < len(names):  # like seed-0 of several presets
        names = [str(w.relative_to(os.path.commonpath(resolved))) for w in resolved]
    profiles = {name: _profile(w) for name, w in zip(names, workdirs, strict=True)}
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
        print(write_report(profiles, picture))
    except OSError as error:
        raise UsageError(f"--output={picture} cannot be written: {error.strerror}") from None
    print(f"picture: {picture}")
    return 0


def _profile(workdir: Path):
    import rmt_tpu
    from rmt_tpu.analysis.depth import measure
    from rmt_tpu.training.run import load_datasets
    from rmt_tpu.workdir import read_config

    config = read_config(workdir)
    decoder, tokenizer = rmt_tpu.load(workdir, _STEP.value)
    small = dataclasses.replace(config.train, batch_size=_BATCH_SIZE.value, accumulate=1)
    held_out = load_datasets(dataclasses.replace(config, train=small), tokenizer).held_out
    return measure(decoder, itertools.islice(held_out.batches(), _BATCHES.value))


if __name__ == "__main__":
    common.start(main)
