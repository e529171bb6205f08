"""Before jax is imported: eight virtual CPU devices, and compilers for devices that are not there.

libtpu is a package like others. The CUDA plugin is not: where it is installed, every `import jax`
without a GPU complains. So `make test` puts it beside the environment, where only tests find it.
"""

import gc
import os
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests import annotations

annotations.check_cheaply()  # before any package is imported

os.environ["JAX_PLATFORMS"] = "cpu"
# Level 0, and each program as one module: tests compile much and compute little.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_cpu_parallel_codegen_split_count=1"
)
if version("jaxlib").startswith("0.10."):  # later ones have not the emitter that is twice as fast
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
CUDA = Path(sys.prefix) / "cuda"
if CUDA.is_dir():
    sys.path.append(str(CUDA))
    # Before a ptxas of the machine's, which may be too old for this compiler.
    os.environ["PATH"] = str(CUDA / "nvidia" / "cu13" / "bin") + os.pathsep + os.environ["PATH"]
os.environ |= {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "RMT_TPU_TUNED": "off",  # whoever runs the tests may have tables of their own
}

# Tracing makes objects by the million, and a tenth of the time would go into looking through them.
gc.set_threshold(50_000, 20, 50)


def pytest_addoption(parser):
    """What `tests/emulator.py` does with them."""
    group = parser.getgroup(
        "emulator", "TPU kernels that a test interprets, by an emulator of a TPU"
    )
    group.addoption("--emulate", choices=("on_wait", "eager"), help="when a kernel's copies happen")
    group.addoption("--emulate_cores", type=int, default=1, help="how many cores share a grid")
    group.addoption("--emulate_seed", type=int, help="for the order of parallel dimensions")


def pytest_configure(config):
    """Recipes of all workers are started by one process."""
    if config.getoption("numprocesses", None):  # this is not a worker
        from tests import cli

        cli.start_server()


@pytest.hookimpl(optionalhook=True)  # else it is an error where xdist is switched off
def pytest_xdist_make_scheduler(config, log):
    """Run all tests of a file on one worker, so that its fixtures and programs are made once."""
    from tests import workers

    return workers.scheduler(config, log)


def pytest_collection_finish():
    """What has been imported stays: it is not looked through again."""
    gc.freeze()


@pytest.fixture(scope="session")
def undeclared_files():
    """Files that were opened and that a Bazel target of tests lacks, as they come."""
    from tests import declared

    return declared.record()


@pytest.fixture(autouse=True)
def opens_what_its_target_has(undeclared_files):
    """A test that reads a file of the project passes under Bazel too."""
    undeclared_files.clear()
    yield
    assert not undeclared_files, f"add these to read_by_tests in BUILD: {sorted(undeclared_files)}"


@pytest.fixture(autouse=True, scope="session")
def programs_of_earlier_runs():
    """What was compiled once is read back by the next run of the tests."""
    import jax  # which reads the environment above when it is imported

    from rmt_tpu.distributed import program_cache
    from tests import programs

    program_cache.bypass_for_cpu_meshes()
    programs.keep_whole()
    jax.config.update("jax_compilation_cache_dir", str(programs.FOLDER))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(autouse=True, scope="session")
def kernels_by_the_emulator(pytestconfig, programs_of_earlier_runs):
    """If `--emulate` asks for it."""
    from tests import emulator

    with pytest.MonkeyPatch.context() as patch:
        emulator.emulate(pytestconfig, patch)
        yield


@pytest.fixture(autouse=True)
def no_races(pytestconfig):
    """A test fails in which the emulator has found one, and leaves nothing to the next."""
    yield
    if pytestconfig.getoption("emulate"):
        from tests import emulator

        raced = emulator.races_found()
        emulator.forget()
        assert not raced, "the emulator has found a race: see what it printed"


@pytest.fixture(autouse=True)
def unwritten_memory(request, monkeypatch):
    """`jax.lax.empty` is NaN in what runs here; what is compiled for a device stays as it is."""
    if request.node.get_closest_marker("compile") is None:
        from tests import emulator

        monkeypatch.setattr("jax.lax.empty", emulator.nan_empty)


@pytest.fixture(scope="module")
def object_server():
    """An object server with a bucket named "bucket"; `gs://` leads to it in the whole module."""
    from tests import gcs_clients, gcs_server

    with gcs_server.running("bucket") as server, pytest.MonkeyPatch.context() as patch:
        gcs_clients.lead_to(server, patch)
        yield server


@pytest.fixture
def server(object_server, monkeypatch):
    """The same for one test: "bucket" is empty, and `server.bucket` has never been there before."""
    from tests import gcs_clients

    gcs_clients.lead_to(object_server, monkeypatch)
    for name in object_server.names("bucket"):
        object_server.remove("bucket", name)
    object_server.bucket = object_server.new_bucket()
    yield object_server
    object_server.faults.clear()


@pytest.fixture
def unannotated():
    """Without the checks of annotations, which are the tests' alone."""
    import jaxtyping

    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def programs_for_no_device(request):
    """Those for devices that are not there can be kept, and not be read back."""
    from tests import programs

    if request.node.get_closest_marker("compile") is None:
        yield
        return
    with programs.not_kept():
        yield


@pytest.fixture(autouse=True, scope="module")
def programs_of_one_module():
    """What a module compiled is not used by the next, and would add up to many gigabytes."""
    yield
    import jax

    jax.clear_caches()
