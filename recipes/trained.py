"""The flags of a recipe that opens a trained model, and the mesh for it. No jax: see `program`."""

import os
import sys

from absl import flags

import sharding
from rmt_tpu.errors import UsageError
from rmt_tpu.storage import Folder

# Flags that a module of the recipes defines are those of the recipe that has it do so: see --help.
flags.disclaim_key_flags()


def define_source_flags() -> None:
    """Flags that say which trained model is meant: see `source`."""
    flags.DEFINE_string("workdir", None, "a run folder of recipes.train, local or gs://")
    flags.DEFINE_string(
        "init_from", None, "in its place a folder of the hub's form: config.json and safetensors"
    )
    flags.DEFINE_integer("step", None, "of the checkpoint; default the last good one")


def source() -> str:
    """The folder of --workdir or --init_from.

    Raises:
      UsageError: neither or both are given, or --init_from is no such folder.
    """
    workdir, init_from = flags.FLAGS.workdir, flags.FLAGS.init_from
    if (workdir is None) == (init_from is None):
        if workdir is None:
            raise UsageError("--workdir is needed, or --init_from with a folder of the hub's form")
        raise UsageError(f"--workdir={workdir} and --init_from={init_from}: give one of them")
    if init_from is not None:
        from rmt_tpu.hub.models import describe

        try:
            describe(init_from)
        except UsageError as error:
            raise UsageError(f"--init_from: {error}") from None
    return workdir if init_from is None else init_from


def tell_start(tokenizer) -> None:
    """A line on standard error if a model's texts have no start token before them."""
    if not tokenizer.starts:
        print(
            "note: no start token is put before texts: the model's own tokenizer puts none",
            file=sys.stderr,
        )


def define_mesh_flag() -> None:
    """A flag for the mesh that text is made on: see `check_mesh`."""
    flags.DEFINE_string(
        "mesh", None, "device axes, like tensor=4 or key=2,sequence=2; -1 fills; default one device"
    )


def check_mesh() -> str | None:
    """The value of that flag.

    Raises:
      MeshError: it is no mesh.
    """
    mesh = flags.FLAGS.mesh
    if mesh is not None:
        sharding.parse_mesh(mesh)
    return mesh


def check_rows(flag: str, rows: int) -> None:
    """Before the model is read, which may take long.

    Raises:
      MeshError: so many rows, by a flag, do not divide over the mesh.
    """
    from rmt_tpu.generation import check_slots

    if flags.FLAGS.mesh is not None:
        check_slots(f"--{flag}", rows, sharding.make_mesh(flags.FLAGS.mesh))


def names(workdirs: list[Folder]) -> list[str]:
    """Their last parts, or if these are alike, as those of seed-0 of several presets, more."""
    names = [w.name for w in workdirs]
    if len(set(names)) == len(names):
        return names
    places = [str(w.local_path or w.url) for w in workdirs]
    above = os.path.commonprefix(places).rpartition("/")[0] + "/"
    return [place.removeprefix(above) for place in places]
