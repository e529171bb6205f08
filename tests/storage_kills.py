"""Savers of checkpoints are killed at random instants; whatever is left must be right.

After each kill the last good step is what a restore returns, with every number right. Savers are
forked from a process that has imported all they need, and save steps 1, 2, 3, ... as fast as they
can. They tell of every step that they were told is committed: none of these may be lost. Each saver
goes on from what the one killed before it left behind.

A trial that ends otherwise is an AssertionError. `gs` is `tests/gcs_server.py` in this process.
"""

import collections
import contextlib
import multiprocessing
import os
import random
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rmt_tpu import storage
from rmt_tpu.checkpoint import Checkpointer, Retention
from rmt_tpu.distributed import processes
from rmt_tpu.distributed.rendezvous import Member
from rmt_tpu.errors import RmtError
from tests import gcs_server

KEPT = 2  # steps
SECONDS = 0.5  # after a saver's first save has begun, within which it is killed
JOIN_SECONDS = 600.0
PARTNER_SECONDS = 2.0  # that a process waits for another one within a save

# Where in a save it died, from what it left; in the order in which a save gets there.
PHASES = ("between saves", "arrays made", "pieces written", "manifest written", "old steps going")

# What is saved ------------------------------------------------------------------------------------


def values(step: int) -> dict[str, np.ndarray]:
    """The state of a step: all that is right, to the last bit."""
    weights = {
        f"w{i}": np.arange(256, dtype=np.float32).reshape(32, 8) + 1000 * step + 256 * i
        for i in range(3)
    }
    return weights | {"mean": np.full(5, step / 3, np.float32), "step": np.int32(step)}


def on_devices(step: int) -> dict[str, Any]:
    """`values` of several devices, and processes: matrices divided, the rest on each of them."""
    mesh = Mesh(np.array(jax.devices()), "x")

    def place(x: np.ndarray) -> jax.Array:
        spec = PartitionSpec("x") if np.ndim(x) == 2 else PartitionSpec()
        return jax.make_array_from_callback(np.shape(x), NamedSharding(mesh, spec), x.__getitem__)

    return {name: place(np.asarray(x)) for name, x in values(step).items()}


def restore(checkpoints: Checkpointer, step: int | None = None) -> int:
    """The step that a restore returns, every number of which must be right."""
    found, tree, meta = checkpoints.restore(values(0), step)
    for name, x in values(found).items():
        np.testing.assert_array_equal(tree[name], x, f"{name} of step {found}")
    assert meta == {"step": found}
    return found


# Where it is saved --------------------------------------------------------------------------------


class Place(NamedTuple):
    """A folder of checkpoints; `server` is what is behind gs://."""

    name: str
    url: str
    server: gcs_server.Server | None

    @property
    def environment(self) -> dict[str, str]:
        return self.server.environment() if self.server else {}

    @property
    def files(self) -> ts.KvStore:
        """All files in it, to be looked at and damaged."""
        folder = storage.open_folder(self.url)
        return ts.KvStore.open(folder.kvstore(), context=folder.context()).result()

    def names(self) -> list[str]:
        return sorted(name.decode() for name in self.files.list().result())

    def checkpoints(self, told: list[str] | None = None) -> Checkpointer:
        report = (lambda line: None) if told is None else told.append
        return Checkpointer(self.url, retention=Retention(last=KEPT), report=report)


@contextlib.contextmanager
def places(kinds: tuple[str, ...] = ("local", "gs")) -> Iterator[Callable[[str], Place]]:
    """A function that gives a new, empty place of a kind."""
    numbers = iter(range(10**9))
    with contextlib.ExitStack() as stack:
        local = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rmt-trials-")))
        server = stack.enter_context(gcs_server.running("bucket")) if "gs" in kinds else None
        if server:
            usual = {name: os.environ.get(name) for name in server.environment()}
            os.environ |= server.environment()
            stack.callback(_set_environment, usual)

        def new(kind: str) -> Place:
            name = f"place-{next(numbers)}"
            if kind == "gs":
                return Place(kind, f"gs://bucket/{name}", server)
            return Place(kind, str(local / name), None)

        yield new


def _set_environment(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# Savers -------------------------------------------------------------------------------------------


def _saver(
    told: Connection, url: str, environment: dict[str, str], member: Member | None, last: int | None
) -> None:
    """A process that saves until it is killed, or `last` steps."""
    # What the clients' libraries say of their tries, and of those that were killed.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        _set_environment(environment | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"})
        if member:
            processes.initialize(member, timeout=JOIN_SECONDS)
            jax.devices()  # where JAX waits for the other process, for minutes
            processes.join_timeout = JOIN_SECONDS if last else PARTNER_SECONDS
        step, checkpoints = 0, Checkpointer(url, retention=Retention(last=KEPT))
        if processes.from_first(checkpoints.steps(), "steps"):
            step = restore(checkpoints)
        told.send(("begins", step))
        until = None if last is None else step + last
        while step != until:
            step += 1
            checkpoints.begin_save(step, on_devices(step), {"step": step})
            told.send(("committed", checkpoints.wait().step))
        if member:
            processes.finish()
            # As when a program ends, which these processes do not: else process 0, which holds what
            # all agreed on, could be gone before the other one has read it.
            processes._watch.stop()
            jax.distributed.shutdown()
    except (RmtError, jax.errors.JaxRuntimeError) as error:
        told.send(("failed", str(error).split("\n")[0]))
        told.close()
        os._exit(1)  # without JAX's own farewell, which waits for the dead
    except BaseException:
        told.send(("broken", traceback.format_exc()))
        raise


class Savers:
    """Some processes that save as one."""

    def __init__(self, place: Place, count: int, *, last: int | None = None):
        coordinator = f"127.0.0.1:{_free_port()}"
        self.processes, self.pipes = [], []
        for number in range(count):
            member = Member(coordinator, count, number) if count > 1 else None
            read, write = forked.Pipe(duplex=False)
            arguments = (write, place.url, place.environment, member, last)
            self.processes.append(forked.Process(target=_saver, args=arguments, daemon=True))
            self.processes[-1].start()
            write.close()
            self.pipes.append(read)

    def first_step(self) -> int:
        """The step that they go on from; returns when the first save begins."""
        steps = set()
        for pipe in self.pipes:
            assert pipe.poll(JOIN_SECONDS), "a saver does not begin"
            what, step = pipe.recv()
            assert what == "begins", step
            steps.add(step)
        (step,) = steps
        return step

    def end(self) -> tuple[int, list[str]]:
        """The last step that was called committed, and what failed, when all have ended."""
        committed, failed = 0, []
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join(JOIN_SECONDS)
            assert process.exitcode is not None, "a saver hangs"
            with contextlib.suppress(EOFError, ConnectionResetError):
                while True:
                    what, value = pipe.recv()
                    assert what != "broken", value
                    if what == "committed":
                        committed = max(committed, value)
                    else:
                        failed.append(value)
            pipe.close()
        return committed, failed


forked = multiprocessing.get_context("forkserver")
forked.set_forkserver_preload(["tests.storage_failures"])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# Kills --------------------------------------------------------------------------------------------


class Kills(NamedTuple):
    """The outcome of killing savers in one place.

    Attributes:
      place: "local" or "gs".
      processes: that saved together; one of them was killed, or all.
      phases: how often they died in which phase.
      all_killed: trials in which all were.
      restored_newest: trials after which a restore returned the newest committed step.
      saves: committed in all trials together.
    """

    place: str
    processes: int
    phases: collections.Counter
    all_killed: int
    restored_newest: int
    saves: int


def kill(place: Place, processes: int, trials: int, seed: int = 0) -> Kills:
    """Kills savers `trials` times at random instants, and checks after each what is left."""
    rng = random.Random(f"{seed} {place.name} {processes}")
    _run_to_the_end(place, processes)
    phases, newest, all_killed = collections.Counter(), 0, 0
    first = restored = restore(place.checkpoints())
    for _ in range(trials):
        before = set(place.names())
        savers = Savers(place, processes)
        assert savers.first_step() >= restored
        time.sleep(rng.uniform(0, SECONDS))
        victims = rng.choice([[n] for n in range(processes)] + [list(range(processes))])
        for victim in victims:
            savers.processes[victim].kill()
        committed, failed = savers.end()
        # The one that was left alone says so; without process 0, in the words of JAX's client. On a
        # slow machine one may also have been late before the kill.
        alone = ["did not reach 'checkpoint", "did not meet at 'checkpoint"]
        if 0 in victims:
            alone += ["UNAVAILABLE", "CANCELLED"]
        assert all(any(words in line for words in alone) for line in failed), failed
        all_killed += len(victims) == processes
        phases[_phase(before, set(place.names()))] += 1
        told = []
        checkpoints = place.checkpoints(told)
        steps = checkpoints.steps()
        restored = restore(checkpoints)
        # A request that was sent before the kill may be answered after the first of these.
        assert (
            steps[-1] <= restored <= checkpoints.steps()[-1] and restored >= committed and not told
        )
        newest += restored == checkpoints.steps()[-1]
        for step in steps:
            assert restore(checkpoints, step) == step
    last = _run_to_the_end(place, processes)
    # Nothing is left but the steps to keep: no rest of any of the killed.
    left = {tuple(name.split("/")[:2]) for name in place.names() if not name.endswith("__lock")}
    assert len(left) == 2 * KEPT and {int(step) for step, _ in left} == {last - 1, last}, left
    return Kills(place.name, processes, phases, all_killed, newest, last - first)


def _run_to_the_end(place: Place, processes: int) -> int:
    savers = Savers(place, processes, last=KEPT)
    step = savers.first_step() + KEPT
    end = savers.end()
    assert end == (step, []), end
    assert restore(place.checkpoints()) == step
    return step


def _phase(before: set[str], after: set[str]) -> str:
    """The phase of a save that `after` is left from."""
    if after == before:
        return "between saves"
    commits = {int(name.split("/")[0]) for name in after if name.endswith("/COMMIT")}
    new = {name for name in after - before if int(name.split("/")[0]) > max(commits)}
    old = {int(name.split("/")[0]) for name in after if int(name.split("/")[0]) < max(commits)}
    if any(name.endswith("manifest.json") for name in new):
        return "manifest written"
    if any("/c/" in name or name.endswith("/c") for name in new):
        return "pieces written"
    if new:
        return "arrays made"
    return "old steps going" if len(commits) > KEPT or old - commits else "between saves"


def kill_table(rows: list[Kills]) -> str:
    lines = [
        f"| place | processes | trials | all killed | {' | '.join(PHASES)} | newest restored "
        "| steps saved |",
        "|---" * (6 + len(PHASES)) + "|",
    ]
    for row in rows:
        died = " | ".join(str(row.phases[phase]) for phase in PHASES)
        lines.append(
            f"| {row.place} | {row.processes} | {row.phases.total()} | {row.all_killed} | {died} | "
            f"{row.restored_newest} | {row.saves} |"
        )
    return "\n".join(lines)
