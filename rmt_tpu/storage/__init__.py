"""Places for files: a `Folder` on a local file system or in a bucket of Google Cloud Storage.

A folder reads and writes small files whole (configs, manifests, COMMITs, pictures). Arrays in a
folder are read and written by tensorstore, which uses `Folder.kvstore` and `Folder.context`. Files
of any size in a bucket are found by `find_objects` and read as streams by `open_object`.
"""

from rmt_tpu.storage.folder import Fault, Folder, Found, Object, Unavailable, faults, join
from rmt_tpu.storage.open import Location, find_objects, open_folder, open_object, open_parent

__all__ = [
    "Fault",
    "Folder",
    "Found",
    "Location",
    "Object",
    "Unavailable",
    "faults",
    "find_objects",
    "join",
    "open_folder",
    "open_object",
    "open_parent",
]
