"""The flags that name a run's text: one text or a mixture, and whose tokenizer it brings."""

from types import SimpleNamespace

import pytest

from recipes import common
from rmt_tpu.analysis.dry_run import dry_run
from rmt_tpu.config import MixtureSource, overrides, presets
from rmt_tpu.data import load_tokenizer
from rmt_tpu.data.datasets import load_datasets
from rmt_tpu.data.prepare import prepare
from rmt_tpu.errors import UsageError
from rmt_tpu.experiments.runs import ExperimentText
from rmt_tpu.storage import open_folder
from tests.chats import special_tokenizer


@pytest.fixture
def config(monkeypatch):
    def config(*sets: str, base=None, **given):
        values = dict.fromkeys((name for name, *_ in common._RUN_FLAGS), None)
        values |= {"set": list(sets)} | given
        monkeypatch.setattr(common.flags, "FLAGS", SimpleNamespace(**values))
        return common.run_config(base or presets.run("rmt-tiny"))

    return config


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, word in {"a": "stone", "b": "river"}.items():
        (tmp_path / f"{name}.txt").write_text(f"{word} over and\n<|endoftext|>\n" * 50 + word)
    return tmp_path


def stores(here, tokenizers: dict[str, str]) -> None:
    """Makes a token store of each text, x of a.txt and y of b.txt."""
    for name, text in ("x", "a.txt"), ("y", "b.txt"):
        prepare(text, tokenizers[name], str(here / name), eval_fraction=0.2, workers=1)


def test_all_stores_of_a_mixture_need_one_tokenizer(config, here):
    """Whichever of them --tokenizer names; the refusal does not send to the other one."""
    special_tokenizer().save(here / "special")
    stores(here, {"x": "byte", "y": "special"})
    said = (
        "--mixture: all texts need one tokenizer, but x has byte (257 tokens), y has special ("
        f"{special_tokenizer().vocab_size} tokens); legal: token stores that were prepared with "
        "the same --tokenizer"
    )
    for tokenizer in None, "x", "y", "byte":
        found = config(mixture="x=0.5,y=0.5", tokenizer=tokenizer)
        with pytest.raises(UsageError) as error:
            load_datasets(found, load_tokenizer(found.data.tokenizer))
        assert str(error.value) == said


def test_a_mixture_and_its_tokenizer_must_fit(config, here):
    special_tokenizer().save(here / "special")
    stores(here, {"x": "byte", "y": "byte"})
    found = config(mixture="x=0.5,y=0.5", tokenizer="special")
    with pytest.raises(UsageError, match="^--mixture: x was made with .*legal: --tokenizer=x$"):
        load_datasets(found, load_tokenizer("special"))
    (here / "x/manifest.json").unlink()
    with pytest.raises(UsageError, match="^--mixture=x is not complete; "):
        config(mixture="x=0.5,y=0.5")


MIXTURE = (MixtureSource("a.txt", 0.75), MixtureSource("b.txt", 0.25))


def test_a_mixture_is_a_flag_or_a_list(config):
    listed = '[{"source": "a.txt", "share": 0.75}, {"source": "b.txt", "share": 0.25}]'
    short = "a.txt=0.75,b.txt=0.25"
    for found in (
        config(mixture=short),
        config(f"data.mixture={short}"),
        config(f"data.mixture={listed}"),
    ):
        assert found.data.mixture == MIXTURE
        assert overrides.from_json(type(found), overrides.to_json(found)) == found
    more = config("data.mixture.0.share=0.5", "data.mixture.1.share=0.5", base=found)
    assert [each.share for each in more.data.mixture] == [0.5, 0.5]
    assert config(base=found).data.mixture == MIXTURE
    assert config(base=found, mixture="").data.mixture == ()
    assert config(base=found, data="a.txt").data.mixture == ()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"mixture": "a.txt"}, "--mixture='a.txt': 'a.txt' has no share; legal: a list like"),
        ({"mixture": "a.txt=0.5"}, "--mixture='a.txt=0.5': the shares add up to 0.5; legal:"),
        ({"mixture": "a=0.5,a=0.5"}, "names a 2 times"),
        (
            {"mixture": "a.txt=1.0001,b.txt=-0.0001"},
            "--mixture: data.mixture.0.share=1.0001 must be at least 0, at most 1",
        ),
        ({"mixture": "a.txt=1", "data": "b.txt"}, "--data and --mixture both set the text"),
    ],
)
def test_what_is_refused_names_the_flag(config, flags, said):
    with pytest.raises(UsageError) as error:
        config(**flags)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_what_set_refuses_within_a_value_names_the_flag(config):
    listed = '[{"source": "a.txt", "share": 2}, {"source": "b.txt", "share": -1}]'
    with pytest.raises(UsageError, match="^--set=data.mixture: data.mixture.0.share=2"):
        config(f"data.mixture={listed}")
    with pytest.raises(UsageError, match="^--set=data.mixture.0.share=2.0 must be"):
        config("data.mixture.0.share=2", base=config(mixture="a.txt=0.75,b.txt=0.25"))


def test_a_path_is_set_once(config):
    both = "--set=train.steps=8 and --set=train.steps=16 both set train.steps; give one"
    with pytest.raises(UsageError, match=f"^{both}$"):
        config("train.steps=8", "train.steps=16")
    assert config("train.steps=8", "train.steps= 8").train.steps == 8


def test_the_first_store_brings_the_tokenizer(config, here):
    prepare("b.txt", "byte", here / "store", eval_fraction=0.2, workers=1)
    found = config(mixture="a.txt=0.5,store=0.5")
    assert found.data.tokenizer == "store" and found.model.vocab_size == 257
    assert config(mixture="a.txt=0.5,store=0.5", tokenizer="byte").data.tokenizer == "byte"
    (here / "half").mkdir()
    (here / "half" / "plan.json").write_bytes((here / "store" / "plan.json").read_bytes())
    with pytest.raises(UsageError, match="half is not complete"):
        config(mixture="half=1")


def test_a_dry_run_tells_how_often_each_text_is_read(config, here):
    found = config(mixture="a.txt=0.75,b.txt=0.25", seq_len=16, steps=10, batch_size=8)
    (line,) = [
        line
        for line in dry_run(found, "rmt-tiny", open_folder(here / "run")).splitlines()
        if line.startswith("tokens ")
    ]
    assert "; a.txt, a share of 0.75, has " in line and "; b.txt, a share of 0.25, has " in line


def test_experiments_take_one_text(config, here):
    with pytest.raises(UsageError, match="--mixture cannot be used for experiments"):
        ExperimentText(config(mixture="a.txt=1"), open_folder(here))
