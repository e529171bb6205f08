"""Several processes train as one: the same numbers, checkpoints, stops, and clear ends."""

import json
import os
import shutil
import socket
import threading
import time
from types import SimpleNamespace

import jax
import pytest

from rmt_tpu.distributed import processes, rendezvous
from rmt_tpu.distributed.rendezvous import Member
from rmt_tpu.errors import RunError, UsageError
from rmt_tpu.runs.metrics import read_metrics
from tests import cli

STEPS = 8
TRAIN = (
    "--preset=rmt-tiny",
    *cli.TINY,
    f"--steps={STEPS}",
    "--batch_size=16",
    "--checkpoint_every=3",
    "--eval_every=5",
)

# SIGTERM to itself in a step, which only one process gets.
STOP_IN_STEP = """
import os, signal
from rmt_tpu.training.loop import Loop
usual = Loop.take_step
def _step(self, train_step, step, batches):
    usual(self, train_step, step, batches)
    if step == {step}:
        os.kill(os.getpid(), signal.SIGTERM)
Loop.take_step = _step
"""


# Each with the number of its devices.
SMALL, LARGE = ("--mesh=data=2", 2), ("--mesh=data=2,fsdp=4", 8)
MESHES = [pytest.param(SMALL, id="data"), pytest.param(LARGE, id="fsdp")]


def numbers(workdir):
    """The rows of metrics without what depends on the machine."""
    return [
        {k: v for k, v in row.items() if not k.startswith("throughput/")}
        for row in read_metrics(workdir)
    ]


@pytest.fixture(scope="module", params=MESHES)
def mesh(request):
    return request.param


@pytest.fixture(scope="module")
def two(mesh, tmp_path_factory):
    """A run of two processes with half of the devices each."""
    workdir = tmp_path_factory.mktemp("two")
    flag, devices = mesh
    ends = cli.launch(2, *TRAIN, flag, f"--workdir={workdir}", devices=devices)
    assert [code for code, *_ in ends] == [0, 0], ends
    return workdir, ends


@pytest.fixture(scope="module")
def one(mesh, tmp_path_factory):
    """The same of one process with all, whose devices add up in the same order.

    They do so through Gloo, as devices of several processes do. Without --coordinator a CPU
    process adds up its devices' numbers in another order.
    """
    workdir = tmp_path_factory.mktemp("one")
    flag, devices = mesh
    ((code, _, errors),) = cli.launch(1, *TRAIN, flag, f"--workdir={workdir}", devices=devices)
    assert code == 0, errors
    return workdir


@pytest.mark.slow
def test_two_processes_have_the_numbers_of_one(one, two):
    assert [row["step"] for row in numbers(one)] == list(range(1, STEPS + 1))
    assert numbers(two[0]) == numbers(one)
    assert (two[0] / "samples.txt").read_text() == (one / "samples.txt").read_text()


@pytest.mark.slow
def test_the_numbers_are_those_of_an_ordinary_run(mesh, one, tmp_path):
    """But for the order of sums, which is about the eighth digit a step."""
    flag, devices = mesh
    cli.succeed("train", *TRAIN, flag, f"--workdir={tmp_path}", devices=devices)
    for ours, theirs in zip(numbers(one), numbers(tmp_path), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.xdist_group("recipes")
def test_of_a_complete_run_the_first_process_tells(trained, tmp_path):
    """Nothing is compiled for it; processes that train are left to the night."""
    copy = shutil.copytree(trained, tmp_path / "run")
    flags = ("--preset=rmt-tiny", *cli.TINY, *cli.SELDOM, SMALL[0], f"--workdir={copy}")
    (first, output, progress), (second, other_output, _) = cli.launch(2, *flags, devices=SMALL[1])
    assert (first, second) == (0, 0), progress
    assert f"{copy} is complete at step {cli.STEPS}" in output + progress
    assert other_output == ""
    # Each process that writes has a file there.
    assert len(list(copy.glob("tensorboard/*"))) == 1 + len(list(trained.glob("tensorboard/*")))


# A spike of the gradient norm in step 5, which comes only once.
SPIKE = """
import math
from rmt_tpu.training.loop import Loop
from rmt_tpu.training.spikes import Spread
usual, left = Loop.watch_gradient_norm, [5]
def watch(self, norm):
    self.spikes = self.spikes._replace(spread=Spread(math.log(norm), 0.01, 60))
    return usual(self, norm * (50 if self.step in left and not left.clear() else 1))
Loop.watch_gradient_norm = watch
"""


@pytest.mark.slow
def test_all_processes_go_back_from_a_spike(tmp_path):
    flags = (*TRAIN, SMALL[0], "--set=train.spike_restarts=1", f"--workdir={tmp_path}")
    ends = cli.launch(2, *flags, devices=SMALL[1], first=(SPIKE, SPIKE))
    assert [code for code, *_ in ends] == [0, 0], ends
    (_, _, progress), _ = ends
    assert "is a spike" in progress and f"resuming {tmp_path} from step 3" in progress
    assert [row["step"] for row in numbers(tmp_path)] == list(range(1, STEPS + 1))
    assert (tmp_path / "spikes.jsonl").read_text().count("\n") == 1


@pytest.mark.slow
def test_only_the_first_process_tells_and_writes(two):
    workdir, ((_, output, progress), (_, other_output, other_progress)) = two
    assert f"done: {STEPS} steps in {workdir}" in output
    assert "process 0 of 2 has connected" in progress and "loss on held-out text" in progress
    assert other_output == "" and "peer ranks" not in output
    told = [line for line in other_progress.splitlines() if "process 1 of 2 has connected" in line]
    assert len(told) == 1 and "loss" not in other_progress
    assert len(list(workdir.glob("tensorboard/*"))) == 1
    assert not list(workdir.glob(".*")), "a temporary file is left"


@pytest.mark.slow
def test_a_checkpoint_of_two_is_as_that_of_one(one, two):
    def files(workdir):
        folder = workdir / f"checkpoints/{STEPS}"
        (attempt,) = folder.glob("attempt-*")
        paths = [p for p in attempt.rglob("*") if p.is_file()]
        return {str(p.relative_to(attempt)): p.read_bytes() for p in paths}

    assert files(two[0]) == files(one)


@pytest.mark.slow
def test_a_run_goes_from_two_processes_to_one_and_back(mesh, one, tmp_path):
    flag, devices = mesh
    flags = (*TRAIN, flag, f"--workdir={tmp_path}")
    # A signal that only one of them gets stops both, a step later, when both know of it.
    ends = cli.launch(2, *flags, devices=devices, first=("", STOP_IN_STEP.format(step=4)))
    assert [code for code, *_ in ends] == [0, 0], ends
    assert f"stopped at step 5, saved in {tmp_path}. To resume, on every host:" in ends[0][1]
    assert all("Traceback" not in errors for *_, errors in ends)
    assert (tmp_path / "checkpoints/5/COMMIT").exists()
    stop = STOP_IN_STEP.format(step=7)
    ((code, _, errors),) = cli.launch(1, *flags, devices=devices, first=(stop,))
    assert code == 0 and f"resuming {tmp_path} from step 5" in errors, errors
    ends = cli.launch(2, *flags, devices=devices)
    assert [code for code, *_ in ends] == [0, 0], ends
    assert f"resuming {tmp_path} from step 7" in ends[0][2]
    assert numbers(tmp_path) == numbers(one)
    assert (tmp_path / "samples.txt").read_text() == (one / "samples.txt").read_text()


# One process gets SIGTERM while it waits for process 0, which is not done yet.
STOP_AT_THE_END = """
import os, signal, threading, time
from rmt_tpu.distributed import processes
usual = processes.finish
def finish():
    if processes.is_first():
        time.sleep(600)
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    usual()
processes.finish = finish
"""


@pytest.mark.slow
def test_a_signal_while_the_last_sample_is_written_ends_all(mesh, tmp_path):
    flags = (*TRAIN, mesh[0], f"--workdir={tmp_path}")
    ends = cli.launch(2, *flags, devices=mesh[1], first=(STOP_AT_THE_END,) * 2)
    assert [code for code, *_ in ends] == [0, 0], ends
    assert all(f"step {STEPS} is saved; repeat the command" in errors for *_, errors in ends)


@pytest.mark.slow
def test_two_processes_go_back_to_an_older_checkpoint(mesh, two, tmp_path):
    copy = shutil.copytree(two[0], tmp_path / "run")
    flag, devices = mesh
    flags = (*TRAIN, flag, f"--workdir={copy}", "--from_step=3")
    ends = cli.launch(2, *flags, devices=devices)
    assert [code for code, *_ in ends] == [0, 0], ends
    (line,) = [line for line in ends[0][2].splitlines() if "going back" in line]
    assert line.endswith("from step 3; checkpoints 6, 8 and later metrics and samples are deleted")
    assert numbers(copy) == numbers(two[0])
    assert all((copy / f"checkpoints/{step}/COMMIT").exists() for step in (3, 6, 8))


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        pytest.param(
            "--seed=3",
            "the config of process 1 differs from that of process 0: train.seed is 0 there, 3 "
            "here; start all processes with the same flags",
            id="config",
        ),
        pytest.param(
            "--from_step=3",
            "the config of process 1 differs from that of process 0: --from_step is null there, 3 "
            "here; ",
            id="step",
        ),
        pytest.param(
            "--workdir={folder}/elsewhere",
            "--workdir={folder}/{where} is not the same folder on process 1 as on process 0; ",
            id="folder",
        ),
    ],
)
def test_processes_that_differ_end_in_one_line_each(flag, reason, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    flags = (*TRAIN, LARGE[0], f"--workdir={tmp_path}/run")
    impatient = "import rmt_tpu.runs.workdir as w; w.SHARED_SECONDS = 0.1; "
    change = f"{impatient}sys.argv.append({flag.format(folder=tmp_path)!r})"
    ends = cli.launch(2, *flags, first=("", change))
    (first, _, told), (second, _, own) = ends
    assert second == 2 and first in (1, 2), ends
    last = own.splitlines()[-1]
    assert last.startswith("error: " + reason.format(folder=tmp_path, where="elsewhere")), own
    # Process 0 has found it itself, or says what process 1 has.
    told_last = told.splitlines()[-1].replace("error: process 1: ", "error: ")
    assert told_last in (last, last.replace("/elsewhere", "/run")), told
    for text in (told, own):
        assert text.count("error:") == 1 and "Traceback" not in text


def test_text_that_differs_is_noticed(tmp_path):
    """Under the same path: each host may have files of its own there."""
    twice = "lambda *args, **kwargs: all(*args, **kwargs) * 2"
    change = f"import rmt_tpu.data as d; all = d.documents; d.documents = {twice}"
    flags = (*TRAIN, LARGE[0], f"--workdir={tmp_path}")
    (first, _, told), (second, _, own) = cli.launch(2, *flags, first=("", change))
    assert (first, second) == (1, 2), told + own
    reason = f"--data={cli.TEXT} does not give the same tokens on process 1 as on process 0"
    assert f"error: process 1: {reason}" in told and f"error: {reason}" in own


@pytest.mark.slow
def test_tasks_that_differ_are_noticed(tmp_path):
    """A process with fewer documents would take part in fewer batches, and the others wait."""
    line = json.dumps({"query": "the quick", "choices": ["brown", "fox"], "gold": 0})
    (tmp_path / "piqa.jsonl").write_text(f"{line}\n" * 4)
    fewer = "lambda task, **more: all(task, **(more | {'limit': 2}))"
    change = f"import rmt_tpu.training.evaluation as e; all = e.read_task; e.read_task = {fewer}"
    asked = "--eval_tasks=piqa", f"--eval_data_dir={tmp_path}"
    flags = (*TRAIN, *asked, LARGE[0], f"--workdir={tmp_path}/run")
    (first, _, told), (second, _, own) = cli.launch(2, *flags, first=("", change))
    assert (first, second) == (1, 2), told + own
    reason = f"--eval_data_dir={tmp_path} does not give the same documents on process 1 as on proc"
    assert f"error: process 1: {reason}" in told and f"error: {reason}" in own


class Store:
    """What processes say to each other, as jax's coordination service keeps it."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value):
        self.values[key] = value

    def key_value_dir_get(self, folder):
        return [(key, value) for key, value in self.values.items() if key.startswith(folder)]


@pytest.mark.parametrize(("code", "others"), [(2, 1), (143, 1), (0, 0)])
def test_the_others_end_as_one_does(code, others, monkeypatch, capsys):
    """With exit code 0 where all is saved, as after a SIGTERM to one of them."""

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(processes.global_state, "client", Store())
    monkeypatch.setattr(processes.global_state, "num_processes", 2)
    monkeypatch.setattr(processes, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(os, "_exit", leave)
    watch = SimpleNamespace(_stop=threading.Event())
    ends = [
        lambda: processes.fail("the line", code),
        lambda: processes._FailureWatcher._look(watch),
    ]
    for process, end, wanted in zip((1, 0), ends, (code, others), strict=True):
        monkeypatch.setattr(processes, "ending", threading.Lock())
        monkeypatch.setattr(processes.global_state, "process_id", process)
        with pytest.raises(SystemExit) as left:
            end()
        assert left.value.code == wanted
    kind = "error: " if code else ""
    assert capsys.readouterr().err == f"{kind}the line\n{kind}process 1: the line\n"


def test_hosts_of_a_slice_that_are_not_connected_are_noticed(monkeypatch):
    processes.check_runtime()
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(UsageError, match="belong to 4 processes, but this run has 1; .*--distrib"):
        processes.check_runtime()


# The roll call -------------------------------------------------------------------------------


def outcome(member: Member, timeout: float, versions: str = "same", tables=()) -> str:
    """What the roll call says to one process: its error, or "all there"."""
    try:
        rendezvous.wait_for_all(member, versions, timeout, rendezvous.Tables(*tables))
    except RunError as error:
        assert "\n" not in str(error)
        return str(error)
    return "all there"


# Seconds: for calls to which some do not come, and for those to which all do.
SHORT, LONG = 3.0, 300.0


def outcomes(*calls: tuple, timeout: float = LONG) -> list[str]:
    """The same for processes that call at the same time: (count, id), maybe versions, tables."""
    coordinator = f"127.0.0.1:{cli.free_port()}"
    found: list[str] = [""] * len(calls)

    def call(number: int, count: int, process: int, *own) -> None:
        found[number] = outcome(Member(coordinator, count, process), timeout, *own)

    threads = [threading.Thread(target=call, args=(n, *c)) for n, c in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LONG)
    return found


def test_all_come():
    assert outcomes((4, 3), (4, 0), (4, 2), (4, 1)) == ["all there"] * 4
    assert outcomes((1, 0)) == ["all there"]


def test_the_missing_are_named_to_all():
    for told in outcomes((4, 0), (4, 2), timeout=SHORT):
        assert told.startswith("processes 1 and 3") and "within 3 s" in told


def test_no_coordinator():
    start = time.monotonic()
    (told,) = outcomes((2, 1), timeout=1.0)
    assert "process 0 cannot be reached at 127.0.0.1:" in told
    assert time.monotonic() - start >= 1
    line = outcome(Member("no-such-host.invalid:1234", 2, 1), 1.0)
    assert "process 0 cannot be reached at no-such-host.invalid:1234" in line


def test_another_number_of_processes():
    for told in outcomes((2, 0), (3, 1)):
        assert "process 1 on " in told and "as one of 3 processes and process 0 as one of 2" in told


def test_two_of_the_same_number():
    told = outcomes((3, 0), (3, 1), (3, 1))
    assert all("two processes were started as process 1" in line for line in told), told


def test_other_versions():
    told = outcomes((2, 0, "jax 1"), (2, 1, "jax 2"))
    assert all("runs jax 2 and process 0 jax 1" in line for line in told), told


def test_other_block_sizes():
    told = outcomes((2, 0, "same", ("a", "gs://b/tuned.json")), (2, 1, "same", ("b", None)))
    words = "has other kernel block sizes (from no file) than process 0 (from gs://b/tuned.json)"
    assert all(words in line for line in told), told


def test_a_taken_port_and_a_stranger():
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        coordinator = f"127.0.0.1:{stranger.getsockname()[1]}"
        told = outcome(Member(coordinator, 2, 0), 1.0)
        assert "process 0 cannot listen on port" in told and "in use" in told
        told = outcome(Member(coordinator, 2, 1), 1.0)
        assert "process 0 does not answer" in told

        def talk():
            connection, _ = stranger.accept()  # of the process above
            connection.close()
            connection, _ = stranger.accept()
            with connection:
                connection.sendall(b"\x00\x00\x12\x04 HTTP/2")
                connection.recv(4096)

        thread = threading.Thread(target=talk)
        thread.start()
        assert "is not process 0 of a new run" in outcome(Member(coordinator, 2, 1), LONG)
        thread.join(LONG)


def test_a_process_that_comes_again_counts_once():
    """One that gave up, or was restarted while the others wait, leaves its place."""
    coordinator = f"127.0.0.1:{cli.free_port()}"
    found: list[str] = []
    first = threading.Thread(target=lambda: found.append(outcome(Member(coordinator, 3, 0), LONG)))
    first.start()
    assert "process 2" in outcome(Member(coordinator, 3, 1), SHORT)
    others = [
        threading.Thread(target=lambda n=n: found.append(outcome(Member(coordinator, 3, n), LONG)))
        for n in (1, 2)
    ]
    for thread in others:
        thread.start()
    for thread in (first, *others):
        thread.join(2 * LONG)
    assert found == ["all there"] * 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("127.0.0.1:1234", "2", "2"), "--process_id=2 is out of range; legal with --num_proc"),
        (("127.0.0.1", "2", "0"), "--coordinator=127.0.0.1 must be HOST:PORT"),
        (("127.0.0.1:99999", "2", "0"), "--coordinator=127.0.0.1:99999 must be HOST:PORT"),
        (("127.0.0.1:1234", "0", "0"), "--num_processes=0 must be at least 1"),
    ],
    ids=["process", "no port", "port", "none"],
)
def test_flags_that_cannot_be(flags, message):
    coordinator, count, process = flags
    with pytest.raises(UsageError, match=message):
        rendezvous.validate(Member(coordinator, int(count), int(process)))


def test_a_process_alone_may_be_a_member():
    rendezvous.validate(Member("127.0.0.1:65535", 1, 0))


def test_slurm_says_which_process_this_is(monkeypatch):
    job = {
        "SLURM_JOB_ID": "4097",
        "SLURM_STEP_NODELIST": "gpu[07-08]",
        "SLURM_NTASKS": "16",
        "SLURM_PROCID": "11",
        "SLURM_LOCALID": "3",
    }
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    member, devices = processes.find_member(1)
    assert member == Member("gpu07:61441", 16, 11)
    assert devices == [3]


def test_usage_and_missing_processes_from_the_command_line(tmp_path):
    flags = (*TRAIN, LARGE[0], f"--workdir={tmp_path}")
    where = (f"--coordinator=127.0.0.1:{cli.free_port()}", "--num_processes=2")
    line = cli.fail("train", *flags, *where)
    assert "missing: --process_id" in line
    line = cli.fail("train", *flags, *where, "--process_id=2")
    assert "--process_id=2 is out of range" in line
    line = cli.fail("train", *flags, *where, "--process_id=0", "--distributed_timeout=1", code=1)
    assert "process 1 of 2 did not connect to 127.0.0.1:" in line and "within 1 s" in line
    line = cli.fail("train", *flags, "--distributed")
    assert "finds no TPU slice" in line and "give --coordinator=HOST:PORT" in line
    assert not os.listdir(tmp_path)
