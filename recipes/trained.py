"""The flags that select a trained model and the mesh that it runs on.

This module does not import jax, because the import is slow.
"""

import os
import sys

from absl import flags

import sharding
from rmt_tpu.errors import UsageError, flag_errors
from rmt_tpu.storage import Folder, open_folder

# The flags defined here count as flags of the recipe that calls these functions, so that its --help
# lists them.
flags.disclaim_key_flags()


def define_source_flags() -> None:
    """Define the flags that select a trained model: see `source`."""
    flags.DEFINE_string("workdir", None, "run folder of recipes.train, local or gs://")
    flags.DEFINE_string(
        "init_from",
        None,
        "folder in Hugging Face format (config.json and safetensors), instead of --workdir",
    )
    flags.DEFINE_integer(
        "step", None, "step of the checkpoint; the default is the last undamaged checkpoint"
    )


def source() -> str:
    """Return the folder of --workdir or --init_from.

    Raises:
      UsageError: neither or both flags are set, or --init_from is not a folder in the hub's format.
    """
    workdir, init_from = flags.FLAGS.workdir, flags.FLAGS.init_from
    if (workdir is None) == (init_from is None):
        if workdir is None:
            raise UsageError(
                "--workdir is needed, or --init_from with a folder in Hugging Face format"
            )
        raise UsageError(
            f"--workdir={workdir} and --init_from={init_from} both set the model; give one"
        )
    if init_from is not None:
        from rmt_tpu.hub.models import describe

        with flag_errors("init_from"):
            open_folder(init_from).check()
        try:
            describe(init_from)
        except UsageError as error:
            if _is_run(init_from):
                raise UsageError(
                    f"--init_from={init_from} is a run folder; legal: --workdir={init_from}, or a "
                    "folder in Hugging Face format"
                ) from None
            raise UsageError(f"--init_from cannot be loaded: {error}") from None
    return workdir if init_from is None else init_from


def _is_run(folder: str) -> bool:
    from rmt_tpu.runs.workdir import read_config

    try:
        read_config(folder)
    except UsageError:
        return False
    return True


def note_missing_start(tokenizer) -> None:
    """Print a note to standard error if the tokenizer puts no start token before texts."""
    if not tokenizer.starts:
        print(
            "note: texts get no start token, because the model's own tokenizer adds none",
            file=sys.stderr,
        )


def define_mesh_flag() -> None:
    """Define the flag for the mesh on which text is generated: see `check_mesh`."""
    flags.DEFINE_string(
        "mesh",
        None,
        "mesh axes, like tensor=4 or key=2,sequence=2; -1 means all remaining devices; the default "
        "is one device",
    )


def check_mesh() -> str | None:
    """Return the value of --mesh after checking it.

    Raises:
      MeshError: the value does not describe a mesh.
    """
    mesh = flags.FLAGS.mesh
    if mesh is not None:
        sharding.parse_mesh(mesh)
    return mesh


def check_rows(flag: str, rows: int) -> None:
    """Check that the rows of a batch can be divided evenly over the mesh.

    Call this function before the model is loaded, because loading is slow.

    Args:
      flag: the name of the flag that sets the number of rows.
      rows: the number of rows.

    Raises:
      MeshError: the rows cannot be divided evenly over the devices of --mesh.
    """
    from rmt_tpu.generation import check_slots

    if flags.FLAGS.mesh is not None:
        check_slots(f"--{flag}", rows, sharding.make_mesh(flags.FLAGS.mesh))


def names(workdirs: list[Folder]) -> list[str]:
    """Return short, unique names for run folders.

    A name is the last part of the path. If several paths have the same last part, like seed-0, the
    parts before it are added.
    """
    names = [w.name for w in workdirs]
    if len(set(names)) == len(names):
        return names
    paths = [str(w.local_path or w.url) for w in workdirs]
    above = os.path.commonprefix(paths).rpartition("/")[0] + "/"
    return [path.removeprefix(above) for path in paths]
