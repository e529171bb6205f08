"""Runs that start from another model's parameters, with the same residual or another one."""

import jax
import numpy as np
import pytest
import tokenizers
from flax import nnx, traverse_util

import rmt_tpu
import sharding
from rmt_tpu import config as cfg
from rmt_tpu.config import overrides
from rmt_tpu.config.presets import run as preset_run
from rmt_tpu.data import ByteTokenizer, load_saved, load_tokenizer
from rmt_tpu.data.bpe import BpeTokenizer
from rmt_tpu.errors import UsageError
from rmt_tpu.hub.folder import export
from rmt_tpu.runs import text_ends, workdir
from rmt_tpu.runs.warm_start import WarmStart
from rmt_tpu.storage import open_folder
from rmt_tpu.training import trainer
from rmt_tpu.training.run import prepare
from tests import models
from tests.tiers import later


@pytest.fixture
def config():
    return overrides.apply(
        preset_run("llama-tiny"),
        {"model.num_layers": 4, "model.feed_forward.hidden_dim": 32, "train.batch_size": 4},
    )


@pytest.fixture
def hub(config, tmp_path):
    export(models.decoder(config.model), ByteTokenizer(), tmp_path / "hub", max_length=64)
    return str(tmp_path / "hub")


def initial_params(config, location, said):
    run = prepare(config, sharding.make_mesh(config.train.mesh))
    drawn = run.jitted_init()().params
    before = jax.tree.map(np.array, drawn)
    found = WarmStart(location, config.model).initial_params(
        drawn, run.state_shardings.params, said.append
    )
    return [traverse_util.flatten_dict(jax.tree.map(np.asarray, tree)) for tree in (before, found)]


@pytest.mark.parametrize("mesh", ["data=8", *later("stage=2,fsdp=2,tensor=2")])
def test_another_residual_takes_what_it_shares(config, hub, mesh):
    changes = {
        "train.mesh": mesh,
        "train.seed": 7,
        "train.virtual_stages": 1,
        "train.batch_size": 8,
    }
    if "stage" in mesh:
        changes["train.virtual_stages"] = 2
    else:
        changes |= {"model.mixer": "block_attention", "model.mixer.num_blocks": 2}
    config, said = overrides.apply(config, changes), []
    drawn, found = initial_params(config, hub, said)
    origin = traverse_util.flatten_dict(models.split(config.model.replace(mixer=cfg.Sum()))[1])
    assert len(origin) == 10
    for path, array in found.items():
        if path in origin:
            wanted = np.reshape(origin[path], array.shape)
            np.testing.assert_array_equal(array, wanted)
        else:
            assert "mix" in path
            np.testing.assert_array_equal(array, drawn[path])
    assert said[0].startswith(f"10 of {len(found)} arrays, ") and hub in said[0]
    assert ("initialised: " in said[0]) == ("stage" not in mesh)


def test_tied_embeddings_are_tied_in_both_models_or_in_none(config, hub):
    tied = config.model.replace(tied_embeddings=True)
    with pytest.raises(UsageError, match="tied_embeddings=True does not fit .*; legal: False, as"):
        WarmStart(hub, tied)


@pytest.mark.slow
def test_a_run_whose_residual_will_grow_gives_grown_weights(tmp_path):
    """Its config has the larger D_k before there is a checkpoint of that size."""
    config = overrides.apply(
        preset_run("rmt-tiny"), {"model.num_layers": 1, "model.store.key_dim": 4}
    )
    folder, mesh = open_folder(tmp_path / "a"), sharding.make_mesh("data=1", jax.devices()[:1])
    state = prepare(config, mesh).jitted_init()()
    meta = workdir.config_meta(config, ByteTokenizer())
    workdir.open_checkpoints(folder).save(1, state._replace(copies={}), meta)
    larger = overrides.apply(config, {"model.store.key_dim": 8})
    workdir.write_config(folder, larger)
    _, found = initial_params(overrides.apply(larger, {"train.seed": 3}), str(tmp_path / "a"), [])
    plain = nnx.merge(models.graph(config.model), state.params)
    found = jax.tree.map(jax.numpy.asarray, traverse_util.unflatten_dict(found))
    grown = nnx.merge(models.graph(larger.model), found)
    np.testing.assert_allclose(grown(models.tokens()), plain(models.tokens()), atol=1e-4)


@pytest.mark.slow
def test_a_run_starts_from_a_run_once(config, tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 40)
    config = overrides.apply(
        config,
        {
            "data.source": str(tmp_path / "text.txt"),
            "data.seq_len": 16,
            "train.steps": 2,
            "train.batch_size": 8,
            "train.sample_tokens": 0,
            "train.eval_batches": 1,
        },
    )
    trainer.train(config, tmp_path / "a", label="a")
    on = overrides.apply(config, {"train.init_from": str(tmp_path / "a"), "train.seed": 3})
    said = []
    found = initial_params(on, str(tmp_path / "a"), said)[1]
    decoder, _ = rmt_tpu.load(tmp_path / "a")
    trained = traverse_util.flatten_dict(nnx.to_pure_dict(nnx.state(decoder, nnx.Param)))
    for path, array in found.items():
        np.testing.assert_array_equal(array, trained[path])
    (tmp_path / "a/generation_config.json").write_text('{"eos_token_id": 7}')
    trainer.train(on, tmp_path / "b", label="b")
    # What it started from may be gone when it goes on.
    (tmp_path / "a").rename(tmp_path / "gone")
    longer = overrides.apply(on, {"train.steps": 3, "train.init_from": "elsewhere"})
    trainer.train(longer, tmp_path / "b", label="b", change_config=True)
    assert rmt_tpu.load(tmp_path / "b")[1].ends == (7, 256)
    with pytest.raises(UsageError, match="--init_from=.*/a holds no run"):
        trainer.train(on, tmp_path / "c", label="c")
    assert not (tmp_path / "c").exists()


def test_texts_of_a_run_end_as_those_it_began_with(config, hub, tmp_path):
    """And at the start token, which stands between its documents; kept in its folder."""
    (tmp_path / "hub/generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    tokenizer, folder = ByteTokenizer(), open_folder(tmp_path / "run")
    tokenizer.starts, tokenizer.ends = text_ends.after_warm_start(open_folder(hub), tokenizer)
    assert (tokenizer.starts, tokenizer.ends) == (True, (7, 9, 256))
    text_ends.save(folder, tokenizer)
    assert text_ends.load(folder, ByteTokenizer(), 257) == (True, (7, 9, 256))
    text_ends.save(folder, ByteTokenizer())
    assert text_ends.load(folder, ByteTokenizer(), 257) == (True, (256,))
    for wrong, said in (("[", "is damaged"), ('{"eos_token_id": 257}', "eos_token_id=257 is not")):
        folder.write("generation_config.json", wrong.encode())
        with pytest.raises(UsageError, match=f"generation_config.json.* {said}"):
            text_ends.load(folder, ByteTokenizer(), 257)
    # The model may have tokens that its tokenizer lacks.
    folder.write("generation_config.json", b'{"eos_token_id": [280, 256]}')
    assert text_ends.load(folder, ByteTokenizer(), 300) == (True, (280, 256))
    other = BpeTokenizer("x", tokenizers.Tokenizer(tokenizers.models.BPE({"<s>": 0}, [])))
    assert text_ends.after_warm_start(open_folder(hub), other) == (True, (0,))


@pytest.mark.parametrize("puts", [False, True])
def test_texts_of_a_run_start_as_those_it_began_with(config, hub, puts, tmp_path):
    """A run, a later run and an export have BOS where the tokenizers library puts it."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE({"<s>": 0, "a": 1}, []))
    library.add_special_tokens(["<s>"])
    if puts:
        library.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    wanted = library.encode("aa").ids
    assert wanted == [0, 1, 1][not puts :]
    (tmp_path / "hub/tokenizer.json").write_text(library.to_str())
    (tmp_path / "hub/generation_config.json").write_text('{"eos_token_id": 0}')
    source = open_folder(hub)
    for name in ("run", "later"):
        folder, tokenizer = open_folder(tmp_path / name), load_tokenizer(hub)
        assert tokenizer.starts  # as in a run that begins with nothing
        tokenizer.starts, tokenizer.ends = text_ends.after_warm_start(source, tokenizer)
        assert tokenizer.with_bos(tokenizer.encode("aa")).tolist() == wanted
        tokenizer.save(folder)
        text_ends.save(folder, tokenizer)
        again = load_saved(folder)
        again.starts, again.ends = text_ends.load(folder, again, 2)
        workdir.write_config(folder, config)
        assert (again.starts, again.ends) == (puts, tokenizer.ends)
        source = folder
    again.save(tmp_path / "out", template=again.starts)
    exported = tokenizers.Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    assert exported.encode("aa").ids == wanted


def test_other_shapes_are_told(config, hub):
    other = overrides.apply(config, {"model.feed_forward.hidden_dim": 40}).model
    with pytest.raises(UsageError, match=r"w_1 is \[4, 2, 128, 32\] there and \[4, 2, 128, 40\]"):
        WarmStart(hub, other)


def test_where_a_residual_grows_is_told(tmp_path):
    narrow = overrides.apply(preset_run("rmt-tiny"), {"model.num_layers": 1})
    workdir.write_config(open_folder(tmp_path), narrow)
    wide = overrides.apply(narrow, {"model.store.key_dim": 32}).model
    advice = f"grows in its own folder: --workdir={tmp_path} --set=model.store.key_dim=32 --change"
    with pytest.raises(UsageError, match=f"with different shapes: .*; a run's D_k {advice}"):
        WarmStart(str(tmp_path), wide)
