"""What `gcs_server` keeps: the objects of its buckets, in memory."""

import bisect

from gcp_storage_emulator import storage as emulator_storage


class _Bytes:
    """What the package keeps in files, by names that are not changed by a file system's rules."""

    def __init__(self):
        self._files: dict[str, bytes] = {}

    def write_bytes(self, path: str, data: bytes) -> None:
        self._files[path] = data

    def read_bytes(self, path: str) -> bytes:
        try:
            return self._files[path]
        except KeyError:
            raise FileNotFoundError(path) from None

    def remove_file(self, path: str) -> None:
        self._files.pop(path, None)

    def makedirs(self, path: str) -> None:
        pass

    remove_tree = makedirs  # only of buckets, which are empty then


class Storage(emulator_storage.Storage):
    """The package's, without what makes it slow, and with the names of each bucket in order."""

    def __init__(self):
        super().__init__(use_memory_fs=True)
        self._store = _Bytes()
        self.names: dict[str, list[str]] = {}

    def resource(self, bucket: str, name: str) -> dict | None:
        return self.objects.get(bucket, {}).get(name)

    def create_bucket(self, bucket_name, bucket_obj):
        self.names.setdefault(bucket_name, [])
        bucket_obj["softDeletePolicy"] = {"retentionDurationSeconds": "0"}
        return super().create_bucket(bucket_name, bucket_obj)

    def create_file(self, bucket_name, file_name, content, file_obj, file_id=None):
        if self.resource(bucket_name, file_name) is None:
            bisect.insort(self.names[bucket_name], file_name)
        file_obj |= {"size": str(len(content)), "metageneration": "1"}
        super().create_file(bucket_name, file_name, content, file_obj, file_id)

    def delete_file(self, bucket_name, file_name):
        super().delete_file(bucket_name, file_name)
        names = self.names[bucket_name]
        del names[bisect.bisect_left(names, file_name)]

    def _object_path(self, bucket_name, file_name):
        return f"{bucket_name}/{file_name}"

    def _write_config_to_file(self):
        """Nothing: it would be all metadata, at every request."""
