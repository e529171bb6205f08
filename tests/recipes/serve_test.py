"""recipes.serve as a process of its own, and the official client of what it speaks."""

import concurrent.futures
import json
import subprocess
import sys
import time
import urllib.request

import pytest

import rmt_tpu
from rmt_tpu.generation import Sampling, complete
from tests import cli

pytestmark = pytest.mark.xdist_group("recipes")

NOT_INSTALLED = """
import rmt_tpu.serving
for name in ("app", "server"):
    sys.modules.pop(f"rmt_tpu.serving.{name}", None)
    vars(rmt_tpu.serving).pop(name, None)
sys.modules["uvicorn"] = None
"""


def test_without_the_extra():
    process = cli.start("serve", "--workdir=x", "--port=0", first=NOT_INSTALLED)
    _, errors = process.communicate()
    line = "error: serving needs starlette and uvicorn: pip install 'rmt_tpu[serve]'\n"
    assert (process.returncode, errors) == (2, line)


@pytest.mark.parametrize(
    "flags, words",
    [
        (
            ["--host=192.0.2.1"],
            "--host=192.0.2.1 is not an address of this machine; legal: 127.0.0.1",
        ),
        (["--port=65536"], "--port=65536"),
        (["--max_connections=0"], "--max_connections=0"),
        (["--port=0"], "--workdir=nowhere holds no run"),
        (["--port=0", "--mesh=data=2", "--slots=3"], "--slots=3 "),  # before the model is loaded
    ],
)
def test_usage(flags, words):
    assert words in cli.fail("serve", "--workdir=nowhere", *flags, devices=2)


@pytest.mark.parametrize(
    "template, words",
    [
        (None, "cannot be read: No such file or directory; legal: a file with a chat template"),
        ("{% if %}", ":1 is not a valid template: Expected an expression"),
    ],
)
def test_templates_that_are_none(trained, tmp_path, template, words):
    if template is not None:
        (tmp_path / "t").write_text(template)
    errors = cli.fail("serve", f"--workdir={trained}", "--port=0", f"--chat_template={tmp_path}/t")
    assert f"error: --chat_template: {tmp_path}/t" in errors and words in errors


@pytest.fixture
def serving(trained, tmp_path):
    """A process, and where it is to be reached."""
    (tmp_path / "chat").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    flags = [f"--workdir={trained}", f"--chat_template={tmp_path}/chat"]
    process = cli.start("serve", *flags, "--name=tiny", "--port=0", "--slots=3", "--queue=3")
    try:
        while not process.output().endswith("\n"):
            assert process.poll() is None, process.errors()
            time.sleep(0.1)
        yield process, process.output().splitlines()[0]
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def client(serving):
    import openai  # which takes as long as all the others

    url = serving[1]
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=cli.TIMEOUT) as client:
        yield client


@pytest.mark.slow
def test_the_official_client(serving, client, trained):
    import openai

    prompts = ["the quick ", "a", "", "dog. "]
    samplings = [Sampling(max_tokens=20, seed=n, temperature=0.8) for n in range(4)]
    given = list(zip(prompts, samplings, strict=True))
    wanted = {one.number: one for one in complete(*rmt_tpu.load(trained), given)}
    assert [model.id for model in client.models.list()] == ["tiny"]

    def ask(number, **more):
        how = {"model": "tiny", "max_tokens": 20, "temperature": 0.8, "seed": number}
        return client.completions.create(prompt=prompts[number], **how, **more)

    alone = [ask(number).choices[0].text for number in range(4)]
    assert alone == [wanted[number].text for number in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert [told.choices[0].text for told in pool.map(ask, range(4))] == alone
    with ask(0, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == alone[0]

    how = {"model": "tiny", "max_tokens": 20, "temperature": 0.8, "seed": 0}
    messages = [{"role": "user", "content": prompts[0]}]
    told = client.chat.completions.create(messages=messages, **how)
    assert told.choices[0].message.content == alone[0] and told.usage.prompt_tokens == 11
    page = f"{serving[1].removesuffix('/v1')}/metrics"
    with urllib.request.urlopen(page, timeout=cli.TIMEOUT) as counted:
        lines = dict(line.rsplit(" ", 1) for line in counted.read().decode().splitlines())
    assert float(lines["rmt_new_tokens_total"]) > 60 and lines["rmt_slots"] == "3.0"

    told = ask(0, logprobs=2, echo=True)
    logs = told.choices[0].logprobs
    assert "".join(logs.tokens[:10]) == prompts[0] and len(logs.tokens) == 30
    assert told.choices[0].text == prompts[0] + alone[0]
    assert logs.token_logprobs[10:] == pytest.approx(wanted[0].log_probabilities, abs=1e-4)
    assert all(len(top) in (2, 3) for top in logs.top_logprobs)
    assert told.usage.prompt_tokens == 11 and told.usage.completion_tokens == 20
    greedy = {"n": 2, "extra_body": {"top_k": 1}}
    whole, cut = (ask(0, **greedy, stop=stop).choices for stop in (None, ["q"]))
    assert whole[0].text == whole[1].text
    assert cut[0].text == whole[0].text.partition("q")[0]

    with pytest.raises(openai.BadRequestError, match="logprobs=9 must be a whole") as refused:
        ask(0, logprobs=9)
    assert refused.value.param == "logprobs"
    with pytest.raises(openai.BadRequestError, match="prompt has 101 tokens"):
        client.completions.create(model="tiny", prompt="a" * 100)
    with pytest.raises(openai.NotFoundError, match="model 'huge' is unknown; legal: tiny"):
        client.completions.create(model="huge", prompt="a")
    with pytest.raises(openai.BadRequestError, match="8 texts; legal: at most 6"):
        client.completions.create(model="tiny", prompt=["a", "b"], n=4)
    assert serving[0].errors() == ""


@pytest.mark.slow
def test_a_signal_drains(serving, client):
    import openai

    process, url = serving
    how = {"max_tokens": 60, "temperature": 0.8, "seed": 1, "n": 6, "stream": True}
    stream = client.completions.create(model="tiny", prompt="", **how)
    chunks = [next(stream)]
    process.terminate()
    chunks += list(stream)
    finished = [c.choices[0] for c in chunks if c.choices[0].finish_reason]
    assert {choice.index for choice in finished} == set(range(6))
    assert process.wait() == 0
    output, errors = process.communicate()
    assert output == f"{url}\n" and "Traceback" not in errors
    with pytest.raises(openai.APIConnectionError):
        client.models.list()


# Reads or makes a program: JAX tells of each, and of those that were kept.
COUNTING = """
import atexit, json, runpy, sys
from jax import monitoring

counts = {"/jax/core/compile/backend_compile_duration": 0, "/jax/compilation_cache/cache_hits": 0}

def count(event, *values, **more):
    if event in counts:
        counts[event] += 1

monitoring.register_event_listener(count)
monitoring.register_event_duration_secs_listener(count)
atexit.register(lambda: print(json.dumps([*counts.values()])))
runpy.run_module("recipes.serve", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_a_second_start_compiles_nothing(trained, tmp_path):
    """In interpreters of their own, which hash texts otherwise; with the settings of the guide."""
    first, second = (start_and_ask(trained, tmp_path, seed) for seed in "12")
    made, kept = first[0]
    assert made > 10 and kept == 0
    assert second == ([made, made], first[1])


def start_and_ask(workdir, programs, seed: str) -> tuple[list[int], str]:
    """How many programs a server had, how many of them were kept, and what it answered."""
    environment = cli.environment() | {
        "JAX_COMPILATION_CACHE_DIR": str(programs),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONHASHSEED": seed,
    }
    del environment["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"]
    flags = [f"--workdir={workdir}", "--name=tiny", "--port=0", "--slots=2", "--compile_first"]
    command = [sys.executable, "-c", COUNTING, *flags, "--max_length=64"]
    process = subprocess.Popen(
        command, cwd=cli.ROOT, env=environment, stdout=subprocess.PIPE, encoding="utf-8"
    )
    try:
        url = process.stdout.readline().strip()
        body = {"model": "tiny", "prompt": "the quick ", "max_tokens": 20, "seed": 3}
        asked = urllib.request.Request(
            f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=cli.TIMEOUT) as answer:
            text = json.load(answer)["choices"][0]["text"]
        process.terminate()
        output, _ = process.communicate(timeout=cli.TIMEOUT)
    finally:
        process.kill()
        process.wait()
    return json.loads(output), text
