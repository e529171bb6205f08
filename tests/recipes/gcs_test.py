"""Runs in a bucket, through a real server on loopback: the same numbers as on a local disk."""

import itertools
import json
import re
import time
from pathlib import Path

import pytest

from tests import cli, gcs_server

pytestmark = pytest.mark.xdist_group("recipes")

BUCKET = "bucket"
# Less than the clients of the service try for when nobody tells them otherwise.
LIMIT_SECONDS = 110

KILL_IN_COMMIT = """
import os
from rmt_tpu.storage.gcs import GcsFolder
usual = GcsFolder.create
def create(self, name, data):
    if f"{{self}}/{{name}}".endswith("checkpoints/{step}/COMMIT"):
        os.kill(os.getpid(), 9)
    return usual(self, name, data)
GcsFolder.create = create
"""
KILL_IN_APPEND = """
import os
from google.cloud.storage import Blob
usual = Blob.compose
def compose(self, sources, **options):
    if b'"step": {step},' in sources[-1].download_as_bytes():
        os.kill(os.getpid(), 9)
    return usual(self, sources, **options)
Blob.compose = compose
"""
KILL_IN_ARRAYS = """
import os, tensorstore
usual = tensorstore.open
def open(spec, *args, **options):
    if "/checkpoints/{step}/" in str(spec) and "final" in str(spec):
        os.kill(os.getpid(), 9)
    return usual(spec, *args, **options)
tensorstore.open = open
"""
SIGTERM = """
import os, signal
from rmt_tpu.training.loop import Loop
usual = Loop.take_step
def _step(self, train_step, step, batches):
    usual(self, train_step, step, batches)
    if step == {step}:
        os.kill(os.getpid(), signal.SIGTERM)
Loop.take_step = _step
"""


@pytest.fixture
def server(object_server):
    """With all that the module's tests have left in the bucket."""
    object_server.requests.clear()
    yield object_server
    object_server.faults.clear()


@pytest.fixture(scope="module")
def in_bucket(object_server):
    """A run that nothing has happened to, and what it told."""
    url = f"gs://{BUCKET}/runs/whole"
    done = cli.succeed("train", *flags(url))
    return url, done


def flags(url, *more):
    return "--preset=rmt-tiny", *cli.tiny(*cli.OFTEN, *more, f"--workdir={url}")


def assert_same_run(server, url, often_saved):
    assert cli.curves(url) == cli.curves(often_saved)
    name = f"{url.removeprefix(f'gs://{BUCKET}/')}/samples.txt"
    assert server.read(BUCKET, name) == (often_saved / "samples.txt").read_bytes()


def committed(server, folder):
    """The steps that count."""
    names = server.names(BUCKET, f"{folder}checkpoints/")
    return [int(name.split("/")[-2]) for name in names if name.endswith("/COMMIT")]


def files(server, folder):
    """What is in a folder of the bucket, but for what another package writes."""
    names = {name.removeprefix(folder) for name in server.names(BUCKET, folder)}
    return {name for name in names if not name.startswith("tensorboard/")}


@pytest.mark.slow
def test_everything_lands_in_the_bucket(server, in_bucket, often_saved):
    url, done = in_bucket
    assert_same_run(server, url, often_saved)
    names = files(server, "runs/whole/")
    assert {"config.json", "metrics.jsonl", "samples.txt", "plots/loss.png"} <= names
    here = {str(path.relative_to(often_saved)) for path in often_saved.rglob("*") if path.is_file()}

    def kinds(names):
        """Without what is chosen by chance."""
        return {re.sub(r"attempt-[^/]*", "attempt", name) for name in names}

    assert kinds(names) == kinds(name for name in here if not name.startswith("tensorboard/"))
    assert server.read(BUCKET, "runs/whole/plots/loss.png").startswith(b"\x89PNG")
    for name in names:
        if name.endswith(".json"):
            json.loads(server.read(BUCKET, f"runs/whole/{name}"))
    told = done.stdout + done.stderr
    assert server.url not in told and "Traceback" not in told and "Warning" not in told
    assert not (cli.ROOT / "gs:").exists()


@pytest.mark.slow
def test_it_goes_on_and_can_be_looked_at(server, in_bucket):
    url, _ = in_bucket
    before = files(server, "runs/whole/")
    again = cli.succeed("train", *flags(url))
    assert f"resuming {url} from step 48" in again.stderr
    assert files(server, "runs/whole/") == before


@pytest.mark.slow
def test_generate_reads_a_run_in_a_bucket(server, in_bucket, often_saved):
    url, _ = in_bucket
    how = ("--prompt=the quick ", "--seed=3", "--max_tokens=20")
    texts = [cli.succeed("generate", f"--workdir={w}", *how).stdout for w in (url, often_saved)]
    assert texts[0] == texts[1] != ""
    assert {method for method, _ in server.requests} == {"GET"}, "it writes nothing"


@pytest.mark.slow
def test_evaluate_keeps_its_answers_in_a_bucket(server, in_bucket, often_saved, tmp_path):
    """Data, answers and results are there; nothing is asked twice."""
    url, _ = in_bucket
    lines = "".join(json.dumps({"text": cli.TEXT.read_text()[:n]}) + "\n" for n in (30, 35, 40))
    (tmp_path / "lambada_openai.jsonl").write_text(lines)
    server.replace(BUCKET, "eval/lambada_openai.jsonl", lines.encode())
    told = []
    for run, data, output in (
        (url, f"gs://{BUCKET}/eval", f"gs://{BUCKET}/told"),
        (url, f"gs://{BUCKET}/eval", f"gs://{BUCKET}/again"),
        (often_saved, tmp_path, tmp_path / "told"),
    ):
        where = f"--workdir={run}", f"--data_dir={data}", f"--output={output}"
        cli.succeed("evaluate", *where, "--tasks=lambada_openai")
        (results,) = json.loads(read(server, f"{output}/evaluation.json")).values()
        told.append(results[0])
    first, again, here = told
    assert [one["requests_answered_now"] for one in told] == [3, 0, 3]
    assert first["metrics"] == again["metrics"] == here["metrics"]
    names = files(server, "told/")
    assert {"evaluation.json", "evaluation.md", "plots/evaluation.png"} <= names
    assert any(name.startswith("evaluation/") for name in files(server, "runs/whole/"))


def read(server, location):
    """A file, in the bucket or here."""
    if not location.startswith("gs://"):
        return Path(location).read_bytes()
    return server.read(BUCKET, location.removeprefix(f"gs://{BUCKET}/"))


@pytest.mark.slow
def test_kills_and_sigterm(server, often_saved):
    url = f"gs://{BUCKET}/runs/killed"
    ends = [
        (KILL_IN_ARRAYS, 12, -9),
        (KILL_IN_COMMIT, 24, -9),
        (KILL_IN_APPEND, 30, -9),
        (SIGTERM, 40, 0),
    ]
    for code, step, return_code in ends:
        done = committed(server, "runs/killed/")
        process = cli.start("train", *flags(url), first=code.format(step=step))
        out, err = process.communicate()
        assert process.returncode == return_code, err
        found = re.findall(f"resuming {url} from step (.*)", err)
        assert found == [str(max(done))] if done else found == []
    assert f"stopped at step 40, saved in {url}" in out
    assert max(committed(server, "runs/killed/")) == 40
    cli.succeed("train", *flags(url))
    assert_same_run(server, url, often_saved)
    # Every checkpoint that is left is whole, and nothing is left of those that never were.
    attempts = {}
    for name in server.names(BUCKET, "runs/killed/checkpoints/"):
        _, _, _, step, attempt = name.split("/", 4)
        attempts.setdefault(step, set()).add(attempt.split("/")[0])
    assert all(len(found) == 2 and "COMMIT" in found for found in attempts.values()), attempts


@pytest.mark.slow
def test_a_service_that_is_often_busy_and_loses_answers(server, often_saved):
    """One of nine requests is refused, or its answer lost: all come again."""
    outcomes = itertools.cycle([(503, "busy"), gcs_server.LOST_ANSWER, gcs_server.LOST_REQUEST])
    count = itertools.count(1)
    server.faults.append(lambda method, url: None if next(count) % 9 else next(outcomes))
    url = f"gs://{BUCKET}/runs/busy"
    cli.succeed("train", *flags(url))
    assert_same_run(server, url, often_saved)


@pytest.mark.slow
def test_a_service_that_goes_away_ends_the_run_with_one_line(server):
    """Not at once: it is asked again for a while. Nothing goes on unsaved."""
    denied = gcs_server.fault((403, "access was taken away"), url="checkpoints/12/")
    server.faults.append(denied)
    url = f"gs://{BUCKET}/runs/denied"
    error = cli.fail("train", *flags(url), code=1)
    assert f"{url}/checkpoints/12" in error and "access was taken away" in error
    server.faults.clear()
    assert "runs/denied/checkpoints/6/COMMIT" in server.names(BUCKET)
    assert "runs/denied/checkpoints/12/COMMIT" not in server.names(BUCKET)


def failed(recipe, *arguments, **options):
    """The one line, which comes in time."""
    begin = time.monotonic()
    error = cli.fail(recipe, *arguments, **options)
    assert time.monotonic() - begin < LIMIT_SECONDS
    assert "http://" not in error
    return error


@pytest.mark.slow
def test_errors_are_one_line(server):
    new = f"gs://{BUCKET}/runs/new"
    error = failed("train", *flags("gs://no-such-bucket/run"))
    assert "there is no bucket gs://no-such-bucket" in error
    error = failed("train", *flags("gs://No_Such_Bucket/run"))
    assert "'gs://No_Such_Bucket/run'" in error and "legal" in error
    server.faults.append(gcs_server.fault((403, "bot@p does not have access")))
    for recipe, given in (("train", flags(new)), ("generate", [f"--workdir={new}"])):
        assert f"{new}: no permission: bot@p does not have access" in failed(recipe, *given)
    server.faults[:] = [gcs_server.fault(gcs_server.LOST_REQUEST)]
    assert f"{new}: the service cannot be reached" in failed("train", *flags(new))
    nowhere = {"STORAGE_EMULATOR_HOST": "", "NO_GCE_CHECK": "true", "CLOUDSDK_CONFIG": "/nowhere"}
    assert " needs credentials, and" in failed("train", *flags(new), env=nowhere)
    assert server.names(BUCKET, "runs/new") == []


@pytest.mark.slow
def test_a_run_of_another_model_is_refused(server, in_bucket):
    url, _ = in_bucket
    before = {name: server.read(BUCKET, name) for name in server.names(BUCKET)}
    error = failed("train", *flags(url, "--set=model.num_layers=3"))
    assert url in error and "num_layers" in error
    error = failed("generate", f"--workdir=gs://{BUCKET}/runs/nothing")
    assert f"gs://{BUCKET}/runs/nothing" in error
    assert before == {name: server.read(BUCKET, name) for name in server.names(BUCKET)}
