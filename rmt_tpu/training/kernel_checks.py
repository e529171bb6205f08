"""Checks of a run's kernels on the device; an operation that fails uses plain JAX instead.

Each kernel call in the run's train step (`rmt_tpu.analysis.device_calls`) is compared with the
equations that it implements. On a GPU, operations whose kernels are not the default are also timed.
Such an operation uses its kernel or plain JAX, whichever is faster. A record in the user's cache
folder ensures that each call is checked and timed only once per kind of device and set of versions.
The choices are also written to the run folder, so that the run makes the same choices when it
resumes on any machine.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import tuned
from pallas_kernels.platform import (
    TracedCall,
    collecting_calls,
    preferring,
    taking_kernels,
    taking_plain,
)
from rmt_tpu.config import RunConfig
from rmt_tpu.data import Batch
from rmt_tpu.distributed import processes
from rmt_tpu.errors import RunError
from rmt_tpu.execution.kernels import preferred
from rmt_tpu.runs.environment import source_hash
from rmt_tpu.storage import Folder
from rmt_tpu.training.run import PreparedRun

FILE = "kernels.json"
VARIABLE = "RMT_TPU_CACHE"
CheckMode = Literal["auto", "off"]
# Maps each operation whose kernel failed its check to the reason, on one line.
Failures = dict[str, str]
_SECONDS = 3600.0  # Time limit for the checks of all processes, in seconds.
_PLATFORMS = {"tpu": "tpu", "gpu": "cuda"}


class Choices(NamedTuple):
    """The choices of a run between kernels and plain JAX, for operations that have a choice.

    Attributes:
      plain: maps each operation whose kernel failed its check to the reason, on one line.
      seconds: maps each operation that was timed to its seconds with the kernel and in plain JAX.
        Both are sums over the different calls of the operation.
    """

    plain: Failures = {}
    seconds: Mapping[str, tuple[float, float]] = {}

    @property
    def uses_kernels(self) -> list[str]:
        """The operations that were timed, that have faster kernels, and that are not in `plain`."""
        return [
            k for k, (kernel, xla) in self.seconds.items() if kernel < xla and k not in self.plain
        ]

    @contextlib.contextmanager
    def applied(self, kernels: str) -> Iterator[None]:
        """Make these choices the defaults of all operations in the context.

        Times decide only if `kernels`, the value of `ModelConfig.kernels`, is "auto".
        """
        faster = self.uses_kernels if kernels == "auto" else []
        slower = self.seconds.keys() - faster if kernels == "auto" else ()
        with taking_plain({*self.plain, *slower}), taking_kernels(faster):
            yield


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

    On a GPU, operations whose kernels are not the default are timed if `config.model.kernels` is
    "auto", and use their kernels in the `with` body if these are faster. The choices that an
    earlier start of the run wrote to its folder still apply; choices are added for operations that
    have none yet. A CPU has no kernels, so nothing is checked there.

    Args:
      config: the run's config, with every "auto" resolved.
      run: the run whose train step is traced to find its kernel calls.
      folder: the run folder.
      log: a function that prints a line.
      restart: whether the run restarts from scratch, in which case the choices in the folder are
        deleted.
      how: "auto" checks the kernels; "off" only applies the choices in the folder.

    Yields:
      The operations that use plain JAX because their kernels failed, each with the reason.
    """
    if restart and processes.is_first():
        folder.delete(FILE)
    platform = accelerator_platform()
    if platform is None:
        yield {}
        return
    plain, seconds = processes.from_first(
        _read(folder, log) if processes.is_first() else Choices(), "reading earlier kernel checks"
    )
    earlier = found = Choices(plain, seconds)
    if how == "auto":
        found = _check(config, run, platform, earlier, log)
    if found != earlier and processes.is_first():
        try:
            folder.write(FILE, (json.dumps(found._asdict(), indent=1) + "\n").encode())
        except RunError as error:
            log(f"note: the kernel checks cannot be saved: {error}; the run continues")
    with found.applied(config.model.kernels):
        yield found.plain


def _check(
    config: RunConfig,
    run: PreparedRun,
    platform: str,
    earlier: Choices,
    log: Callable[[str], None],
) -> Choices:
    """Return `earlier`, extended by choices for the run's operations that have no choice yet."""
    timing = platform == "cuda" and config.model.kernels == "auto"
    with (
        earlier.applied(config.model.kernels),
        preferring("pallas") if timing else contextlib.nullcontext(),
    ):
        calls = calls_of(config, run)
    with preferred(config.model):
        kernels = "pallas" if timing else config.model.kernels
        own_plain, unchecked = _differences(calls, platform, kernels)
        for name, why in unchecked.items():
            log(f"note: {name} is checked at the next start, because this check failed: {why}")
        untimed = [
            call
            for call in calls
            if platform not in call.by_default
            and call.name not in (*own_plain, *unchecked, *earlier.plain, *earlier.seconds)
        ]
        own_seconds = _times(untimed, platform, log) if timing else {}
    texts = processes.exchange(
        json.dumps([own_plain, own_seconds]), "the check of kernels", timeout=_SECONDS
    )
    plain, seconds = zip(*map(json.loads, texts), strict=True)
    found, kind = merge_failures(plain), jax.local_devices()[0].device_kind
    for name, why in found.items():
        log(f"{name} uses plain JAX on {kind}, because a kernel failed its check: {why}")
    times = {name: (kernel, xla) for name, (kernel, xla) in seconds[0].items() if name not in found}
    for name, (kernel, xla) in times.items():
        choice = "its kernels" if kernel < xla else "plain JAX"
        log(
            f"{name} uses {choice} on {kind}: {1e3 * kernel:.3g} ms in its kernels, "
            f"{1e3 * xla:.3g} ms in plain JAX"
        )
    return Choices(earlier.plain | found, dict(earlier.seconds) | times)


def calls_of(config: RunConfig, run: PreparedRun) -> list[TracedCall]:
    """Return the calls in a run's train step of operations with a kernel on some platform."""
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    state = jax.tree.map(place, run.abstract, run.state_shardings)
    shape = config.train.batch_size, config.data.seq_len
    ids, weights = (place(jax.ShapeDtypeStruct(shape, t), run.batch_sharding) for t in _DTYPES)
    with collecting_calls() as calls:
        run.jitted_step().trace(state, Batch(ids, ids, ids, weights))
    return calls


_DTYPES = (jnp.int32, jnp.float32)  # The dtypes of a batch's token ids and of its loss weights.


def merge_failures(failures_by_process: Sequence[Failures]) -> Failures:
    """Return the operations whose kernels failed on any process.

    Args:
      failures_by_process: the `Failures` that each process found, in process order.

    Returns:
      The operations in alphabetical order, each with the reason from the first process that has
      one.
    """
    found: Failures = {}
    for failures in failures_by_process:
        found = failures | found
    return dict(sorted(found.items()))


def accelerator_platform() -> str | None:
    """Return "tpu" or "cuda", or None if the platform of the devices has no kernels."""
    return _PLATFORMS.get(jax.default_backend())


def _differences(
    calls: Sequence[TracedCall], platform: str, kernels: str
) -> tuple[Failures, Failures]:
    """Return the operations whose kernels fail on this process's device, with the reasons.

    A call with a record from an earlier run is not checked again. The second result is the
    operations with a call that could not be checked, for example for lack of memory. Nothing is
    recorded of such a call.
    """
    # These modules are imported here because they are slow to load.
    from rmt_tpu.analysis import device_calls, device_check

    implementation = "pallas" if kernels == "pallas" else None
    found: Failures = {}
    unchecked: Failures = {}
    for name, cases in device_calls.cases_of(calls, platform).items():
        for case in cases:
            key = record_key(name, f"{case.op} {case.size}", kernels)
            why = _recorded(key, "differs", str)
            if why is None:
                row = device_check.check(case, implementation, timed=False)
                why = "" if row.ok else f"{case.op} {case.size} {row.verdict}"
                if row.inconclusive:
                    unchecked.setdefault(name, why)
                    continue
                _record(key, differs=why)
            if why:
                found.setdefault(name, why)
    return found, {name: why for name, why in unchecked.items() if name not in found}


def _times(
    calls: Sequence[TracedCall], platform: str, log: Callable[[str], None]
) -> dict[str, list[float]]:
    """Return the seconds that each operation takes with its kernel and in plain JAX.

    The seconds are sums over the different calls of an operation. A call with a record from an
    earlier run is not timed again. An operation that cannot be timed, for example for lack of
    memory, is left out, and a note is printed.
    """
    from rmt_tpu.analysis import device_calls, device_check

    found = {}
    for name, cases in device_calls.cases_of(calls, platform).items():
        total = [0.0, 0.0]
        try:
            for case in cases:
                key = record_key(name, f"{case.op} {case.size}", "both, timed")
                seconds = _recorded(key, "seconds", list)
                if seconds is None:
                    seconds = [device_check.time_case(case, kind) for kind in ("pallas", "xla")]
                    _record(key, seconds=seconds)
                total = [a + b for a, b in zip(total, seconds, strict=True)]
        except Exception as error:  # A failed timing must not end the run.
            words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            log(f"note: {name} cannot be timed, so it uses plain JAX: {words}")
            continue
        found[name] = total
    return found


# Records of kernel checks --------------------------------------------------------------------


def cache_folder() -> Path:
    """Return the folder for the records of kernel checks.

    It is $RMT_TPU_CACHE/kernels if the variable is set, and otherwise rmt_tpu/kernels in the user's
    cache folder.
    """
    if folder := os.environ.get(VARIABLE):
        return Path(folder) / "kernels"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "rmt_tpu" / "kernels"


def record_key(name: str, call: str, kernels: str) -> dict[str, str]:
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
        "source": source_hash(pallas_kernels),
    }


def _path(key: Mapping[str, str]) -> Path:
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"{name[:32]}.json"


def _recorded(key: Mapping[str, str], field: str, kind: type) -> Any:
    """Return a field of the record with this key, or None if there is no valid record.

    The field "differs" is the reason for a failure, or "" for a success. The field "seconds" is a
    list with the seconds in the kernel and in plain JAX.
    """
    try:
        found = json.loads(_path(key).read_text(encoding="utf-8"))
        value = found[field] if found["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return value if isinstance(value, kind) else None


def _record(key: Mapping[str, str], **fields: Any) -> None:
    """Write a record; if it cannot be written, the next run repeats the check."""
    path = _path(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with open(handle, "w", encoding="utf-8") as file:
            json.dump({"key": key} | fields, file, indent=1)
        os.replace(temporary, path)


def _read(folder: Folder, log: Callable[[str], None]) -> Choices:
    found: Any = folder.read(FILE)
    if found is None:
        return Choices()
    try:
        values = json.loads(found.data)
        plain, seconds = values["plain"], values.get("seconds", {})
        pairs = {name: (float(kernel), float(xla)) for name, (kernel, xla) in seconds.items()}
        if all(isinstance(why, str) for why in plain.values()):
            return Choices(plain, pairs)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    log(f"note: {folder}/{FILE} cannot be read; kernels are checked again")
    return Choices()
