"""Functions that encode and decode two files of a checkpoint, manifest.json and COMMIT.

The files may come from untrusted sources, so their content is checked before it is used.
"""

import json
import math
import re
import zlib
from typing import Any, NamedTuple

from rmt_tpu import storage
from rmt_tpu.checkpoint.arrays import COMPRESSIONS, DTYPES, StoredArray
from rmt_tpu.errors import UsageError
from rmt_tpu.storage import Fault

# Version of the checkpoint format. Version 2 changed the weights that apply to concatenated data
# vectors. In them, the axis over the entries of a vector comes before the axis over vectors.
# Version 3 introduced compressed arrays.
FORMAT_VERSION = 3

# Maximum sizes in bytes of the files COMMIT and manifest.json.
COMMIT_LIMIT = 4096
MANIFEST_LIMIT = 64 * 2**20

ATTEMPT = re.compile(r"attempt-[0-9a-f]{16}")

_LARGEST = 2**62  # Maximum number of bytes in an array, and maximum length of an axis.
_MOST_AXES = 32


class Commit(NamedTuple):
    """The content of a COMMIT file, which makes one attempt to save a step the valid one.

    Attributes:
      attempt: name of the attempt's folder.
      loss: the loss on held-out text at this step, or None if it is unknown.
    """

    attempt: str
    loss: float | None = None

    def to_bytes(self) -> bytes:
        """Encode the content of the COMMIT file as JSON, without a loss that is not finite."""
        finite = self.loss is not None and math.isfinite(self.loss)
        loss = {"loss": float(self.loss)} if finite else {}
        return json.dumps({"attempt": self.attempt, **loss}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Commit":
        """Decode a COMMIT file.

        Raises:
          Fault: the file names no attempt.
        """
        try:
            fields = json.loads(data)
            attempt, loss = ATTEMPT.fullmatch(fields["attempt"])[0], fields.get("loss")
        except (ValueError, KeyError, TypeError, RecursionError, AttributeError):
            raise Fault("COMMIT is damaged: it names no attempt to save the step") from None
        is_number = type(loss) in (int, float) and math.isfinite(loss)
        return cls(attempt, float(loss) if is_number else None)


def seal(arrays: list[StoredArray], meta: dict) -> bytes:
    """Encode a manifest as bytes that include a checksum of its content.

    Raises:
      UsageError: `meta` is not JSON, or is too large.
    """
    try:
        # Convert `meta` to JSON and back. The checksum must cover what a reader gets, such as lists
        # in place of tuples.
        meta = json.loads(json.dumps(meta, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"a checkpoint's meta must be JSON: {error}") from None
    content = {
        "version": FORMAT_VERSION,
        "arrays": [array._asdict() for array in arrays],
        "meta": meta,
    }
    sealed = json.dumps({"crc32": _checksum(content), "content": content}, indent=1).encode()
    if len(sealed) > MANIFEST_LIMIT:
        raise UsageError(
            f"a checkpoint's manifest has {len(sealed)} bytes; legal: at most {MANIFEST_LIMIT}, "
            "with a smaller meta"
        )
    return sealed


def unseal(manifest: bytes) -> tuple[dict[str, StoredArray], dict]:
    """Decode a manifest into a dict from array name to description, and its metadata.

    Raises:
      Fault: the manifest is damaged, or its content is impossible.
      UsageError: the manifest has a different format version.
    """
    try:
        sealed = json.loads(manifest)
        content = sealed["content"]
        if sealed["crc32"] != _checksum(content):
            raise Fault("manifest.json is damaged: its checksum does not match")
        version = content["version"]
        if version != FORMAT_VERSION:
            raise UsageError(f"checkpoint format {version} cannot be read; legal: {FORMAT_VERSION}")
        arrays, meta = list(map(_array, content["arrays"])), content["meta"]
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError):
        raise Fault("manifest.json is damaged: it is not a manifest of arrays in JSON") from None
    named = {array.name: array for array in arrays}
    if len(named) < len(arrays) or not isinstance(meta, dict):
        raise Fault("manifest.json is damaged: it names an array twice, or has no meta")
    return named, meta


def _array(entry: dict) -> StoredArray:
    """Return the description of an array from an entry of a manifest, and check its fields.

    Raises:
      Fault: the entry describes an array that this program would never write.
      TypeError, AttributeError: the entry does not describe an array.
    """
    array = StoredArray(**entry)
    name, shape, chunk = array.name, array.shape, array.chunk
    try:
        storage.join(name)
    except UsageError:
        raise Fault(f"manifest.json has an array with the illegal name {name!r}") from None
    if array.dtype not in DTYPES:
        raise Fault(f"manifest.json: array {name} has the unknown dtype {array.dtype!r}")
    if array.compression not in COMPRESSIONS:
        raise Fault(
            f"manifest.json: array {name} has the unknown compression {array.compression!r}"
        )
    if not (array.prng is None or isinstance(array.prng, str)):
        raise Fault(f"manifest.json: array {name} has an unknown kind of PRNG key")
    sizes = [*shape, *chunk]
    if not (
        isinstance(shape, list)
        and isinstance(chunk, list)
        and len(shape) == len(chunk) <= _MOST_AXES
        and all(type(size) is int and 0 <= size < _LARGEST for size in sizes)
        and 16 * math.prod(shape) < _LARGEST
        # If a chunk were larger than the array, a damaged manifest could request too much memory.
        and all(1 <= part <= max(size, 1) for size, part in zip(shape, chunk, strict=True))
    ):
        raise Fault(f"manifest.json: array {name} has an impossible shape or chunk")
    return array


def _checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
