"""Before jax is imported: eight virtual CPU devices, and the TPU compiler without a TPU."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Level 0: tests compile much and compute little.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)
os.environ |= {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
