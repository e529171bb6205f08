"""Models in lm-evaluation-harness: its numbers are ours, document by document."""

import json
import os
import shutil
import sys

import numpy as np
import pytest

from rmt_tpu.errors import UsageError
from rmt_tpu.evaluation import documents, subjects
from rmt_tpu.evaluation.evaluate import evaluate
from rmt_tpu.generation import Sampling, complete
from tests import cli
from tests.rmt_tpu.hub import oracle
from tests.rmt_tpu.hub.configs import COMMON
from tests.rmt_tpu.hub.folders import written

# Its libraries warn of each other.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("recipes"),
    pytest.mark.filterwarnings("ignore"),
]

WORDS = "the quick brown fox jumps over the lazy dog".split()
DOCUMENTS = 100
LENGTH = 64  # that the model has positions for, and not as short as in training


@pytest.fixture(scope="module")
def harness(offline):
    """Of an extra that only the night has: with `make test-all` it is installed."""
    from rmt_tpu.evaluation import harness

    return harness


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_DATASETS_CACHE"] = str(tmp_path_factory.mktemp("datasets"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A hundred documents of each task that has files, most of them too long for the model."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    text = lambda least, most: " ".join(rng.choice(WORDS, rng.integers(least, most, endpoint=True)))
    number = lambda most: int(rng.integers(most))

    def arc():
        labels = "ABCDE"[: 3 + number(3)]
        choices = {"text": [text(1, 6) for _ in labels], "label": list(labels)}
        return {"question": text(3, 20), "choices": choices, "answerKey": labels[number(3)]}

    lines = {
        "arc_easy": arc,
        "arc_challenge": arc,
        "hellaswag": lambda: {
            "activity_label": text(1, 3),
            "ctx_a": text(3, 9),
            "ctx_b": text(0, 3),
            "endings": [text(1, 9) for _ in range(4)],
            "label": str(number(4)),
        },
        "piqa": lambda: {
            "goal": text(2, 15), "sol1": text(1, 9), "sol2": text(1, 9), "label": number(2)
        },
        "winogrande": lambda: {
            "sentence": f"{text(1, 9)} _ {text(1, 6)}.",
            "option1": text(1, 2),
            "option2": text(1, 3),
            "answer": "12"[number(2)],
        },
        "lambada_openai": lambda: {"text": text(2, 20)},
    }  # fmt: skip
    for name, line in lines.items():
        of_name = (json.dumps(line()) for _ in range(DOCUMENTS))
        (folder / f"{name}.jsonl").write_text("\n".join(of_name))
    return [documents.read_task(task, str(folder)) for task in documents.find_tasks(lines)], folder


@pytest.fixture(scope="module")
def asked_by_the_harness(harness, trained, sources, tmp_path_factory):
    """A function that asks: with a model, or by its name."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    folder = tmp_path_factory.mktemp("tasks")
    harness.write_tasks(sources[0], folder)

    def ask(**how):
        return lm_eval.simple_evaluate(
            tasks=[source.name for source in sources[0]],
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            bootstrap_iters=0,
            **how,
        )

    return ask


def test_its_numbers_are_ours(harness, trained, sources, asked_by_the_harness):
    theirs = asked_by_the_harness(model=harness.RmtTpu(str(trained), max_length=LENGTH))
    for result in evaluate(subjects.run_subject(trained, max_length=LENGTH), sources[0]):
        name = result.source.name
        samples = sorted(theirs["samples"][name], key=lambda sample: sample["doc_id"])
        for metric in result.metrics:
            if metric.name == "gold_bits_per_byte":  # of our own
                continue
            each = [sample[metric.name] for sample in samples]
            if metric.name == "perplexity":
                assert metric.total.tolist() == pytest.approx([-log for log in each], abs=1e-5)
            else:
                assert metric.total.tolist() == each
            told = theirs["results"][name][f"{metric.name},none"]
            assert metric.value == pytest.approx(told, rel=1e-5)


def test_a_run_goes_on_from_its_cache(
    harness, trained, asked_by_the_harness, tmp_path, monkeypatch
):
    args = {"workdir": str(trained), "max_length": LENGTH}
    kept = harness.cache_path(str(tmp_path / "kept"), **args)
    assert kept != harness.cache_path(str(tmp_path / "kept"), step=20, **args)
    assert kept != harness.cache_path(str(tmp_path / "kept"), **args | {"max_length": 8})
    first = asked_by_the_harness(model="rmt_tpu", model_args=args, use_cache=kept)

    def none(*args):
        raise AssertionError("asked again")

    monkeypatch.setattr(harness.RmtTpu, "score", none)
    again = asked_by_the_harness(model="rmt_tpu", model_args=args, use_cache=kept)
    assert again["results"] == first["results"]


def test_texts(harness, trained):
    from lm_eval.api.instance import Instance

    model = harness.RmtTpu(str(trained))
    text = " ".join(WORDS * 3)
    (found,) = model.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])
    source = documents.Source("text", "text", [documents.whole_text(text)], "")
    (result,) = evaluate(subjects.run_subject(trained), [source])
    assert found == pytest.approx(-result.metrics[0].total.sum(), rel=1e-6)
    greedy = {"until": ["."], "max_gen_toks": 30}
    drawn = {"until": ["z"], "do_sample": True, "temperature": 0.9, "max_gen_toks": 5}
    given = [("the quick", greedy), ("the", drawn), ("x" * 80, greedy)]
    asked = [Instance("generate_until", {}, args, 0) for args in given]
    texts = model.generate_until(asked)
    decoder, tokenizer = subjects.run_subject(trained).decoder, model._tokenizer
    how = Sampling(temperature=0.0, max_tokens=30)
    # Of the last one the room for its text is left: 64 positions.
    prompts = [("the quick", how), ("x" * 33, how)]
    ours = {one.number: one.text for one in complete(decoder, tokenizer, prompts, stop=["."])}
    assert [texts[0], texts[2]] == [ours[0], ours[1]]
    assert "." not in texts[0] and len(texts[1]) <= 5


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}model: {% endif %}"


@pytest.fixture(scope="module")
def chats(trained, tmp_path_factory):
    """The run, with a chat template in its folder."""
    folder = tmp_path_factory.mktemp("chats") / "run"
    shutil.copytree(trained, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_conversations(harness, chats):
    from lm_eval.api.instance import Instance

    model = harness.RmtTpu(str(chats))
    said = [{"role": "user", "content": "the quick "}]
    assert model.chat_template(False) is None and model.chat_template(True) == TEMPLATE
    text = model.apply_chat_template(said)
    assert text == "user: the quick \nmodel: "
    begun = model.apply_chat_template(said, add_generation_prompt=False)
    assert begun == "user: the quick "
    greedy = {"until": ["z"], "max_gen_toks": 7}
    (found,) = model.generate_until([Instance("generate_until", {}, (text, greedy), 0)])
    tokenizer, how = model._tokenizer, Sampling(temperature=0.0, max_tokens=7)
    given = [(tokenizer.with_bos(tokenizer.encode(text)), how)]
    (ours,) = complete(model._decoder, tokenizer, given, stop=["z"])
    assert found == ours.text
    with pytest.raises(UsageError, match="--apply_chat_template=tools names a template"):
        model.chat_template("tools")


def test_tasks_as_conversations(harness, chats, asked_by_the_harness):
    model = harness.RmtTpu(str(chats), max_length=LENGTH)
    found = asked_by_the_harness(model=model, apply_chat_template=True, limit=2)
    context, choice = found["samples"]["arc_easy"][0]["arguments"][0]
    assert context.startswith("user: Question: ") and context.endswith("\nmodel: ")
    assert found["results"]["arc_easy"]["acc,none"] in (0.0, 0.5, 1.0) and choice


def test_a_folder_of_the_hub(harness, tmp_path):
    """Names of special tokens are these tokens, the template decides, and answers are kept."""
    from lm_eval.api.instance import Instance
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<s>": 0, "</s>": 1, "the": 2, "quick": 3}
    library = Tokenizer(models.WordLevel(words, unk_token="the"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["<s>", "</s>"])
    config = COMMON | {
        "model_type": "llama",
        "vocab_size": 4,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    folder = written(tmp_path / "hub", config, oracle.drawn(config))
    library.save(str(folder / "tokenizer.json"))
    args = {"workdir": str(folder), "max_length": 32}
    model = harness.RmtTpu(**args)
    with pytest.raises(UsageError, match="--apply_chat_template needs a chat template, and .*hub"):
        model.apply_chat_template([])
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}</s>")
    assert model.tok_encode("the </s>") != [2, 1]
    text = model.apply_chat_template([{"role": "user", "content": "the quick"}])
    assert model.tok_encode(text) == [2, 3, 1]
    assert model._with_start([2, 3, 1]).tolist() == [2, 3, 1]
    unknown = Instance("generate_until", {}, (text, {"num_beams": 4}), 0)
    with pytest.raises(UsageError, match="^gen_kwargs: num_beams=4 is not supported; legal: 1$"):
        model.generate_until([unknown])
    kept = harness.cache_path(str(tmp_path / "kept"), **args)
    assert kept == harness.cache_path(str(tmp_path / "kept"), **args)
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    assert kept != harness.cache_path(str(tmp_path / "kept"), **args)


def test_the_command(offline, trained, sources, tmp_path):
    run = f"{sys.executable} -m recipes.lm_eval run"
    line = (
        f"{run} --model_args workdir={trained},max_length={LENGTH} --tasks arc_easy,winogrande "
        f"--data_dir {sources[1]} --use_cache {tmp_path}/kept --output_path {tmp_path}/out"
    )
    quiet = {"PYTHONWARNINGS": "ignore"}
    done = cli.run_line(line, quiet)
    assert done.returncode == 0, done.stderr
    assert "|arc_easy" in done.stdout and "|winogrande" in done.stdout
    assert list(tmp_path.glob("kept-48-*.db"))
    refused = {
        "--tasks pika --data_dir .": "--tasks 'pika' is unknown; did you mean 'piqa'",
        "--limit 3 --data_dir .": "--data_dir=. needs --tasks, the tasks whose data it has",
        "--tasks a": "--model_args needs workdir=FOLDER, a run folder or a folder in",
        f"--tasks a --use_cache {tmp_path}/b": "--model_args needs workdir=FOLDER",
        f"--tasks a --model_args workdir={trained},stepp=3": "--model_args 'stepp' is unknown; did",
    }
    for flags, message in refused.items():
        wrong = cli.run_line(f"{run} {flags}", quiet)
        assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1, wrong.stderr
        assert f"error: {message}" in wrong.stderr


def test_texts_are_not_for_its_files(harness, tmp_path):
    source = documents.Source("text", "text", [documents.whole_text("a")], "")
    with pytest.raises(UsageError, match="--tasks=text scores whole texts, which lm-eval"):
        harness.write_tasks([source], tmp_path)
