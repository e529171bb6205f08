"""Train models on the same tokens with the same seed, and compare them.

    python -m recipes.compare --presets=gpt2-tiny,rmt-tiny --workdir=runs/compare

Each trains in <workdir>/<preset> and resumes there. Leaves comparison.png (loss against tokens and
against FLOPs), comparison.md and comparison.json.
"""

import dataclasses
from pathlib import Path

from absl import flags

from recipes import common
from rmt_tpu.errors import UsageError

_PRESETS = flags.DEFINE_list("presets", ["gpt2-tiny", "rmt-tiny"], "names of models")
_WORKDIR = flags.DEFINE_string("workdir", "runs/compare", "folder of the run folders")
common.define_run_flags()


def main() -> int:
    from rmt_tpu.training.compare import write_comparison
    from rmt_tpu.training.trainer import train

    names = _PRESETS.value
    if not names or len(set(names)) < len(names):
        raise UsageError(f"--presets={','.join(names)} must be different names, at least one")
    # The first preset's batch, steps and data are everybody's.
    shared = common.base_config(names[0], None)
    configs = {
        name: common.run_config(
            dataclasses.replace(shared, model=common.base_config(name, None).model)
        )
        for name in names
    }
    folder = Path(_WORKDIR.value)
    for name, config in configs.items():
        if train(config, folder / name, label=name).interrupted:
            print(f"stopped; to go on:\n  {common.resume_command()}")
            return common.INTERRUPTED
    print(write_comparison({name: folder / name for name in names}, folder))
    print(f"picture: {folder / 'comparison.png'}")
    return 0


if __name__ == "__main__":
    common.start(main)
