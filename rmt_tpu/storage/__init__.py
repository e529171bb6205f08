"""File storage: a `Folder` on a local file system or in a Google Cloud Storage bucket.

A `Folder` reads and writes small files as a whole, such as configs, manifests, commit files and
pictures. Arrays in a folder are read and written by tensorstore, through `Folder.kvstore` and
`Folder.context`. `find_objects` lists files of any size in a bucket, and `open_object` reads such a
file as a stream.
"""

from rmt_tpu.storage.folder import Fault, Folder, Found, Object, Unavailable, faults, join
from rmt_tpu.storage.open import (
    Location,
    find_objects,
    open_folder,
    open_object,
    open_parent,
    writable_file,
)

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
    "writable_file",
]
