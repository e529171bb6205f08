"""A run refuses flags that would have no effect on it."""

import dataclasses

import pytest

from recipes import common, effects
from rmt_tpu.config import overrides
from rmt_tpu.config.mixture import MixtureSource
from rmt_tpu.config.presets import run
from rmt_tpu.errors import UsageError

# Flags without an effect, what the error says of the first, and a change that gives it one.
CASES = {
    "microbatches": (
        {"train.microbatches": 4},
        "microbatches=4 has no effect on this run; legal: a pipeline, like --mesh=stage=2, or "
        "leave out --set=train.microbatches",
        {"train.mesh": "stage=-1"},
    ),
    "one stage": (
        {"train.virtual_stages": 2, "train.mesh": "stage=1,data=2"},
        "virtual_stages=2 has",
        {"train.mesh": "stage=2,data=2"},
    ),
    "decay": (
        {"train.optimizer.decay_fraction": 0.1},
        "decay_fraction=0.1 has",
        {"train.optimizer.schedule": "wsd"},
    ),
    "tasks every": (
        {"train.eval_tasks_every": 10},
        "eval_tasks_every=10 has",
        {"train.eval_tasks": "piqa"},
    ),
    "task limit": (
        {"train.eval_tasks_limit": 10},
        "eval_tasks_limit=10 has",
        {"train.eval_tasks": "piqa"},
    ),
    "eval tokens": (
        {"train.eval_tokens": 64, "train.eval_batches": 2},
        "eval_tokens=64 has",
        {"train.eval_batches": 0},
    ),
    "samples": (
        {"train.sample_every": 5, "train.sample_tokens": 0},
        "sample_every=5 has",
        {"train.sample_tokens": 1},
    ),
    "template": (
        {"data.chat_template": "a.jinja"},
        "chat_template='a.jinja' has",
        {"data.format": "messages"},
    ),
    "field": (
        {"data.text_field": "body", "data.format": "completion"},
        "text_field='body' has",
        {"data.format": "messages", "data.source": "a.jsonl"},
    ),
}


@pytest.mark.parametrize(("given", "message", "change"), CASES.values(), ids=CASES)
def test_a_flag_without_an_effect_is_refused(given, message, change, monkeypatch):
    paths = {path: f"--set={path}" for path in given}
    monkeypatch.setattr(common, "given_paths", lambda: paths)
    config = overrides.apply(run("rmt-tiny"), given)
    with pytest.raises(UsageError) as error:
        effects.check_effects(config)
    assert message in str(error.value)
    effects.check_effects(overrides.apply(config, change))
    monkeypatch.setattr(common, "given_paths", dict)
    effects.check_effects(config)  # a file of --config may have such values


def test_values_that_ask_for_nothing_are_legal(monkeypatch):
    nothing = {"train.microbatches": 0, "train.virtual_stages": 1, "train.eval_tasks_every": 0}
    monkeypatch.setattr(common, "given_paths", lambda: dict.fromkeys(nothing, "--flag"))
    effects.check_effects(overrides.apply(run("rmt-tiny"), nothing))


@pytest.mark.parametrize(
    ("source", "is_legal"),
    [
        ("stdlib", False),
        ("uni.txt", False),
        ("a.txt, b.TXT.gz,c*.txt.zst", False),
        ("a.txt,b.jsonl", True),
        ("b.jsonl.gz", True),
        ("b.jsonl.zst", True),
        ("c.parquet", True),
        ("d.arrow", True),
        ("folder/*", True),
    ],
)
def test_a_field_has_no_effect_on_text_files(source, is_legal, monkeypatch):
    monkeypatch.setattr(common, "given_paths", lambda: {"data.text_field": "--text_field"})
    values = {"data.text_field": "body", "data.source": source}
    config = overrides.apply(run("rmt-tiny"), values)
    parts = (MixtureSource("e.txt", 0.5), MixtureSource(source, 0.5))
    mixed = dataclasses.replace(config, data=dataclasses.replace(config.data, mixture=parts))
    for each in (config, mixed):
        if is_legal:
            effects.check_effects(each)
            continue
        with pytest.raises(UsageError) as error:
            effects.check_effects(each)
        assert str(error.value) == (
            "--text_field='body' has no effect on this run; legal: --data or --mixture with "
            ".jsonl, .parquet or .arrow files, or leave out --text_field"
        )


@pytest.mark.parametrize("path", ["data.eval_fraction", "data.text_field", "data.chat_template"])
def test_what_reads_text_has_no_effect_on_a_store(path, tmp_path, monkeypatch):
    store, text = tmp_path / "store", tmp_path / "a.jsonl"
    store.mkdir()
    (store / "manifest.json").write_text("{}")
    monkeypatch.setattr(common, "given_paths", lambda: {path: "--flag"})
    values = {"data.format": "messages", path: 0.3 if path == "data.eval_fraction" else "body"}
    config = overrides.apply(run("rmt-tiny"), values | {"data.source": str(store)})
    legal = "with .jsonl, .parquet or" if path == "data.text_field" else " files of text"
    with pytest.raises(UsageError, match=f"--flag=.* has no effect .*; legal: .*{legal}"):
        effects.check_effects(config)
    effects.check_effects(overrides.apply(config, {"data.source": str(text)}))
    mixture = tuple(MixtureSource(str(source), 0.5) for source in (store, text))
    mixed = dataclasses.replace(config.data, mixture=mixture)
    effects.check_effects(dataclasses.replace(config, data=mixed))
