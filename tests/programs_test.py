"""Which compiled programs of the tests are kept."""

import jax
import numpy as np

from tests import programs


def test_programs_for_no_device_are_not_kept_whatever_came_before(tmp_path):
    kept_in = jax.config.jax_compilation_cache_dir
    keeps = jax.config.jax_enable_compilation_cache  # Bazel's tests keep none
    x = np.arange(3.0, dtype=np.float32)
    with programs.not_kept():  # so that the folder is asked for anew
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_enable_compilation_cache", True)
    try:
        jax.jit(lambda x: 3 * x + 1)(x)
        kept = set(tmp_path.iterdir())
        assert kept
        with programs.not_kept():
            jax.jit(lambda x: 5 * x + 2)(x)
        assert set(tmp_path.iterdir()) == kept
        jax.jit(lambda x: 7 * x + 3)(x)
        assert set(tmp_path.iterdir()) > kept
    finally:
        jax.config.update("jax_enable_compilation_cache", keeps)
        with programs.not_kept():
            jax.config.update("jax_compilation_cache_dir", kept_in)
