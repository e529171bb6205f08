"""Programs that are compiled once, and read back by later processes and runs."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / ".cache" / "jax"


def keep_whole() -> None:
    """Has JAX keep a program whole or not at all: others read while it writes, or is killed."""
    from jax._src.lru_cache import LRUCache

    def put(self, key, value):
        path = self.path / f"{key}-cache"
        if not path.exists():
            part = path.with_suffix(f".{os.getpid()}")
            part.write_bytes(value)
            part.replace(path)

    LRUCache.put = put


@contextlib.contextmanager
def not_kept() -> Iterator[None]:
    """Programs are neither read back nor kept. JAX asks its config once, and remembers."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


@contextlib.contextmanager
def kept_in(folder: Path) -> Iterator[None]:
    """Programs are kept in a folder of one's own, whatever is set."""
    import jax

    kept, keeps = jax.config.jax_compilation_cache_dir, jax.config.jax_enable_compilation_cache
    with not_kept():  # so that the folder is asked for anew
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_enable_compilation_cache", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", keeps)
        with not_kept():
            jax.config.update("jax_compilation_cache_dir", kept)
