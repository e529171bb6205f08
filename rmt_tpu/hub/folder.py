"""Load a decoder and a tokenizer from a hub folder, or export them to a hub folder."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx

import sharding
from rmt_tpu import data
from rmt_tpu.decoder import Decoder
from rmt_tpu.errors import ArgumentError, RunError, UsageError
from rmt_tpu.generation.placement import parameter_shardings
from rmt_tpu.hub import own, tokens, weights
from rmt_tpu.hub.families import FAMILIES
from rmt_tpu.hub.models import (
    CONFIG,
    EXPLICIT,
    GENERATION,
    Description,
    config_values,
    describe,
    kind_of,
    special_tokens,
)
from rmt_tpu.hub.pieces import Piece
from rmt_tpu.hub.placing import read_parameter
from rmt_tpu.hub.tensors import pieces
from rmt_tpu.storage import Location, open_folder

# The name of the folder, inside the exported one, that has the files of an unfinished export.
UNFINISHED = "unfinished"
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def load(folder: Location, *, mesh: str | None = None) -> tuple[Decoder, data.Tokenizer]:
    """Read the decoder and the tokenizer in a folder.

    Args:
      folder: a local or gs:// folder in the hub's format.
      mesh: see `rmt_tpu.load`.

    Raises:
      UsageError: the folder has no supported model or no tokenizer, or its tensors do not fit its
        config.json.
      RunError: a file is damaged, or a weight is not finite.
      MeshError: there are fewer devices than the mesh needs, or the mesh cannot divide the model.
    """
    described = describe(folder)
    model = described.model
    tokenizer = tokens.read_tokenizer(folder, described)
    abstract = nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0)))
    graphdef, shapes = nnx.split(abstract, nnx.Param)
    shardings = None if mesh is None else parameter_shardings(abstract, sharding.make_mesh(mesh))
    params = _read(folder, described, nnx.to_pure_dict(shapes), shardings)
    return nnx.merge(graphdef, params), tokenizer


def _read(folder: Location, described: Description, shapes: Any, shardings: Any | None) -> Any:
    """Read the parameters; return a tree with the structure of `shapes`.

    Each process reads only its own devices' shards; see `placing.read_parameter`. If `shardings` is
    None, the first device gets all parameters.
    """
    tensors = weights.Tensors(folder)
    by_path = weights.pieces_by_parameter(tensors, described)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def read(path: Any, like: jax.ShapeDtypeStruct, where: Any) -> jax.Array:
        parameter_pieces = by_path.get(tuple(key.key for key in path), [])
        return read_parameter(tensors, parameter_pieces, like.shape, like.shape, where)

    shardings = jax.tree.map(lambda _: device, shapes) if shardings is None else shardings
    return jax.tree_util.tree_map_with_path(read, shapes, shardings)


def new_folder(folder: str | Path) -> Path:
    """Return the absolute path of the local folder for an export, without creating it.

    The first folder above it that exists is checked by creating a temporary folder there.

    Args:
      folder: the folder, in which `~` stands for the home folder. It may contain the unfinished
        files of a killed export, which the next export deletes.

    Raises:
      UsageError: the folder is not local, not empty, or cannot be read or written.
    """
    if "://" in str(folder):
        raise UsageError(f"{folder} is not a local folder; legal: a new or empty local folder")
    path = open_folder(folder).local_path
    try:
        if path.exists() and not all(map(_is_left, path.iterdir())):
            raise UsageError(f"{folder} is not empty; legal: a new or empty folder")
        there = next(place for place in (path, *path.parents) if os.path.lexists(place))
        with tempfile.TemporaryDirectory(dir=there):
            pass
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}") from None
    return path


def _is_left(path: Path) -> bool:
    """Return whether a path is the folder that a killed export has left, with only its files."""
    if path.name != UNFINISHED or path.is_symlink() or not path.is_dir():
        return False
    written = (".safetensors", ".json", ".py", ".jinja", ".txt", ".model")
    return all(each.is_file() and each.suffix in written for each in path.iterdir())


@contextlib.contextmanager
def _all_or_nothing(folder: Path) -> Iterator[Path]:
    """Yield a folder inside `folder` whose files move to `folder` if the `with` statement succeeds.

    After an error, `folder` is as it was. config.json moves last, so that a folder in which a
    killed process left some files is not taken for a model.
    """
    existed, unfinished = folder.exists(), folder / UNFINISHED
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        yield unfinished
        for path in sorted(unfinished.iterdir(), key=lambda path: path.name == CONFIG):
            path.rename(folder / path.name)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        if not existed:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    unfinished.rmdir()


def export(
    decoder: Decoder,
    tokenizer: data.Tokenizer,
    folder: str | Path,
    *,
    max_length: int,
    dtype: str = "float32",
    kind: str | None = None,
    template: data.ChatTemplate | None = None,
) -> None:
    """Write a model and its tokenizer to a folder in the hub's format.

    After an error, the folder is as it was: it does not exist, or is empty.

    The start and end tokens of texts are written to config.json and generation_config.json, and
    also to tokenizer_config.json if the tokenizer has names for them.

    Args:
      decoder: the model.
      tokenizer: the tokenizer of the model.
      folder: a local folder, which must be new or empty, except for what a killed export has left;
        see `new_folder`.
      max_length: the sequence length in training, in tokens.
      dtype: the dtype of the written tensors, a key of DTYPES.
      kind: the model type to write. "rmt_tpu" can express any model (see `hub.own`). The other
        legal values are in `models.EXPLICIT`. None chooses the type that fits the model.
      template: the chat template of the model, or None.

    Raises:
      UsageError: the hub's format cannot express the model, `new_folder` refuses the folder, or the
        template cannot be compiled.
      ArgumentError: `dtype` is unknown, or cannot express a number of a tensor.
      RunError: a file cannot be written, for example because the disk is full.
    """
    if dtype not in DTYPES:
        raise ArgumentError(f"dtype={dtype} cannot be written; legal: {', '.join(DTYPES)}")
    if kind not in (None, *EXPLICIT):
        raise UsageError(f"kind={kind} cannot be chosen; legal: None, {', '.join(EXPLICIT)}")
    path, model = new_folder(folder), decoder.config
    kind = kind_of(model) if kind is None else kind
    family, special = FAMILIES[kind], {"bos": tokenizer.bos, "ends": tokenizer.ends}
    values = config_values(model, max_length=max_length, kind=kind, **special)
    names = tokens.tokenizer_config(tokenizer, max_length, template)
    params = nnx.to_pure_dict(nnx.state(decoder, nnx.Param))

    def value(piece: Piece) -> np.ndarray:
        array = params
        for key in piece.path:
            array = array[key]
        return np.asarray(array[tuple(slice(*at) for at in piece.at)])

    files = {
        CONFIG: values | {"torch_dtype": dtype},
        GENERATION: special_tokens(tokenizer.bos, tokenizer.ends),
        tokens.CONFIG: names,
    }
    try:
        with _all_or_nothing(path) as unfinished:
            weights.write(unfinished, pieces(model, family), value, DTYPES[dtype])
            if kind == own.KIND:
                own.write_code(model, unfinished)
            tokenizer.save(str(unfinished), template=tokenizer.starts)
            for name in filter(files.get, files):
                text = json.dumps(files[name], indent=2) + "\n"
                (unfinished / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror}") from None
