"""How the texts of a run start and end: what its training text and its folder agree on."""

import json

import jax
import pytest

import sharding
from rmt_tpu.config import overrides
from rmt_tpu.config.presets import run as preset_run
from rmt_tpu.data import load_saved, load_tokenizer
from rmt_tpu.data.datasets import chat_template_of, load_datasets
from rmt_tpu.runs import text_ends
from rmt_tpu.storage import open_folder
from rmt_tpu.training import trainer
from rmt_tpu.training.start import read_text
from tests.chats import CHATML, special_tokenizer


def config_of(tokenizer, tmp_path, **changes):
    """Return the config of a run on short conversations; its tokenizer and text are in files."""
    rows = [
        [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "Yes."}]
        for n in range(20)
    ]
    text = tmp_path / "talks.jsonl"
    text.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    tokenizer.save(tmp_path / "tokenizer")
    return overrides.apply(
        preset_run("rmt-tiny"),
        {
            "model.num_layers": 1,
            "model.vocab_size": tokenizer.vocab_size,
            "model.feed_forward.hidden_dim": 32,
            "data.source": str(text),
            "data.tokenizer": str(tmp_path / "tokenizer"),
            "data.format": "messages",
            "data.eval_fraction": 0.2,
            "data.seq_len": 64,
            "train.batch_size": 2,
            "train.steps": 1,
            "train.eval_batches": 1,
            "train.sample_tokens": 0,
            **changes,
        },
    )


def write_template(tmp_path, source, config=None):
    (tmp_path / "tokenizer/chat_template.jinja").write_text(source)
    (tmp_path / "tokenizer/tokenizer_config.json").write_text(json.dumps(config or {}))


def test_a_text_ends_where_an_answer_ends(tmp_path):
    """The start token stays first, because it is the `eos_token` of templates that name none."""
    config = config_of(special_tokenizer(), tmp_path)
    write_template(tmp_path, CHATML)
    tokenizer = load_tokenizer(config.data.tokenizer)
    read_text(config, open_folder(tmp_path / "run"), tokenizer, None)
    end = tokenizer.token_id("<|im_end|>")
    assert tokenizer.ends == (tokenizer.bos, end)


def test_text_has_the_end_token_that_the_run_saves(tmp_path):
    """It is that of the initial model, also if the tokenizer's files do not name it."""
    config = config_of(special_tokenizer(), tmp_path, **{"train.init_from": "elsewhere"})
    turns = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    write_template(tmp_path, turns, {"bos_token": "<s>"})
    tokenizer, run = load_tokenizer(config.data.tokenizer), open_folder(tmp_path / "run")
    end = tokenizer.token_id("</s>")
    run.write("generation_config.json", json.dumps({"eos_token_id": [end]}).encode())
    datasets = read_text(config, run, tokenizer, None)
    assert tokenizer.ends == (end,)
    assert chat_template_of(config, tokenizer).json()["eos_token"] == "</s>"
    targets = datasets.train.batch_at(0).targets
    assert (targets == end).any()
    again = load_datasets(config, tokenizer)  # as for the evaluation of the run
    assert again.train.checksum() == datasets.train.checksum()


@pytest.mark.slow
def test_a_run_on_conversations_keeps_how_they_end(tmp_path, monkeypatch):
    one = sharding.make_mesh("data=1", jax.devices()[:1])
    monkeypatch.setattr(trainer.sharding, "make_mesh", lambda spec: one)
    config, run = config_of(special_tokenizer(), tmp_path), open_folder(tmp_path / "run")
    write_template(tmp_path, CHATML)
    trainer.train(config, run)
    tokenizer = load_saved(run)
    end = tokenizer.token_id("<|im_end|>")
    assert text_ends.load(run, tokenizer, tokenizer.vocab_size) == (True, (tokenizer.bos, end))
