"""Where files lie: a `Folder` on a local file system or in a bucket of Google Cloud Storage.

A folder is what holds small files whole (configs, manifests, COMMITs, pictures). Arrays in it are
read and written by tensorstore, which `Folder.kvstore` and `Folder.context` tell where and how.
"""

from rmt_tpu.storage.folder import Fault, Folder, Found, Unavailable, faults, join
from rmt_tpu.storage.open import Location, open_folder

__all__ = ["Fault", "Folder", "Found", "Location", "Unavailable", "faults", "join", "open_folder"]
