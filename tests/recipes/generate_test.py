"""recipes.generate, rmt_tpu.load and the decoder of a run."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rmt_tpu
from rmt_tpu.data import ByteTokenizer
from rmt_tpu.generation import Sampling, generate
from tests import cli

PROMPT = "the quick "


pytestmark = pytest.mark.xdist_group("recipes")


@pytest.fixture(scope="module")
def loaded(trained):
    return rmt_tpu.load(trained)


def text(loaded, prompt=PROMPT, **how) -> str:
    return "".join(generate(*loaded, prompt, Sampling(**how)))


def greedy(loaded, prompt: str, count: int) -> list[int]:
    """The likeliest tokens by the logits of the whole text: nothing is cached."""
    decoder, tokenizer = loaded
    logits = jax.jit(lambda tokens: decoder(tokens[None])[0])
    tokens = [tokenizer.bos, *tokenizer.encode(prompt).tolist()]
    for _ in range(count):
        # Causal, so what stands behind the tokens does not matter.
        padded = jnp.array(tokens + [0] * (64 - len(tokens)), jnp.int32)
        tokens.append(int(jnp.argmax(logits(padded)[len(tokens) - 1])))
    return tokens[-count:]


def test_load(trained, loaded):
    decoder, tokenizer = loaded
    assert isinstance(decoder, rmt_tpu.Decoder)
    assert isinstance(tokenizer, ByteTokenizer)
    earlier, _ = rmt_tpu.load(trained, 20)
    tokens = jnp.arange(8)[None]
    assert decoder(tokens).shape == (1, 8, 257)
    assert not np.array_equal(decoder(tokens), earlier(tokens))


def test_load_on_a_mesh(trained, loaded):
    """Each device is given its part of the checkpoint, and the text is the same."""
    divided = rmt_tpu.load(trained, mesh="data=2,fsdp=4")
    for tree in ("embedding.tokens", "stacks.0.1.core.w_1"):
        whole, part = (attribute(decoder, tree)[...] for decoder in (loaded[0], divided[0]))
        assert {4 * shard.data.size for shard in part.addressable_shards} == {whole.size}
        np.testing.assert_array_equal(part, whole)


def attribute(module, path):
    for name in path.split("."):
        module = module[int(name)] if name.isdigit() else getattr(module, name)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tensor=2,data=4", "sequence=2,fsdp=4"])
def test_text_on_a_mesh(trained, loaded, mesh):
    how = {"temperature": 0.8, "max_tokens": 30, "seed": 3}
    assert text(rmt_tpu.load(trained, mesh=mesh), **how) == text(loaded, **how)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--temperature=0"], id="temperature 0"),
        pytest.param(["--temperature=1", "--top_k=1"], id="top_k 1", marks=pytest.mark.slow),
    ],
)
def test_greedy_is_the_argmax_of_uncached_logits(trained, loaded, flags):
    wanted = loaded[1].decode(greedy(loaded, PROMPT, 20))
    flags = [f"--workdir={trained}", f"--prompt={PROMPT}", "--max_tokens=20", *flags]
    assert cli.succeed("generate", *flags).stdout == f"{PROMPT}{wanted}\n"


@pytest.mark.slow
def test_step_is_the_checkpoint(trained):
    wanted = text(rmt_tpu.load(trained, 20), temperature=0.0, max_tokens=8)
    flags = [f"--workdir={trained}", f"--prompt={PROMPT}", "--temperature=0", "--max_tokens=8"]
    done = cli.succeed("generate", *flags, "--step=20")
    assert done.stdout == f"{PROMPT}{wanted}\n"


@pytest.mark.slow
def test_seed(trained, loaded):
    how = {"temperature": 0.8, "max_tokens": 30}
    drawn = [text(loaded, seed=seed, **how) for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]
    flags = ["--seed=3", "--temperature=0.8", "--max_tokens=30"]
    done = cli.succeed("generate", f"--workdir={trained}", f"--prompt={PROMPT}", *flags)
    assert done.stdout == f"{PROMPT}{drawn[0]}\n"


def test_prompt_of_any_characters(trained):
    flags = [f"--workdir={trained}", "--prompt=naïve 語 😀", "--max_tokens=1"]
    assert cli.succeed("generate", *flags).stdout.startswith("naïve 語 😀")


@pytest.mark.slow
def test_a_file_of_prompts(trained, loaded, tmp_path):
    """Each sample is as it is alone; what is there stays, and half a line is passed over."""
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("the ", "", "ju")))
    flags = [f"--workdir={trained}", f"--prompts={prompts}", f"--output={out}", "--num_samples=2"]
    flags += ["--max_tokens=12", "--stop=.", "--seed=5", "--logprobs", "--batch_size=4"]
    done = cli.succeed("generate", *flags)
    assert "6 texts, 6 left to generate" in done.stderr and "6 of 6 texts" in done.stderr
    key = lambda line: (line["number"], line["sample"])
    lines = sorted(map(json.loads, out.read_text().splitlines()), key=key)
    assert [key(line) for line in lines] == [(n, s) for n in range(3) for s in range(2)]
    for line in lines:
        how = {
            "temperature": 0.8,
            "max_tokens": 12,
            "seed": 5 + 2 * line["number"] + line["sample"],
        }
        alone = text(loaded, line["prompt"], **how)
        assert line["text"] == alone.partition(".")[0]
        assert line["finish"] == ("stop" if "." in alone else "length")
        assert len(line["tokens"]) == len(line["logprobs"]) and max(line["logprobs"]) < 0
    kept = out.read_text().splitlines()[:4]
    out.write_text("\n".join(kept) + '\n{"number": 2, "sam')
    assert "6 texts, 2 left to generate" in cli.succeed("generate", *flags).stderr
    again = [line for line in out.read_text().splitlines() if line != '{"number": 2, "sam']
    assert again[:4] == kept and sorted(map(json.loads, again), key=key) == lines
    refused = lambda *more: cli.fail("generate", *flags, *more)
    assert "samples with --temperature=0.8, and this command has 1.0" in refused("--temperature=1")
    assert "samples with --stop=['.'], and this command has ['.', ',']" in refused("--stop=,")
    assert "samples with model='48-" in refused("--step=20")


# When the first sample is written, and others are on their way.
TERMINATED = """
import os, signal
from rmt_tpu.generation.files import Output
usual = Output.add
def add(self, *lines):
    usual(self, *lines)
    os.kill(os.getpid(), signal.SIGTERM)
Output.add = add
"""


def test_sigterm_ends_it_with_a_line_and_the_same_command_resumes(trained, tmp_path):
    (tmp_path / "in.txt").write_text("the\nquick\nbrown\n")
    out = tmp_path / "out.jsonl"
    flags = (f"--workdir={trained}", f"--prompts={tmp_path}/in.txt", f"--output={out}")
    process = cli.start("generate", *flags, "--max_tokens=4", first=TERMINATED)
    _, said = process.communicate()
    assert (process.returncode, said.splitlines()[-1]) == (143, "error: stopped by SIGTERM")
    assert {path.name for path in tmp_path.iterdir()} == {"in.txt", "out.jsonl"}
    kept = len(out.read_text().splitlines())
    assert 1 <= kept < 3
    again = cli.succeed("generate", *flags, "--max_tokens=4").stderr
    assert f"3 texts, {3 - kept} left to generate" in again


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--prompts={good}"], "--prompts and --output, the file"),
        (["--prompts={good}", "--output={out}", "--prompt=a"], "either --prompt or --prompts"),
        (["--mesh=tensor=0"], "--mesh='tensor=0': 'tensor=0' must be axis=size"),
        (["--num_samples=2"], "--num_samples needs --prompts"),
        (["--num_samples=2", "--init_from=x"], "--init_from=x both set the model"),
        (["--batch_size=4"], "--batch_size needs --prompts"),
        (["--prompts={bad}x", "--output={out}"], "bad.jsonlx does not exist"),
        (
            ["--prompts={bad}", "--output={out}"],
            "bad.jsonl:2 is not a JSON object with",
        ),
        (["--prompts={good}", "--output={good}"], "good is the file of --prompts; legal: another"),
        (["--prompts={good}", "--output=/proc/x"], "--output=/proc/x cannot be written"),
        (["--prompts={long}", "--output={out}"], "--prompts: prompt 2 has 101 tokens"),
        (["--prompts={good}", "--output={foreign}"], "samples with model='9-a', and this command"),
    ],
)
def test_usage_of_files(trained, tmp_path, flags, words):
    of_another = {"number": 0, "sample": 0, "prompt": "a", "temperature": 0.8, "model": "9-a"}
    files = {
        "good": "a\n",
        "bad.jsonl": '{"prompt": "a"}\n{"text": "b"}\n',
        "long": "a\n" + 100 * "b",
        "foreign.jsonl": json.dumps(of_another) + "\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    places = {name.partition(".")[0]: tmp_path / name for name in (*files, "out.jsonl")}
    given = [flag.format(**places) for flag in flags]
    assert words in cli.fail("generate", f"--workdir={trained}", *given)


def test_a_run_folder_in_the_place_of_a_folder_of_the_hub_is_named_as_one(trained):
    """The flag --init_from of `recipes.train` takes both."""
    error = cli.fail("generate", f"--init_from={trained}")
    assert error == (
        f"error: --init_from={trained} is a run folder; legal: --workdir={trained}, or a folder in "
        "Hugging Face format"
    )


@pytest.mark.slow
def test_note_when_positions_end(trained, loaded):
    done = cli.succeed("generate", f"--workdir={trained}", "--prompt=the", "--temperature=0")
    # Four tokens with the start; the 64th position reads the last token but one.
    assert done.stderr == "note: only 61 of --max_tokens=256 fit in the model's positions\n"
    assert done.stdout == f"the{text(loaded, 'the', temperature=0.0, max_tokens=61)}\n"


@pytest.mark.slow
def test_note_when_positions_end_for_a_file(trained, tmp_path):
    """The first text has 5 tokens with the start, and the second one has 63."""
    prompts = tmp_path / "in.txt"
    prompts.write_text("the \n" + 62 * "b")
    flags = (f"--prompts={prompts}", f"--output={tmp_path}/out.jsonl", "--max_tokens=3")
    done = cli.succeed("generate", f"--workdir={trained}", *flags)
    note = (
        "note: only 2 or more of --max_tokens=3 fit in the model's positions after 1 of 2 prompts"
    )
    assert note in done.stderr.splitlines()


def test_a_stop_string_that_is_no_text_is_refused_before_the_model_is_loaded(tmp_path):
    error = cli.fail("generate", f"--workdir={tmp_path}", "--stop=\udcff")
    assert error.startswith("error: --stop: the text has an unpaired surrogate, '\\udcff'")
    error = cli.fail("serve", f"--workdir={tmp_path}", "--name=\udcff")
    assert error.startswith("error: --name: the text has an unpaired surrogate, '\\udcff'")
