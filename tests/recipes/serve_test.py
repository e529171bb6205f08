"""recipes.serve as a process of its own, and the official client of what it speaks."""

import concurrent.futures
import time

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
        (["--host=192.0.2.1"], "--host=192.0.2.1 is no address of this machine; legal: 127.0.0.1"),
        (["--port=65536"], "--port=65536"),
        (["--port=0"], "--workdir=nowhere holds no run"),
    ],
)
def test_usage(flags, words):
    assert words in cli.fail("serve", "--workdir=nowhere", *flags)


@pytest.fixture
def serving(trained):
    """A process, and where it is to be reached."""
    process = cli.start(
        "serve", f"--workdir={trained}", "--name=tiny", "--port=0", "--slots=3", "--queue=3"
    )
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
