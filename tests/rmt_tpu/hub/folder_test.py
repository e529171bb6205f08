"""Folders of the hub's form: the published equations on their tensors, in and out, bit for bit."""

import dataclasses
import json
import re
import resource
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from flax import nnx
from safetensors.numpy import load_file, save_file

import rmt_tpu
from rmt_tpu import config as cfg
from rmt_tpu.config import overrides
from rmt_tpu.config.presets import run as preset_run
from rmt_tpu.data import (
    ByteTokenizer,
    ChatTemplate,
    load_saved,
    load_tokenizer,
    read_template,
    spec_of_folder,
)
from rmt_tpu.data.bpe import BpeTokenizer
from rmt_tpu.errors import ArgumentError, RunError, UsageError
from rmt_tpu.hub import weights
from rmt_tpu.hub.folder import export, new_folder
from rmt_tpu.hub.models import Description, config_values, describe, is_hub, model_config
from rmt_tpu.hub.tokens import read_tokenizer, tokenizer_config
from rmt_tpu.runs.loading import identity, load_step
from rmt_tpu.storage import open_folder
from rmt_tpu.training import trainer
from tests import cli, models
from tests.rmt_tpu.hub import oracle
from tests.rmt_tpu.hub.folders import parameters, same
from tests.tiers import later

KINDS = {
    "llama": {},
    "qwen2": {"bias": True},
    "qwen3": {"query_key_norm": True},
    "no groups": {"num_kv_heads": 4},
}

# More tokens than a ByteTokenizer has, as where a vocabulary is rounded up for the hardware.
PADDED = 264


def model(kind="llama", **changes):
    how = {"num_kv_heads": 2} | KINDS[kind]
    attention = cfg.Attention(4, 6, cfg.Rope(base=5000.0), inverse_layer_scaling=False, **how)
    layer = (attention, cfg.FeedForward(hidden_dim=14, activation="swiglu"))
    plain = cfg.ModelConfig(
        (cfg.Stack(layer, 3),),
        cfg.VectorStore(12),
        vocab_size=257,
        norm="rmsnorm",
        norm_epsilon=1e-5,
    )
    return plain.replace(**changes)


def made(config):
    params = jax.tree.map(jnp.float32, models.random_parameters(config))
    return nnx.merge(models.graph(config), params)


@pytest.fixture
def folder(tmp_path):
    export(made(model()), ByteTokenizer(), tmp_path / "hub", max_length=64)
    return tmp_path / "hub"


@pytest.mark.parametrize("kind", ["qwen3", *later("llama", "qwen2", "no groups")])
def test_the_published_equations_on_its_tensors(kind, tmp_path):
    decoder = made(model(kind, vocab_size=PADDED))
    export(decoder, ByteTokenizer(), tmp_path / "hub", max_length=64)
    tensors = load_file(tmp_path / "hub/model.safetensors")
    config = json.loads((tmp_path / "hub/config.json").read_text())
    tokens = np.array([256, 5, 99, 5, 200, 7, 31])
    wanted = oracle.logits(tensors, config, tokens)
    found = jax.jit(lambda tokens: decoder(tokens))(jnp.array(tokens)[None])[0]
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_out_and_in_is_the_same_bit_for_bit(kind, tmp_path, monkeypatch):
    decoder = made(model(kind, vocab_size=PADDED))
    export(decoder, ByteTokenizer(), tmp_path / "one", max_length=64)
    monkeypatch.setattr(weights, "SHARD_BYTES", 9000)  # bytes
    export(decoder, ByteTokenizer(), tmp_path / "shards", max_length=64)
    assert len(list((tmp_path / "shards").glob("model-0000*-of-0000*.safetensors"))) > 2
    for name in ("one", "shards"):
        found, tokenizer = rmt_tpu.load(tmp_path / name)
        assert found.config == decoder.config and isinstance(tokenizer, ByteTokenizer)
        same(found, decoder)
    assert is_hub(tmp_path / "one") and describe(tmp_path / "one").max_length == 64
    # And on a mesh, each device its part.
    placed, _ = rmt_tpu.load(tmp_path / "shards", mesh="data=2,fsdp=2,tensor=2")
    same(placed, decoder)
    w_1 = placed.stacks[0][1].core.w_1[...]
    assert w_1.addressable_shards[0].data.size == w_1.size // 4


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, *later(False)])
def test_what_was_trained_on_from_a_folder_goes_out_again(tied, tmp_path):
    """Though the vocabulary is padded beyond the tokenizer's, and the run is on a mesh."""
    padded = model("qwen3", vocab_size=PADDED, tied_embeddings=tied)
    export(made(padded), ByteTokenizer(), tmp_path / "hub", max_length=64)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 20)
    config = overrides.apply(
        dataclasses.replace(preset_run("llama-tiny"), model=describe(tmp_path / "hub").model),
        {
            "data.source": str(tmp_path / "text.txt"),
            "data.seq_len": 16,
            "train.init_from": str(tmp_path / "hub"),
            "train.steps": 2,
            "train.batch_size": 8,
            "train.sample_tokens": 0,
            "train.eval_batches": 1,
            "train.mesh": "data=4,fsdp=2",
        },
    )
    trainer.train(config, tmp_path / "run", label="run")
    trained = load_step(tmp_path / "run")
    begun = parameters(made(padded))["embedding"]["tokens"]
    assert (parameters(trained.decoder)["embedding"]["tokens"] != begun).any()
    assert ("unembedding" in parameters(trained.decoder)) == (not tied)
    source = "{{ messages[0].content }}"
    ChatTemplate(source, ByteTokenizer()).save(open_folder(tmp_path / "run"))
    cli.succeed("export", f"--workdir={tmp_path / 'run'}", f"--output={tmp_path / 'out'}")
    assert (
        read_template(open_folder(tmp_path / "out"), ByteTokenizer())
        .json()["chat_template"]
        .endswith(source)
    )
    again, tokenizer = rmt_tpu.load(tmp_path / "out")
    same(again, trained.decoder)
    assert (again.config.vocab_size, tokenizer.vocab_size) == (PADDED, 257)
    written = json.loads((tmp_path / "out/config.json").read_text())
    tensors, tokens = load_file(tmp_path / "out/model.safetensors"), np.array([256, 5, 99, 200])
    assert written["tie_word_embeddings"] == tied == ("lm_head.weight" not in tensors)
    assert written["vocab_size"] == PADDED == len(tensors["model.embed_tokens.weight"])
    found = jax.jit(lambda tokens: trained.decoder(tokens))(jnp.array(tokens)[None])[0]
    np.testing.assert_allclose(found, oracle.logits(tensors, written, tokens), atol=1e-5)


def test_narrow_tensors_and_tied_embeddings(folder, tmp_path):
    decoder = made(model())
    export(decoder, ByteTokenizer(), tmp_path / "narrow", max_length=64, dtype="bfloat16")
    found, _ = rmt_tpu.load(tmp_path / "narrow")
    narrow = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32), decoder)
    same(found, narrow)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UsageError, match=r"lm_head.weight \[257, 12\] is missing$"):
        rmt_tpu.load(folder)
    (folder / "config.json").write_text(json.dumps(VALUES | {"tie_word_embeddings": True}))
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    save_file(tensors, folder / "model.safetensors")
    tied, tokenizer = rmt_tpu.load(folder)
    assert tied.config.tied_embeddings and "unembedding" not in parameters(tied)
    logits = jax.jit(lambda tokens: tied(tokens))(jnp.array([[256, 5, 99]]))[0]
    values = json.loads((folder / "config.json").read_text())
    wanted = oracle.logits(tensors, values, np.array([256, 5, 99]))
    np.testing.assert_allclose(logits, wanted, atol=1e-5)
    # They stay tied on the way out and in, also as the package's own kind.
    for kind in (None, "rmt_tpu"):
        out = tmp_path / f"out-{kind}"
        export(tied, tokenizer, out, max_length=64, kind=kind)
        assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
        written = load_file(out / "model.safetensors")
        assert not {"lm_head.weight", "unembedding.kernel"} & set(written)
        again = rmt_tpu.load(out)[0]
        assert again.config == tied.config
        same(again, tied)
    # A tensor of W_U may be there too, if it has the same values.
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors")
    same(rmt_tpu.load(folder)[0], tied)
    tensors["model.embed_tokens.weight"] = narrow = tensors["lm_head.weight"].astype("bfloat16")
    tensors["lm_head.weight"] = narrow.astype("float32")
    save_file(tensors, folder / "model.safetensors")
    assert rmt_tpu.load(folder)[0].config == tied.config
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UsageError, match="lm_head.weight has other values than model.embed_tok"):
        rmt_tpu.load(folder)


def test_tensors_that_do_not_fit_are_told_with_both_shapes(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = np.ones(13, np.float32)
    tensors["model.extra"] = np.ones((2, 3), np.float32)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UsageError, match="do not fit its config.json: ") as error:
        rmt_tpu.load(folder)
    for piece in (
        "model.norm.weight is [13], not [12]",
        "model.layers.1.mlp.up_proj.weight [14, 12] is missing",
        "model.extra [2, 3] is not a tensor of this model",
    ):
        assert piece in str(error.value)


def test_weights_that_are_no_finite_floats_are_told(folder):
    whole = load_file(folder / "model.safetensors")

    def error(name, value):
        save_file(whole | {name: value}, folder / "model.safetensors")
        with pytest.raises((UsageError, RunError)) as told:
            rmt_tpu.load(folder)
        return str(told.value)

    legal = "; legal: F32, BF16, F16, F64"
    for dtype, named in ((np.int8, "I8"), (bool, "BOOL")):
        told = error("lm_head.weight", np.ones((257, 12), dtype))
        assert f"lm_head.weight has dtype {named}{legal}" in told
    # NumPy has no such dtype.
    content = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size].replace(b"BOOL", b"F8_E4M3")
    (folder / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + content[8 + size :]
    )
    with pytest.raises(UsageError, match="lm_head.weight has dtype F8_E4M3"):
        rmt_tpu.load(folder)
    for value in (np.float32("nan"), ml_dtypes.bfloat16("inf"), np.float64(1e300)):
        told = error("model.norm.weight", np.full(12, value))
        assert "model.norm.weight has values that are not finite in float32" in told


def test_an_unknown_dtype_is_told(tmp_path):
    with pytest.raises(
        ArgumentError, match="^dtype=fp16 cannot be written; legal: float32, bfloat16, float16$"
    ):
        export(made(model()), ByteTokenizer(), tmp_path / "hub", max_length=64, dtype="fp16")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "dtype, large, shard", [("float16", 7e4, 5000), ("bfloat16", 3.4e38, weights.SHARD_BYTES)]
)
def test_numbers_that_a_narrow_dtype_lacks_are_refused(dtype, large, shard, tmp_path, monkeypatch):
    """The error names the tensor and the argument, which is the flag's value.

    The export leaves nothing behind, so that another dtype fits in the same folder.
    """
    monkeypatch.setattr(weights, "SHARD_BYTES", shard)
    decoder = made(model())
    gain = decoder.final_site.gain
    gain[...] = gain[...].at[3].set(-large)
    with pytest.raises(ArgumentError) as told:
        export(decoder, ByteTokenizer(), tmp_path / "hub", max_length=64, dtype=dtype)
    tensor = "the tensor model.norm.weight, whose largest magnitude is"
    assert str(told.value).startswith(f"dtype={dtype} cannot express {tensor} {large:.4g}; legal:")
    assert not list(tmp_path.iterdir())
    export(decoder, ByteTokenizer(), tmp_path / "hub", max_length=64)
    same(rmt_tpu.load(tmp_path / "hub")[0], decoder)


def test_weights_are_told_apart_without_reading_them(folder):
    """By which answers are kept."""
    before = identity(folder)
    assert before[0] == "hub" and identity(folder) == before
    (folder / "config.json").write_text(json.dumps(VALUES | {"rms_norm_eps": 1e-2}))
    assert identity(folder) != before
    with pytest.raises(
        ArgumentError, match="step=3 needs a run folder, and .* Hugging Face format"
    ):
        identity(folder, 3)


def test_files_that_are_not_whole(folder, tmp_path):
    whole = (folder / "model.safetensors").read_bytes()
    header = len(whole) - 8  # the longest that fits the file
    too_long = "cannot be read: the header length of {} bytes exceeds the file"
    for content, words in (
        (whole[:900], "cannot be read: the header length of .* exceeds the file"),
        ((header + 1).to_bytes(8, "little") + whole[8:], too_long.format(header + 1)),
        (header.to_bytes(8, "little") + whole[8:], "cannot be read: .*"),
        (whole[:-1], "cannot be read: the bytes of .* do not fit its shape or the file"),
    ):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(RunError, match=f"model.safetensors {words}") as error:
            rmt_tpu.load(folder)
        assert ("exceeds" in str(error.value)) == ("exceeds" in words)
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        UsageError, match=r"has neither model.safetensors nor model.safetensors.ind"
    ):
        rmt_tpu.load(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(RunError, match="index.json is damaged: it has no weight_map"):
        rmt_tpu.load(folder)
    index.write_text('{"weight_map": {"a": "b.safetensors"}}')
    with pytest.raises(RunError, match="has no b.safetensors, which model.*index.json lists"):
        rmt_tpu.load(folder)
    with pytest.raises(UsageError, match="is not empty; legal: a new or empty folder"):
        export(made(model()), ByteTokenizer(), folder, max_length=64)


def test_the_folder_of_an_export(tmp_path, monkeypatch):
    """It is the home folder's for all files, and a bucket or a file is refused at once."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    export(made(model()), ByteTokenizer(), "~/hub", max_length=64)
    assert rmt_tpu.load(tmp_path / "hub") and [path.name for path in tmp_path.iterdir()] == ["hub"]
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "hub").iterdir()}
    assert len(set(modes.values())) == 1, modes
    # What a killed export has left does not stand in the way of the next.
    (tmp_path / "killed/unfinished").mkdir(parents=True)
    (tmp_path / "killed/unfinished/model.safetensors").touch()
    export(made(model()), ByteTokenizer(), "~/killed", max_length=64)
    names = lambda name: {path.name for path in (tmp_path / name).iterdir()}
    assert names("killed") == names("hub")
    shutil.rmtree("killed")
    (tmp_path / "own/unfinished").mkdir(parents=True)
    (tmp_path / "own/unfinished/thesis.tex").touch()
    with pytest.raises(UsageError, match="^own is not empty"):
        new_folder("own")
    shutil.rmtree("own")
    (tmp_path / "file").touch()
    for folder, words in (
        ("gs://bucket/hub", "gs://bucket/hub is not a local folder; legal: a new or empty local"),
        ("file", "file cannot be written: Not a directory"),
        ("file/new", "file/new cannot be written: Not a directory"),
        ("/proc/new/hub", "/proc/new/hub cannot be written: "),
        ("hub", "hub is not empty; legal: a new or empty folder"),
    ):
        with pytest.raises(UsageError, match=f"^{words}"):
            new_folder(folder)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_disk_without_room_is_told(tmp_path):
    """A limit of the size of files stands for it. A folder that was there stays, and is empty."""
    (tmp_path / "hub").mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # bytes
    try:
        with pytest.raises(RunError) as told:
            export(made(model()), ByteTokenizer(), tmp_path / "hub", max_length=64)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    where = tmp_path / "hub/unfinished/model.safetensors"
    assert re.fullmatch(f"{where} cannot be written: .*File too large.*", str(told.value))
    assert not list((tmp_path / "hub").iterdir())


def test_a_text_ends_where_the_folder_says(folder, tmp_path):
    """In generation_config.json first, then in config.json; and out again."""
    ends = lambda where: rmt_tpu.load(where)[1].ends
    assert ends(folder) == (256,)
    (folder / "config.json").write_text(json.dumps(VALUES | {"eos_token_id": 7}))
    later = folder / "generation_config.json"
    later.write_text("{}")
    assert ends(folder) == (7,)
    later.write_text('{"eos_token_id": [5, 9]}')
    decoder, tokenizer = rmt_tpu.load(folder)
    assert (tokenizer.bos, tokenizer.ends, ByteTokenizer.ends) == (256, (5, 9), (256,))
    export(decoder, tokenizer, tmp_path / "again", max_length=64)
    assert ends(tmp_path / "again") == (5, 9)
    for name in ("config.json", "generation_config.json"):
        written = json.loads((tmp_path / "again" / name).read_text())
        assert (written["bos_token_id"], written["eos_token_id"]) == (256, [5, 9])
    for wrong in ("[]", "257", "true", "[-1]"):
        later.write_text(f'{{"eos_token_id": {wrong}}}')
        with pytest.raises(UsageError, match=r"eos_token_id=.* legal: an id from 0 to 256, or"):
            rmt_tpu.load(folder)
    later.write_text("{")
    with pytest.raises(UsageError, match="generation_config.json is not a JSON object"):
        rmt_tpu.load(folder)


NAMED = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "<s>": 1, "</s>": 2}, []))
NAMED.add_special_tokens(["<s>", "</s>"])


def test_names_of_special_tokens_go_out(tmp_path):
    """What transformers takes bos_token and eos_token from, and which are put before a text."""
    tokenizer = BpeTokenizer.from_json("x", NAMED.to_str())
    assert tokenizer.ends == (1,) and not tokenizer.template
    tokenizer.ends = (2,)
    export(made(model(vocab_size=3)), tokenizer, tmp_path / "hub", max_length=64)
    written = json.loads((tmp_path / "hub/tokenizer_config.json").read_text())
    assert (written["bos_token"], written["eos_token"]) == ("<s>", "</s>")
    assert written["add_bos_token"] is True
    # Else transformers 4 passes token types to `generate`, which refuses them.
    assert written["model_input_names"] == ["input_ids", "attention_mask"]
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "hub/tokenizer.json"))
    assert library.encode("aa").ids == [1, 0, 0]
    again = rmt_tpu.load(tmp_path / "hub")[1]
    assert again.starts and again.template and again.fingerprint() == tokenizer.fingerprint()


@pytest.mark.parametrize("written", ["", "{{ bos_token }}"])
@pytest.mark.parametrize("kind", ["names", "bytes"])
def test_a_chat_template_goes_out(kind, written, tmp_path):
    """A conversation is what it was, also with the start token that training put before it."""
    tokenizer, end = BpeTokenizer.from_json("x", NAMED.to_str()), "</s>"
    if kind == "bytes":
        tokenizer, end = ByteTokenizer(), ""
    source = (
        f"{written}{{% for m in messages %}}\n{{{{ m.content }}}}{{{{ eos_token }}}}{{% endfor %}}"
    )
    names = {"eos_token": end}
    template = ChatTemplate(source, tokenizer, names=names, starts=True)
    size = {"vocab_size": tokenizer.vocab_size}
    export(made(model(**size)), tokenizer, tmp_path / "hub", max_length=64, template=template)
    found = read_template(open_folder(tmp_path / "hub"), rmt_tpu.load(tmp_path / "hub")[1])
    talk = 2 * [{"role": "user", "content": "a"}]
    tokens = found.encode(found.render(talk)).tolist()
    assert tokens == template.encode(template.render(talk)).tolist()
    assert tokens == {"names": [1, 0, 2, 0, 2], "bytes": [256, 97, 97]}[kind]


def test_a_text_starts_as_the_folder_s_tokenizer_has_it(tmp_path):
    """And always with something; a run puts the start token there, whosever tokenizer it has."""
    library = tokenizers.Tokenizer.from_str(NAMED.to_str())
    for starts in (False, True):
        library.save(str(tmp_path / "tokenizer.json"))
        tokenizer = read_tokenizer(tmp_path, Description(model(), 64))
        assert tokenizer.starts == starts
        assert tokenizer.with_bos([0, 0]).tolist() == [1] * starts + [0, 0]
        assert tokenizer.with_bos([]).tolist() == [1]
        assert load_tokenizer(str(tmp_path)).starts
        tokenizer.save(tmp_path / "run")
        assert load_saved(tmp_path / "run").starts
        library.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )


def test_a_folder_of_the_byte_tokenizer_s_name(tmp_path, monkeypatch):
    (tmp_path / "byte").mkdir()
    NAMED.save(str(tmp_path / "byte/tokenizer.json"))
    monkeypatch.chdir(tmp_path)
    assert read_tokenizer("byte", Description(model(), 64)).vocab_size == 3
    assert spec_of_folder("byte") == "./byte" and spec_of_folder(tmp_path) == str(tmp_path)


def test_an_end_that_config_json_does_not_say(tmp_path):
    """The tokenizer's own; else that of the kind, where it is no word; else BOS."""
    NAMED.save(str(tmp_path / "tokenizer.json"))
    described = Description(model(), 64)
    given = tmp_path / "tokenizer_config.json"
    ends = lambda **how: read_tokenizer(tmp_path, described._replace(**how)).ends
    assert ends() == (1,)
    assert ends(default_end=2) == (2,)
    assert ends(default_end=0) == ends(default_end=9) == (1,)
    for named in ("</s>", {"content": "</s>", "lstrip": False}):
        given.write_text(json.dumps({"eos_token": named}))
        assert ends() == ends(default_end=0) == (2,)
        assert ends(ends=(0, 1)) == (0, 1)
    given.write_text('{"eos_token": "<other>"}')
    assert ends() == (1,)
    given.write_text("{")
    with pytest.raises(UsageError, match="tokenizer_config.json is not a JSON object"):
        ends()


VALUES = config_values(model(), max_length=64, bos=256, ends=[256])
ABSENT = object()


def test_an_end_token_without_a_name_leaves_out_the_names():
    tokenizer = ByteTokenizer()
    tokenizer.ends = (280, 256)
    assert tokenizer_config(tokenizer, 64, None) == {}
    tokenizer.ends = (256,)
    assert tokenizer_config(tokenizer, 64, None)["eos_token"] == "<|endoftext|>"


REFUSED = {
    "family": ({"model_type": "bert"}, "model_type 'bert' is unknown; legal: llama, mistral"),
    "rope": (
        {"rope_scaling": {"rope_type": "longrope"}},
        'rope_type=\'longrope\' is .*; legal: "default" or "llama3" or "linear" or "yarn"$',
    ),
    "named rope": ({"rope_scaling": "yarn"}, "rope_scaling='yarn' is not .*; legal: null, or an"),
    "ropes of kinds": ({"rope_parameters": {"full_attention": {}}}, "rope_parameters=.* without n"),
    "part": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 is"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config=.*; legal: null"),
    "groups": ({"num_key_value_heads": 3}, "heads=3 .*; legal: a divisor of the 4 heads"),
    "odd": ({"head_dim": 5}, "head_dim=5 is not .*; legal: an even number"),
    "no name": ({"model_type": ["llama"]}, "model_type .* is unknown; did you mean"),
    "later rope": ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type='dynamic' is not"),
    "turns": (
        {"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 4, "high_freq_factor": 4}},
        "rope_scaling: low_freq_factor=4.0 is not .*; legal: below high_freq_factor=4.0",
    ),
    "window": ({"sliding_window": 4096}, "sliding_window=4096 is not .*; legal: null$"),
    "usual groups": (
        {"model_type": "qwen2", "num_key_value_heads": ABSENT},
        "num_key_value_heads=32 is not",
    ),
    "no size": ({"num_hidden_layers": ABSENT}, "num_hidden_layers=None is not"),
    "layers": ({"layer_types": ["sliding_attention"]}, "layer_types=.'sliding_attention'"),
    "bias": ({"attention_bias": True}, "attention_bias=True is not .*; legal: false$"),
    "activation": ({"hidden_act": "relu"}, "hidden_act 'relu' is unknown; .* legal: silu"),
    "epsilon": ({"rms_norm_eps": 10**400}, "rms_norm_eps=1000.* is not .*; legal: a positive num"),
    "magnitude": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 10**400}},
        "mscale=1000.* is not .*; legal: a number, at least 0",
    ),
    "size": ({"hidden_size": "12"}, "hidden_size='12' is not .* at least 1"),
}


@pytest.mark.parametrize("changes, message", REFUSED.values(), ids=REFUSED)
def test_what_no_core_computes_is_named(changes, message):
    assert model_config(VALUES, "x") == model()
    with pytest.raises(UsageError, match=f"^x: .*{message}"):
        model_config(without(VALUES | changes), "x")


def without(values):
    return {name: value for name, value in values.items() if value is not ABSENT}


def test_what_is_not_there_is_as_its_kind_has_it(folder):
    """As transformers has it, key by key; null is another thing."""
    sizes = lambda **changes: model_config(without(VALUES | changes), "x").cores[0]
    assert sizes(head_dim=ABSENT, hidden_size=40).head_dim == 10
    assert sizes(model_type="qwen3", head_dim=ABSENT).head_dim == 128
    eight = {"num_attention_heads": 16, "num_key_value_heads": ABSENT}
    assert sizes(**eight).kv_heads == 16
    assert sizes(model_type="mistral", sliding_window=None, **eight).kv_heads == 8
    assert sizes(model_type="mistral", sliding_window=ABSENT).window == 4096
    slides = {"model_type": "qwen2", "sliding_window": 9}
    assert model_config(VALUES | slides, "x") == model("qwen2")
    for kind, length in (("llama", 2048), ("mistral", 131072), ("qwen2", 32768), ("qwen3", 32768)):
        changed = VALUES | {"model_type": kind, "max_position_embeddings": ABSENT}
        (folder / "config.json").write_text(json.dumps(without(changed | {"sliding_window": None})))
        assert describe(folder).max_length == length


def test_later_files_have_rope_s_base_elsewhere():
    later = {name: value for name, value in VALUES.items() if name != "rope_theta"}
    later["rope_parameters"] = {"rope_theta": 5000.0, "rope_type": "default"}
    assert model_config(later, "x") == model()
    # As Llama 3.1's files have it, where either kind of file does, and back.
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    scaled = model_config(VALUES | {"rope_scaling": scaling}, "x")
    rope = cfg.Rope(5000.0, scaling=cfg.Llama3Scaling(32.0, original_length=64))
    assert scaled.cores[0].positions == rope
    # Of these transformers has a value for the last alone: the length that the model is for.
    for left_out in list(scaling)[1:]:
        fewer = {name: value for name, value in scaling.items() if name != left_out}
        if left_out == "original_max_position_embeddings":
            assert model_config(VALUES | {"rope_scaling": fewer}, "x") == scaled
        else:
            with pytest.raises(UsageError, match=f"rope_scaling: {left_out}=None is not supported"):
                model_config(VALUES | {"rope_scaling": fewer}, "x")
    assert (
        model_config(later | {"rope_parameters": {"rope_theta": 5000.0, **scaling}}, "x") == scaled
    )
    assert config_values(scaled, max_length=64, bos=256, ends=[256]) == VALUES | {
        "rope_scaling": scaling
    }
    window = {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 9}
    assert model_config(VALUES | window, "x") == model("qwen2")


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"mixer": cfg.BlockAttention(num_blocks=2)}, "model.mixer=block_attention"),
        ({"store": cfg.MatrixStore(4)}, "model.store=matrix"),
        ({"norm": "layernorm"}, "model.norm=layernorm"),
    ],
)
def test_what_has_no_form_there_is_named(changes, field):
    with pytest.raises(UsageError, match=f"{field} cannot be written in the hub's format; legal: "):
        config_values(model(**changes), max_length=1, bos=0, ends=[0])
