"""Checks of a run's kernels on the device; an operation that fails uses plain JAX instead.

Each kernel call in the run's train step (`rmt_tpu.analysis.device_calls`) is compared with the
equations that it implements. A record in the user's cache folder ensures that each call is checked
only once per kind of device and set of versions. The operations that use plain JAX are also listed
in the run folder, so that the run makes the same choice when it resumes on any machine.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import tuned
from pallas_kernels.platform import TracedCall, collecting_calls, taking_plain
from rmt_tpu.config import RunConfig
from rmt_tpu.data import Batch
from rmt_tpu.distributed import processes
from rmt_tpu.errors import RunError
from rmt_tpu.execution.kernels import preferred
from rmt_tpu.storage import Folder
from rmt_tpu.training.run import PreparedRun

FILE = "kernels.json"
VARIABLE = "RMT_TPU_CACHE"
CheckMode = Literal["auto", "off"]
# Maps each operation whose kernel failed its check to the reason, on one line.
Failures = dict[str, str]
_SECONDS = 3600.0  # seconds to wait until all processes have checked their kernels
_PLATFORMS = {"tpu": "tpu", "gpu": "cuda"}


@contextlib.contextmanager
def check_kernels(
    config: RunConfig,
    run: PreparedRun,
    folder: Folder,
    log: Callable[[str], None],
    *,
    restart: bool,
    how: CheckMode = "auto",
) -> Iterator[Mapping[str, str]]:
    """Check the run's kernels, and make operations that fail use plain JAX in the `with` body.

    Operations that an earlier start of the run listed in its folder keep using plain JAX, and
    operations that fail now are added to the list. A CPU has no kernels, so nothing is checked
    there.

    Args:
      config: the run's config, with every "auto" resolved.
      run: the run whose train step is traced to find its kernel calls.
      folder: the run folder.
      log: a function that prints a line.
      restart: whether the run restarts from scratch, in which case the list in the folder is
        deleted.
      how: "auto" checks the kernels; "off" only applies the list in the folder.

    Yields:
      The operations that use plain JAX, each with the reason.
    """
    if restart and processes.is_first():
        folder.delete(FILE)
    platform = _platform()
    if platform is None:
        yield {}
        return
    listed = processes.from_first(
        _read(folder, log) if processes.is_first() else {}, "reading earlier kernel checks"
    )
    found = {}
    if how == "auto":
        with taking_plain(listed):
            calls = calls_of(config, run)
        with preferred(config.model):
            own_failures = _differences(calls, platform, config.model.kernels)
        found = merge_failures(
            processes.exchange(json.dumps(own_failures), "the check of kernels", timeout=_SECONDS)
        )
    kind = jax.local_devices()[0].device_kind
    for name, why in found.items():
        log(f"{name} uses plain JAX on {kind}, because a kernel failed its check: {why}")
    plain = listed | found
    if found and processes.is_first():
        try:
            folder.write(FILE, (json.dumps({"plain": plain}, indent=1) + "\n").encode())
        except RunError as error:
            log(f"note: the kernel checks cannot be saved: {error}; the run continues")
    with taking_plain(plain):
        yield plain


def calls_of(config: RunConfig, run: PreparedRun) -> list[TracedCall]:
    """Return the calls of operations in a run's train step that are kernels on some platform."""
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    state = jax.tree.map(place, run.abstract, run.state_shardings)
    shape = config.train.batch_size, config.data.seq_len
    ids, weights = (place(jax.ShapeDtypeStruct(shape, t), run.batch_sharding) for t in _DTYPES)
    with collecting_calls() as calls:
        run.jitted_step().trace(state, Batch(ids, ids, ids, weights))
    return calls


_DTYPES = (jnp.int32, jnp.float32)  # dtypes of a batch's token ids and of its loss weights


def merge_failures(failures_by_process: Sequence[str]) -> Failures:
    """Return the operations whose kernels failed on any process.

    Args:
      failures_by_process: the `Failures` that each process found, as JSON, in process order.

    Returns:
      The operations in alphabetical order, each with the reason from the first process that has
      one.
    """
    found: Failures = {}
    for text in failures_by_process:
        found = json.loads(text) | found
    return dict(sorted(found.items()))


def _platform() -> str | None:
    """Return "tpu" or "cuda", or None if the platform of the devices has no kernels."""
    return _PLATFORMS.get(jax.default_backend())


def _differences(calls: Sequence[TracedCall], platform: str, kernels: str) -> Failures:
    """Return the operations whose kernels fail on this process's device, with the reasons.

    A call with a record from an earlier run is not checked again.
    """
    # These modules are imported here because they are slow to load.
    from rmt_tpu.analysis import device_calls, device_check

    found: Failures = {}
    for name, cases in device_calls.cases_of(calls, platform).items():
        for case in cases:
            key = _key(name, f"{case.op} {case.size}", kernels)
            why = _recorded(key)
            if why is None:
                row = device_check.check(case, None, timed=False)
                why = "" if row.ok else f"{case.op} {case.size} {row.verdict}"
                _record(key, why)
            if why:
                found.setdefault(name, why)
    return found


# Records -------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Return the folder that holds the records of kernel checks.

    It is $RMT_TPU_CACHE/kernels if the variable is set, and else rmt_tpu/kernels in the user's
    cache folder.
    """
    if folder := os.environ.get(VARIABLE):
        return Path(folder) / "kernels"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "rmt_tpu" / "kernels"


def _key(name: str, call: str, kernels: str) -> dict[str, str]:
    """Return the key of a record: the call, device kind, versions, and hash of kernel sources."""
    device = jax.local_devices()[0]
    return {
        "op": name,
        "call": call,
        "kernels": kernels,
        "device_kind": device.device_kind,
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "compiler": device.client.platform_version,
        "blocks": tuned.fingerprint(),
        "source": _source(),
    }


def _source() -> str:
    folder = Path(pallas_kernels.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _path(key: Mapping[str, str]) -> Path:
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"{name[:32]}.json"


def _recorded(key: Mapping[str, str]) -> str | None:
    """Return the recorded reason for a failure, "" for a success, or None if there is no record."""
    try:
        found = json.loads(_path(key).read_text(encoding="utf-8"))
        differs = found["differs"] if found["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return differs if isinstance(differs, str) else None


def _record(key: Mapping[str, str], differs: str) -> None:
    """Write a record; if it cannot be written, the next run repeats the check."""
    path = _path(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with open(handle, "w", encoding="utf-8") as file:
            json.dump({"key": key, "differs": differs}, file, indent=1)
        os.replace(temporary, path)


def _read(folder: Folder, log: Callable[[str], None]) -> Failures:
    found: Any = folder.read(FILE)
    if found is None:
        return {}
    try:
        plain = json.loads(found.data)["plain"]
        if all(isinstance(why, str) for why in plain.values()):
            return plain
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    log(f"note: {folder}/{FILE} cannot be read; kernels are checked again")
    return {}
