"""What the tests of checkpoints share: small trees, and every kind of damage."""

import json
import zlib

import jax
import numpy as np

from rmt_tpu.storage import Folder


def small_tree(step: int) -> dict:
    return {"a": {"w": np.full((4, 6), step, np.float32)}, "b": np.arange(3, dtype=np.int32) + step}


def assert_same(restored, expected):
    """Equal structure, dtypes and bytes: NaN payloads and the sign of zero count."""
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        if jax.dtypes.issubdtype(ours.dtype, jax.dtypes.prng_key):
            assert jax.random.key_impl(ours) == jax.random.key_impl(theirs)
            ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def mesh(*shape: int) -> jax.sharding.Mesh:
    names = ("x", "y")[: len(shape)]
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return jax.sharding.Mesh(devices, names)


def sharded(mesh: jax.sharding.Mesh, *axes) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))


# Names of files, from the folder of all steps -----------------------------------------------


def attempt_of(folder: Folder, step: int) -> str:
    """The folder of the only attempt at a step."""
    (attempt,) = [name for name in folder.names(str(step)) if name.startswith("attempt-")]
    return f"{step}/{attempt.removesuffix('/')}"


def array_of_w(folder: Folder, step: int) -> str:
    return f"{attempt_of(folder, step)}/arrays/a/w"


def chunk_of_w(folder: Folder, step: int) -> str:
    return f"{array_of_w(folder, step)}/c/0/0"


def manifest_of(folder: Folder, step: int) -> str:
    return f"{attempt_of(folder, step)}/manifest.json"


# Damage --------------------------------------------------------------------------------------


def flip_bit(folder: Folder, name: str, position: int):
    content = bytearray(folder.read(name).data)
    content[position] ^= 1
    folder.write(name, bytes(content))


def cut(folder: Folder, name: str, size: int):
    folder.write(name, folder.read(name).data[:size])


def rewrite_manifest(folder: Folder, step: int, change):
    """`change`s the manifest's content in place, and gives it the checksum of what it then is."""
    name = manifest_of(folder, step)
    content = json.loads(folder.read(name).data)["content"]
    change(content)
    crc32 = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    folder.write(name, json.dumps({"crc32": crc32, "content": content}).encode())


def damage_flip(folder, step):
    flip_bit(folder, chunk_of_w(folder, step), 5)


def damage_truncate(folder, step):
    cut(folder, chunk_of_w(folder, step), 20)


def damage_missing_chunk(folder, step):
    folder.delete(chunk_of_w(folder, step))


def damage_array_metadata(folder, step):
    name = f"{array_of_w(folder, step)}/zarr.json"
    folder.write(name, folder.read(name).data.replace(b"[4,6]", b"[6,4]"))


def damage_missing_array_metadata(folder, step):
    folder.delete(f"{array_of_w(folder, step)}/zarr.json")


def damage_missing_manifest(folder, step):
    folder.delete(manifest_of(folder, step))


def damage_manifest(folder, step):
    name = manifest_of(folder, step)
    flip_bit(folder, name, folder.read(name).data.index(b"tokens"))


def damage_cut_manifest(folder, step):
    cut(folder, manifest_of(folder, step), 50)


def damage_commit(folder, step):
    folder.write(f"{step}/COMMIT", b"}garbage")


def damage_commit_elsewhere(folder, step):
    folder.write(f"{step}/COMMIT", b'{"attempt": "../../1/attempt-0123456789abcdef"}')


def damage_stale_commit(folder, step):
    folder.delete_folder(attempt_of(folder, step))


# Each with what is said of it, on a file system and in a bucket.
DAMAGES = [
    (damage_flip, "array a/w: .*Digest mismatch"),
    (damage_truncate, "array a/w: .*Not enough data"),
    (damage_missing_chunk, "array a/w: .*is missing"),
    (damage_array_metadata, 'array a/w: .*Expected "shape"'),
    (damage_missing_array_metadata, "array a/w: .*does not exist"),
    (damage_missing_manifest, "manifest.json is missing"),
    (damage_manifest, "manifest.json is damaged: its checksum"),
    (damage_cut_manifest, "manifest.json is damaged: it is not a manifest"),
    (damage_commit, "COMMIT is damaged"),
    (damage_commit_elsewhere, "COMMIT is damaged"),
    (damage_stale_commit, "attempt-[0-9a-f]*/manifest.json is missing"),
]
DAMAGE_NAMES = [damage.__name__ for damage, _ in DAMAGES]
