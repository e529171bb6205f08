"""What the PyTorch code in exported folders computes is what this package computes.

These tests need torch and transformers, of the extra `night`.
"""

import dataclasses
import importlib
import json
import os
import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rmt_tpu
from rmt_tpu import config as cfg
from rmt_tpu.data import ByteTokenizer, load_tokenizer
from rmt_tpu.generation.generate import complete
from rmt_tpu.generation.sampling import Sampling
from rmt_tpu.hub import own
from rmt_tpu.hub.folder import export
from tests import models

pytestmark = pytest.mark.slow

# The source tree itself: under Bazel, this file is a link to there.
GUIDE = Path(__file__).resolve().parents[3] / "docs/guides/weights.md"
PRESETS = [name for name in rmt_tpu.presets() if name.endswith("-tiny")]
LENGTH = 24
AS_OBJECT = {"return_dict_in_generate": True, "do_sample": False}
BLOCKS, FULL = cfg.BlockAttention(num_blocks=2), cfg.FullAttention()
YARN = cfg.YarnScaling(factor=4.0, original_length=16, fast=8.0, slow=1.0)
EXPERTS, VECTOR = cfg.Experts(5, 2, 7), cfg.VectorStore(20)
HEADS = {"num_heads": 4, "head_dim": 6}


def vector(mixer=None, **changes):
    return models.model("vector", **changes | ({"mixer": mixer} if mixer else {}))


def matrix(mixer=None, **changes):
    return models.model("matrix", **changes | ({"mixer": mixer} if mixer else {}))


def attention(store="vector", **options):
    """A model whose attention has options; positions are RoPE's unless they say otherwise."""
    core = cfg.Attention(**{"positions": cfg.Rope(), **HEADS, **options})
    base = models.model("vector") if store == "vector" else models.model("matrix")
    return base.replace(attention=core)


def feed_forward(**options):
    return vector().replace(feed_forward=cfg.FeedForward(22, **options))


def cores(*layers, store=VECTOR, repeat=2, **changes):
    stacks = tuple(cfg.Stack(layer, repeat) for layer in layers)
    return cfg.ModelConfig(stacks, store, vocab_size=models.VOCAB, norm="rmsnorm", **changes)


PLAIN = cfg.FeedForward(22, "swiglu")
ROTATED = cfg.Attention(4, 6, positions=cfg.Rope())
WITH_KDA = ((cfg.Kda(2, 6), PLAIN),)
MUP = cfg.MuP(("store.dim=10", "attention.head_dim=3"), 3.0, 0.5, 2.0)
MODELS = {
    **{f"vector {name}": vector(mixer) for name, mixer in models.MIXERS.items()},
    **{f"matrix {name}": matrix(m) for name, m in models.MIXERS.items() if m.on_matrix},
    # Attention over depth.
    "newest bias": vector(dataclasses.replace(BLOCKS, newest_bias=3.0)),
    "cumulative": vector(dataclasses.replace(BLOCKS, newest_bias=3.0, cumulative=True)),
    "matrix cumulative": matrix(dataclasses.replace(BLOCKS, cumulative=True)),
    "output sum": vector(dataclasses.replace(FULL, output_site="sum", normed_embedding=True)),
    "output newest": vector(dataclasses.replace(BLOCKS, output_site="newest")),
    "output cumulative": vector(
        dataclasses.replace(BLOCKS, output_site="sum", cumulative=True, query="scalars")
    ),
    "normed embedding": matrix(dataclasses.replace(BLOCKS, normed_embedding=True)),
    "keys without gain": vector(dataclasses.replace(FULL, key_gain=False, epsilon=1e-2)),
    "input query without gain": matrix(
        cfg.BlockAttention(sublayers_per_block=4, query="input", key_gain=False)
    ),
    "scalars": vector(dataclasses.replace(FULL, query="scalars", window=2)),
    "no query": vector(dataclasses.replace(BLOCKS, query="none", newest_bias=1.0)),
    "window": vector(dataclasses.replace(FULL, window=2)),
    "sum beside a window": vector(dataclasses.replace(FULL, window=1, output_site="sum")),
    "heads": vector(dataclasses.replace(BLOCKS, num_heads=4, key_norm=False)),
    "sigmoid": matrix(cfg.BlockAttention(layers_per_block=1, weights="sigmoid")),
    # Other mixers.
    "null source": matrix(cfg.DeltaAttention(3, key_gain=False, null_source=0.5)),
    "dilated": vector(cfg.Dense(dilation=2, period=2), num_layers=5),
    "static hc": vector(cfg.HyperConnections(streams=3, dynamic=False)),
    "hc without tanh": vector(cfg.HyperConnections(streams=2, tanh=False), norm="rmsnorm"),
    "mhc of three": vector(cfg.Mhc(streams=3, rounds=3), norm="rmsnorm"),
    "mhc-lite of three": vector(cfg.MhcLite(streams=3, init="prenorm")),
    "wide": vector(cfg.WideStreams(streams=3)),
    "factors": vector(cfg.ResidualScalars(values=False)),
    "values": matrix(cfg.ResidualScalars(scalars=False)),
    "highway carry": vector(cfg.Highway("raw", "tanh", "carry")),
    "highway gated": vector(cfg.Highway(form="gated"), norm="rmsnorm"),
    "lstm from embedding": vector(cfg.DepthLstm(0.7, "embedding")),
    "shared nodes": vector(cfg.Hierarchical(10, 2, shared=True), num_layers=7),
    "own nodes": vector(cfg.Hierarchical(10, 2), num_layers=7),
    # Attention over tokens.
    "alibi": attention(positions=cfg.Alibi(), inverse_layer_scaling=False),
    "no positions": attention("matrix", positions=cfg.NoPositions(), num_heads=4),
    "grouped": attention(num_kv_heads=2, bias=True, scale=0.3),
    "grouped matrix": attention("matrix", num_kv_heads=2, bias=True, query_key_norm=True),
    "norms of heads": attention(
        num_kv_heads=2, query_key_norm=True, query_key_norm_over="heads", window=5
    ),
    "gates": attention(output_gate=True, num_kv_heads=1),
    "gates alike": attention("matrix", output_gate=True),
    "output bias": attention(output_bias=True, normed="output"),
    "both norms": attention(normed="both"),
    "part of rope": attention(positions=cfg.Rope(500.0, 4, YARN)),
    "yarn": attention(positions=cfg.Rope(500.0, scaling=dataclasses.replace(YARN, whole=False))),
    "linear rope": attention(positions=cfg.Rope(scaling=cfg.LinearScaling(3.0))),
    "llama3 rope": attention(
        positions=cfg.Rope(50.0, scaling=cfg.Llama3Scaling(4.0, 1.0, 4.0, 32))
    ),
    # Feed-forward layers.
    **{
        f"ff {name}": feed_forward(activation=name, bias=name != "relu2")
        for name in ("gelu_exact", "relu2", "swiglu", "geglu")
    },
    "ff norms": feed_forward(normed="both", bias=True),
    "ff norms after": feed_forward(normed="output"),
    "rest of the model": vector(norm_bias=True, embedding_scale=3.0, norm_epsilon=1e-2),
    "mup": vector(parametrization=MUP),
    "tied and capped": matrix(tied_embeddings=True, logit_cap=0.7),
    "capped attention": attention(logit_cap=0.3, positions=cfg.Alibi()),
    "situ": feed_forward(activation="situ", situ_beta=0.5, situ_linear_beta=0.7, bias=True),
    "situ unbounded": feed_forward(activation="situ", situ_linear_beta=None),
    # Other cores.
    "two stacks": cores(
        (ROTATED, PLAIN), (dataclasses.replace(ROTATED, window=4), cfg.FeedForward(9))
    ),
    "mla": cores((cfg.Mla(2, 6, kv_rank=5, rope_dim=4), PLAIN)),
    "mla low rank": cores(
        (cfg.Mla(2, 6, 5, 4, query_rank=7, positions=cfg.NoPositions()), PLAIN), mixer=BLOCKS
    ),
    "mla matrix": cores((cfg.Mla(2, 6, 5, 4), PLAIN), store=cfg.MatrixStore(5)),
    "mla gated": cores(
        (cfg.Mla(2, 6, 5, 4, query_rank=7, scale=0.2, latent_epsilon=0.1, output_gate=True), PLAIN)
    ),
    "kda": cores(*WITH_KDA),
    "kda matrix": cores((cfg.Kda(4, 6, num_key_heads=2), PLAIN), store=cfg.MatrixStore(5)),
    "kda bounded": cores((cfg.Kda(2, 6, 3, 5, lower_bound=-5.0), PLAIN)),
    "gated delta net": cores(
        (cfg.Kda(4, 6, num_key_heads=2, decays="heads", gates="full", gate_activation="silu"),)
        + (PLAIN,)
    ),
    "mudd with heads second": cores(
        (ROTATED, cfg.Kda(2, 6, decays="heads", gates="full")),
        (ROTATED, PLAIN),
        mixer=cfg.Mudd(),
        repeat=1,
    ),
    "experts": cores((ROTATED, dataclasses.replace(EXPERTS, scale=2.5))),
    "experts matrix": cores((ROTATED, EXPERTS), store=cfg.MatrixStore(5), mixer=FULL),
    "experts by quantiles": cores(
        (ROTATED, dataclasses.replace(EXPERTS, balance=cfg.Quantiles(), normalized=False))
    ),
    "experts by loss": cores(
        (ROTATED, cfg.Experts(5, 2, 7, 2, True, scores="softmax", balance=cfg.BalanceLoss()))
    ),
    "experts in groups": cores(
        (ROTATED, cfg.Experts(8, 3, 7, groups=4, top_groups=2, activation="situ", situ_beta=0.5))
    ),
    "latent experts": cores((ROTATED, dataclasses.replace(EXPERTS, latent_dim=6))),
    "normed latent experts": cores(
        (ROTATED, dataclasses.replace(EXPERTS, latent_dim=6, latent_norm=True, scale=2.0))
    ),
    "softmax by quantiles": cores(
        (ROTATED, dataclasses.replace(EXPERTS, scores="softmax", balance=cfg.Quantiles()))
    ),
    "experts alone": cores((ROTATED, dataclasses.replace(EXPERTS, shared=0))),
}


@pytest.fixture(scope="module", autouse=True)
def own_code(tmp_path_factory):
    """Folders' code is copied to a folder of this module, and no host is asked for anything."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # while torch and transformers are imported
        importlib.import_module("torch")
        import transformers.dynamic_module_utils as dynamic
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
        yield


def opened(folder, dtype="float32"):
    """The model in a folder, as transformers opens it."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = {"dtype": getattr(torch, dtype)} if dtype else {}
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **dtype)


def theirs(model, tokens, mask=None):
    """Logits of PyTorch."""
    import torch

    mask = None if mask is None else torch.tensor(mask)
    with torch.no_grad():
        return model(torch.tensor(tokens), attention_mask=mask).logits.numpy()


def random_tokens(config):
    return np.random.default_rng(0).integers(0, config.vocab_size, (2, LENGTH))


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_equal_in_float64(name, tmp_path):
    """No gain is 1 and no query 0, so that a term that is left out is seen."""
    config = dataclasses.replace(MODELS[name], compute_dtype="float64")
    tokens = random_tokens(config)
    with jax.enable_x64(True):
        params = jax.tree.map(
            lambda x: jnp.float64(np.float32(x)), models.random_parameters(config)
        )
        decoder = nnx.merge(models.graph(config), params)
        ours = jax.jit(lambda p, t: nnx.merge(models.graph(config), p)(t))(params, tokens)
        export(decoder, ByteTokenizer(), tmp_path / "m", max_length=32, kind="rmt_tpu")
    model = opened(tmp_path / "m", "float64")
    found = theirs(model, tokens)
    assert found.dtype == np.float64 and np.abs(found).max() > 0.5
    np.testing.assert_allclose(found, ours, rtol=0, atol=1e-10)

    # Tokens of padding before or after a text change nothing.
    padding = np.zeros((2, 5), tokens.dtype)
    for order in (1, -1):
        padded = np.concatenate([padding, tokens][::order], 1)
        mask = np.concatenate([padding, np.ones_like(tokens)][::order], 1)
        logits = theirs(model, padded, mask)[mask.astype(bool)]
        np.testing.assert_allclose(logits, found.reshape(logits.shape), rtol=0, atol=1e-10)


def after_some_steps(config):
    """Parameters near their initial values, of which none is 0 or 1."""
    start = models.split(config)[1]
    moved = models.random_parameters(config)
    return jax.tree.map(lambda a, b: jnp.float32(0.9 * a + 0.1 * b), start, moved)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_equal_in_float32(name, tmp_path, record_property):
    """Logits to 1e-4 and greedy tokens, and the folder opens again here as it was."""
    import torch

    config = rmt_tpu.preset(name)
    params = after_some_steps(config)
    decoder = nnx.merge(models.graph(config), params)
    export(decoder, ByteTokenizer(), tmp_path / "of-a.run", max_length=64, kind="rmt_tpu")
    run = jax.jit(lambda p, t: nnx.merge(models.graph(config), p)(t))
    tokens = random_tokens(config)
    model = opened(tmp_path / "of-a.run")
    ours, found = np.asarray(run(params, tokens)), theirs(model, tokens)
    record_property("largest difference", float(np.abs(ours - found).max()))
    print(f"{name}: {np.abs(ours - found).max():.1e} of {np.abs(ours).max():.2f}")
    np.testing.assert_allclose(found, ours, rtol=0, atol=1e-4)

    greedy, begin = tokens.copy(), 8
    for place in range(begin, LENGTH):  # later tokens change nothing at earlier places
        greedy[:, place] = np.asarray(run(params, greedy))[:, place - 1].argmax(-1)
    text = torch.tensor(tokens[:, :begin])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 256}
    generated = model.generate(
        text, attention_mask=torch.ones_like(text), max_new_tokens=LENGTH - begin, **options
    )
    np.testing.assert_array_equal(generated.numpy(), greedy)

    again, tokenizer = rmt_tpu.load(tmp_path / "of-a.run")
    assert again.config == decoder.config and isinstance(tokenizer, ByteTokenizer)
    found = nnx.to_pure_dict(nnx.state(again, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, found, params)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that needs both files of code, in bfloat16."""
    config = models.model("matrix", mixer=models.MIXERS["mudd"], vocab_size=257)
    params = jax.tree.map(jnp.float32, models.random_parameters(config))
    folder, decoder = tmp_path_factory.mktemp("m") / "m", nnx.merge(models.graph(config), params)
    options = {"max_length": 32, "kind": "rmt_tpu", "dtype": "bfloat16"}
    export(decoder, ByteTokenizer(), folder, **options)
    return folder


def test_texts_and_tokens(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    text = "Hé, 東京 \n\t<x>  ''\x00"
    tokens = [256, *text.encode()]
    assert tokenizer(text)["input_ids"] == tokens
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 256)

    model = opened(folder)
    inputs = tokenizer("The ", return_tensors="pt")
    generated = model.generate(**inputs, do_sample=False, max_new_tokens=20)
    decoder, own = rmt_tpu.load(folder)
    (ours,) = complete(decoder, own, [("The ", Sampling(0.0, max_tokens=20))])
    found = tokenizer.decode(generated[0], skip_special_tokens=True)
    assert found == "The " + ours.text and len(ours.tokens) > 3


def test_bfloat16_is_the_dtype_of_its_folder(folder):
    model, decoder = opened(folder, dtype=None), rmt_tpu.load(folder)[0]
    assert {str(p.dtype) for p in model.parameters()} == {"torch.bfloat16"}
    tokens = random_tokens(decoder.config)
    ours = np.asarray(decoder(jnp.asarray(tokens)))
    # The parameters are the same; the computation is narrower.
    np.testing.assert_allclose(theirs(model.float(), tokens), ours, rtol=0, atol=1e-3)
    assert np.isfinite(theirs(model.bfloat16(), tokens)).all()


@pytest.mark.parametrize("name", ["kda", "experts", "experts by quantiles", "hc without tanh"])
def test_counts_and_rates_stay_in_float32(name, tmp_path):
    """A bfloat16 folder keeps them in float32, and so does a model opened in a narrower dtype."""
    decoder = nnx.merge(models.graph(MODELS[name]), models.random_parameters(MODELS[name]))
    options = {"max_length": 32, "kind": "rmt_tpu", "dtype": "bfloat16"}
    export(decoder, ByteTokenizer(), tmp_path / "m", **options)
    ours = nnx.to_pure_dict(nnx.state(decoder, nnx.Param))
    for dtype in (None, "bfloat16"):
        model, exact = opened(tmp_path / "m", dtype), 0
        for path, parameter in model.named_parameters():
            wide = path.rpartition(".")[2] in own.EXACT
            assert str(parameter.dtype) == f"torch.{'float32' if wide else 'bfloat16'}"
            if wide:
                value, exact = ours, exact + 1
                for part in path.split("."):
                    value = value[int(part) if part.isdigit() else part]
                np.testing.assert_array_equal(parameter.detach().numpy(), np.float32(value))
        assert (exact > 0) == (name != "hc without tanh")
        logits = theirs(model, random_tokens(MODELS[name]))
        assert np.isfinite(logits).all()


def test_loss_and_gradient(folder):
    import torch

    model, decoder = opened(folder), rmt_tpu.load(folder)[0]
    tokens = random_tokens(decoder.config)

    def loss(params):
        logits = nnx.merge(models.graph(decoder.config), params)(jnp.asarray(tokens))
        logs = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.take_along_axis(logs, tokens[:, 1:, None], 2).mean()

    params = nnx.to_pure_dict(nnx.state(decoder, nnx.Param))
    ours, gradient = jax.value_and_grad(loss)(params)
    found = model(torch.tensor(tokens), labels=torch.tensor(tokens)).loss
    found.backward()
    assert float(found.detach()) == pytest.approx(float(ours), rel=1e-4)
    keys = model.stacks.get_submodule("0.0.site").read_keys.grad.numpy()
    expected = np.asarray(gradient["stacks"][0][0]["site"]["read_keys"])
    np.testing.assert_allclose(keys, expected, rtol=0, atol=1e-3 * np.abs(expected).max())


def test_arguments_without_effect_are_refused(tmp_path):
    import torch

    config = attention(positions=cfg.Learned(LENGTH))
    decoder = nnx.merge(models.graph(config), models.random_parameters(config))
    export(decoder, ByteTokenizer(), tmp_path / "m", max_length=LENGTH, kind="rmt_tpu")
    model, tokens = opened(tmp_path / "m"), torch.zeros((1, 4), dtype=torch.int64)
    model(tokens, position_ids=torch.arange(4)[None])
    mask = torch.tensor([[0, 1, 1, 1]])
    model(tokens, attention_mask=mask, position_ids=torch.tensor([[1, 0, 1, 2]]))
    refused = {
        "one text in each row": {"position_ids": torch.tensor([[0, 1, 0, 1]])},
        "inputs_embeds": {"inputs_embeds": torch.zeros((1, 4, 8))},
        "output_hidden_states=True is not supp": {"output_hidden_states": True},
        "output_attentions=True is not supp": {"output_attentions": True},
    }
    for message, arguments in refused.items():
        with pytest.raises(ValueError, match=message):
            model(tokens, **arguments)
    model(tokens, output_hidden_states=False, output_attentions=False)
    model.config.output_hidden_states = True  # An argument has precedence over it.
    model(tokens, output_hidden_states=False)
    with pytest.raises(ValueError, match="output_hidden_states=True is not supp"):
        model(tokens)
    model.config.output_hidden_states = False
    with pytest.raises(ValueError, match="output_hidden_states=True is not supp"):
        model.generate(tokens, max_new_tokens=2, output_hidden_states=True, **AS_OBJECT)
    with pytest.raises(ValueError, match=f"more than the model has positions for .{LENGTH}"):
        model(tokens.expand(1, 4).repeat(1, LENGTH))


def test_a_tuple_has_the_loss_and_the_logits(folder):
    import torch

    model, tokens = opened(folder), torch.zeros((1, 4), dtype=torch.int64)
    expected = model(tokens, labels=tokens)
    loss, logits = model(tokens, labels=tokens, return_dict=False)
    assert torch.equal(loss, expected.loss) and torch.equal(logits, expected.logits)
    (alone,) = model(tokens, return_dict=False)
    assert torch.equal(alone, logits)


def test_what_transformers_saves_opens_again(folder, tmp_path):
    """Here too, though config.json has other fields and another order."""
    from transformers import AutoTokenizer

    model = opened(folder, dtype=None)
    model.save_pretrained(tmp_path / "saved")
    AutoTokenizer.from_pretrained(folder, trust_remote_code=True).save_pretrained(
        tmp_path / "saved"
    )
    tokens = random_tokens(models.model(vocab_size=257))
    again = opened(tmp_path / "saved", dtype=None)
    np.testing.assert_array_equal(theirs(again, tokens), theirs(model, tokens))
    ours, tokenizer = rmt_tpu.load(tmp_path / "saved")
    expected, _ = rmt_tpu.load(folder)
    assert ours.config == expected.config
    values = (nnx.to_pure_dict(nnx.state(x, nnx.Param)) for x in (ours, expected))
    jax.tree.map(np.testing.assert_array_equal, *values)
    text = "Hé, <|endoftext|>"
    assert tokenizer.encode(text).tolist() == load_tokenizer("byte").encode(text).tolist()
    assert tokenizer.starts and tokenizer.ends == (256,)
    assert json.loads((tmp_path / "saved/config.json").read_text())["model_type"] == "rmt_tpu"


def test_the_guide(tmp_path, monkeypatch, capsys):
    """Its Python code runs as it stands, and prints what this package generates."""
    config = rmt_tpu.preset("rmt-attnres-tiny")
    decoder = nnx.merge(models.graph(config), after_some_steps(config))
    export(decoder, ByteTokenizer(), tmp_path / "rmt-attnres", max_length=64, kind="rmt_tpu")
    (code,) = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, GUIDE.name, "exec"), {})
    again, tokenizer = rmt_tpu.load(tmp_path / "rmt-attnres")
    (ours,) = complete(again, tokenizer, [("The ", Sampling(0.0, max_tokens=20))])
    assert capsys.readouterr().out == f"The {ours.text}\n"
