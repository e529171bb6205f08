"""Functions that load a tokenizer by its name, or from a folder or a file."""

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from rmt_tpu.data.bpe import BpeTokenizer
from rmt_tpu.data.tiktoken_file import CONFIG_FILE, RANKS_FILE
from rmt_tpu.data.tokenizer import (
    BYTE,
    BYTE_FILE,
    FILE,
    ByteTokenizer,
    Tokenizer,
    Unusable,
    byte_library_file,
)
from rmt_tpu.errors import UsageError, flag_errors, unknown
from rmt_tpu.storage import Location, open_folder

GPT2_FILES = ("encoder.json", "vocab.bpe")


def load_tokenizer(spec: str) -> Tokenizer:
    """Load the tokenizer that the flag `--tokenizer` names.

    Args:
      spec: `byte`; a local folder with GPT-2's encoder.json and vocab.bpe; a local or gs:// folder
        with a tokenizer.json, or with Kimi's tiktoken.model and tokenizer_config.json; or the path
        of a file with the content of a tokenizer.json.

    Raises:
      UsageError: there is no such tokenizer, its files are damaged or have no BOS, or the
        tokenizers library is needed but not installed.
    """
    if spec == BYTE:
        return ByteTokenizer()
    with _named(f"--tokenizer={spec!r}"):
        if spec.startswith("gs://"):
            return _from_folder(spec, spec)
        path = Path(spec).expanduser()
        mode = _mode(path)
        if stat.S_ISREG(mode):
            return _from_file(spec, path)
        if stat.S_ISDIR(mode):
            return _from_local_folder(spec, path)
    legal = [BYTE, f"a folder with {' and '.join(GPT2_FILES)}", f"the path of a {FILE}"]
    raise UsageError(unknown("--tokenizer", spec, legal))


def is_there(spec: str) -> bool:
    """Return whether there is anything at the place that a `spec` of `load_tokenizer` names."""
    if spec == BYTE:
        return True
    if spec.startswith("gs://"):
        with flag_errors("tokenizer"):
            return bool(open_folder(spec).names())
    return os.path.exists(Path(spec).expanduser())


def spec_of_folder(folder: Location) -> str:
    """Return the `spec` from which `load_tokenizer` loads the tokenizer in a folder.

    It is the folder's location, also if the folder's name is that of the byte tokenizer.
    """
    spec = str(folder)
    return f"./{spec}" if spec == BYTE else spec


def load_saved(folder: Location) -> Tokenizer:
    """Load the tokenizer that `Tokenizer.save` wrote into a folder.

    Raises:
      UsageError: the folder has no tokenizer, or its file is damaged. The message begins with the
        folder.
    """
    folder = open_folder(folder)
    found = folder.read(FILE)
    if found is None:
        raise UsageError(f"{folder}: {FILE} is missing")
    with _named(f"{folder}: {FILE}"):
        return _from_json(f"{folder}/{FILE}", found.data)


@contextlib.contextmanager
def _named(location: str) -> Iterator[None]:
    """Turn an `Unusable` error in the `with` body into a UsageError that begins with `location`."""
    try:
        yield
    except Unusable as problem:
        raise UsageError(f"{location}: {problem}") from None


def _mode(path: Path) -> int:
    """Return the mode of a file or folder; 0 if there is nothing at the path.

    Raises:
      Unusable: it is unknown whether there is anything.
    """
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError as error:
        raise _unreadable(error) from None


def _from_folder(spec: str, location: Location) -> Tokenizer:
    with flag_errors("tokenizer"):
        folder = open_folder(location)
        folder.check()
        found = folder.read(FILE)
    if found is not None:
        return _from_json(spec, found.data)
    ranks = folder.read(RANKS_FILE)
    if ranks is not None:
        config = folder.read(CONFIG_FILE)
        return BpeTokenizer.from_tiktoken_files(spec, ranks.data, config and config.data)
    raise Unusable(
        f"the folder has no tokenizer; legal: a folder with {FILE} or {RANKS_FILE}, "
        f"or a local folder with {' and '.join(GPT2_FILES)}"
    )


def _from_local_folder(spec: str, folder: Path) -> Tokenizer:
    if all(os.path.isfile(folder / name) for name in GPT2_FILES):
        return BpeTokenizer.from_gpt2_files(spec, *(folder / name for name in GPT2_FILES))
    if os.path.isfile(folder / FILE):
        return _from_file(spec, folder / FILE)
    return _from_folder(spec, folder)


def _from_file(spec: str, path: Path) -> Tokenizer:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _unreadable(error) from None
    return _from_json(spec, content)


def _from_json(name: str, content: bytes) -> Tokenizer:
    try:
        text = content.decode("utf-8")
        if json.loads(text) in (BYTE_FILE, byte_library_file()):
            return ByteTokenizer()
    except (ValueError, RecursionError) as error:
        raise _unreadable(error) from None
    return BpeTokenizer.from_json(name, text)


def _unreadable(error: Exception) -> Unusable:
    why = getattr(error, "strerror", None) or error
    return Unusable(f"the tokenizer cannot be read ({why}); legal: a {FILE}")
