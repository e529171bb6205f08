"""The kernels of a run are held to their equations on its device; an op that differs goes plain.

What is checked is what the run's own step calls (`rmt_tpu.analysis.device_calls`), once for a
device kind and versions: the user's cache folder has a record of each call. What was decided stays
in the run folder, so that the run goes on with it wherever that is.
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
from pallas_kernels.platform import Called, collecting_calls, taking_plain
from rmt_tpu.config import RunConfig
from rmt_tpu.data import Batch
from rmt_tpu.distributed import processes
from rmt_tpu.errors import RunError
from rmt_tpu.execution.kernels import preferred
from rmt_tpu.storage import Folder
from rmt_tpu.training.run import Run

FILE = "kernels.json"
VARIABLE = "RMT_TPU_CACHE"
How = Literal["auto", "off"]
Why = dict[str, str]  # of the ops that differ, by name, in a line
_SECONDS = 3600.0  # that another process may take longer with its checks
_PLATFORMS = {"tpu": "tpu", "gpu": "cuda"}


@contextlib.contextmanager
def decided(
    config: RunConfig,
    run: Run,
    folder: Folder,
    say: Callable[[str], None],
    *,
    anew: bool,
    how: How = "auto",
) -> Iterator[Mapping[str, str]]:
    """Within, ops whose kernels differ from their equations take their plain form.

    What the run folder has of an earlier start holds; what is found in this one is added to it. On
    a CPU, which has no kernels, nothing is traced or read.

    Args:
      config: of the run, resolved.
      run: whose step is traced for the calls of its kernels.
      folder: of the run.
      say: prints a line.
      anew: the run begins again, and what was decided is forgotten.
      how: "off" checks nothing; what is in the folder holds.
    """
    if anew and processes.is_first():
        folder.delete(FILE)
    platform = _platform()
    if platform is None:
        yield {}
        return
    kept = processes.from_first(
        _read(folder, say) if processes.is_first() else {}, "what was decided of kernels"
    )
    found = {}
    if how == "auto":
        with taking_plain(kept):
            calls = calls_of(config, run)
        with preferred(config.model):
            own = _differences(calls, platform, config.model.kernels)
        found = agreed(
            processes.exchange(json.dumps(own), "the check of kernels", timeout=_SECONDS)
        )
    kind = jax.local_devices()[0].device_kind
    for name, why in found.items():
        say(f"kernels of {name} are not taken on {kind}, its plain form is: {why}")
    plain = kept | found
    if found and processes.is_first():
        try:
            folder.write(FILE, (json.dumps({"plain": plain}, indent=1) + "\n").encode())
        except RunError as error:
            say(f"note: what was decided of kernels is not kept: {error}; the run goes on")
    with taking_plain(plain):
        yield plain


def calls_of(config: RunConfig, run: Run) -> list[Called]:
    """The calls of a run's step that kernels serve, on one platform or another."""
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    state = jax.tree.map(place, run.abstract, run.state_shardings)
    shape = config.train.batch_size, config.data.seq_len
    ids, weights = (place(jax.ShapeDtypeStruct(shape, t), run.batch_sharding) for t in _DTYPES)
    with collecting_calls() as calls:
        run.jitted_step().trace(state, Batch(ids, ids, ids, weights))
    return calls


_DTYPES = (jnp.int32, jnp.float32)  # of a batch's numbers of tokens, and of its weights


def agreed(of_processes: Sequence[str]) -> Why:
    """What one process found differs for all: the reason is that of the first that has one."""
    found: Why = {}
    for text in of_processes:
        found = json.loads(text) | found
    return dict(sorted(found.items()))


def _platform() -> str | None:
    """Of this machine's devices, as kernels name it; None if there are no kernels for it."""
    return _PLATFORMS.get(jax.default_backend())


def _differences(calls: Sequence[Called], platform: str, kernels: str) -> Why:
    """The ops whose kernels differ on this process's device, by its records or by a check."""
    from rmt_tpu.analysis import device_calls, device_check  # they load much

    found: Why = {}
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
    """Of records: $RMT_TPU_CACHE, or rmt_tpu in the user's cache folder; and in it `kernels`."""
    if given := os.environ.get(VARIABLE):
        return Path(given) / "kernels"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "rmt_tpu" / "kernels"


def _key(name: str, call: str, kernels: str) -> dict[str, str]:
    """What a record holds for: a call, a device kind, compilers, and the kernels' sources."""
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
    """What differs by the record, "" if nothing does; None if there is none that can be read."""
    try:
        found = json.loads(_path(key).read_text(encoding="utf-8"))
        differs = found["differs"] if found["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return differs if isinstance(differs, str) else None


def _record(key: Mapping[str, str], differs: str) -> None:
    """Leaves a record; where that cannot be, the next run checks again."""
    path = _path(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=path.parent)
        with open(handle, "w", encoding="utf-8") as file:
            json.dump({"key": key, "differs": differs}, file, indent=1)
        os.replace(beside, path)


def _read(folder: Folder, say: Callable[[str], None]) -> Why:
    found: Any = folder.read(FILE)
    if found is None:
        return {}
    try:
        plain = json.loads(found.data)["plain"]
        if all(isinstance(why, str) for why in plain.values()):
            return plain
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    say(f"note: {folder}/{FILE} cannot be read; kernels are checked again")
    return {}
