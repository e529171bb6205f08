"""Before jax is imported: eight virtual CPU devices, and compilers for devices that are not there.

libtpu is a package like others. The CUDA plugin is not: where it is installed, every `import jax`
without a GPU complains. So `make test` puts it beside the environment, where only tests find it.
"""

import os
import sys
from pathlib import Path

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
# Level 0: tests compile much and compute little.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)
CUDA = Path(sys.prefix) / "cuda"
if CUDA.is_dir():
    sys.path.append(str(CUDA))
    os.environ["PATH"] += os.pathsep + str(CUDA / "nvidia" / "cu13" / "bin")
os.environ |= {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


@pytest.fixture(autouse=True, scope="module")
def programs_of_one_module():
    """What a module compiled is not used by the next, and would add up to many gigabytes."""
    yield
    import jax  # which reads the environment above when it is imported

    jax.clear_caches()
