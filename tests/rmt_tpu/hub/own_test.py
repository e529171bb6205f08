"""Folders of the kind `rmt_tpu` hold any model, bit for bit."""

import ast
import dataclasses
import json
import re
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from safetensors.numpy import load_file

import rmt_tpu
from rmt_tpu import config as cfg
from rmt_tpu.data import ByteTokenizer
from rmt_tpu.errors import UsageError
from rmt_tpu.hub import own, weights
from rmt_tpu.hub.folder import export
from rmt_tpu.hub.models import config_values, describe, is_hub, model_config
from rmt_tpu.runs.warm_start import WarmStart
from tests import models
from tests.tiers import later

MODELS = {
    "matrix": models.model("matrix", mixer=models.MIXERS["delta"], vocab_size=257),
    "mudd": models.model("vector", mixer=models.MIXERS["mudd"], vocab_size=257),
    "lstm": models.model("vector", mixer=models.MIXERS["lstm"], vocab_size=257),
    "hc": models.model("vector", mixer=models.MIXERS["hc"], vocab_size=257),
    "blocks": models.model("vector", mixer=models.MIXERS["blocks"], vocab_size=257),
}


def made(config):
    params = jax.tree.map(jnp.float32, models.random_parameters(config))
    return nnx.merge(models.graph(config), params)


def parameters(decoder):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(decoder, nnx.Param)))


@pytest.mark.parametrize("name", ["matrix", *later("mudd", "lstm", "hc", "blocks")])
def test_out_and_in_is_the_same_bit_for_bit(name, tmp_path, monkeypatch):
    decoder = made(MODELS[name])
    monkeypatch.setattr(weights, "SHARD_BYTES", 9000)  # bytes
    folder = tmp_path / "own"
    export(decoder, ByteTokenizer(), folder, max_length=32, kind="rmt_tpu")
    assert is_hub(folder) and describe(folder).max_length == 32
    assert len(list(folder.glob("model-0000*.safetensors"))) > 1
    for mesh in (None, "data=4,fsdp=2"):
        found, tokenizer = rmt_tpu.load(folder, mesh=mesh)
        assert found.config == decoder.config and isinstance(tokenizer, ByteTokenizer)
        jax.tree.map(np.testing.assert_array_equal, parameters(found), parameters(decoder))


def test_a_tensor_is_a_parameter_of_its_shape_and_name(tmp_path):
    decoder = made(MODELS["blocks"])
    export(decoder, ByteTokenizer(), tmp_path / "own", max_length=32, kind="rmt_tpu")
    tensors = load_file(tmp_path / "own/model.safetensors")
    query = decoder.stacks[0][1].site.mix.query[...]
    np.testing.assert_array_equal(tensors["stacks.0.1.site.mix.query"], query)
    assert len(tensors) == len(jax.tree.leaves(parameters(decoder)))
    # The choices of a run for its device are not in the folder.
    chosen = MODELS["blocks"].replace(compute_dtype="bfloat16", remat="full", kernels="xla")
    values = config_values(chosen, max_length=8, bos=0, ends=[0], kind="rmt_tpu")
    assert model_config(json.loads(json.dumps(values)), "x") == MODELS["blocks"]


def test_config_json_is_written_last(tmp_path, monkeypatch):
    """A process that is killed before leaves no folder that looks like a model."""
    moved, rename = [], Path.rename

    def noted(path, target):
        moved.append(Path(target).name)
        assert not is_hub(tmp_path / "hub")
        return rename(path, target)

    (tmp_path / "hub").mkdir()
    monkeypatch.setattr(Path, "rename", noted)
    export(made(MODELS["blocks"]), ByteTokenizer(), tmp_path / "hub", max_length=32, kind="rmt_tpu")
    monkeypatch.undo()
    assert set(moved) == {path.name for path in (tmp_path / "hub").iterdir()}
    assert moved[-1] == "config.json" and is_hub(tmp_path / "hub")


def test_counts_and_rates_stay_exact_in_narrow_files(tmp_path):
    """All other tensors have the given dtype. The PyTorch code keeps the same ones in float32."""
    experts = cfg.Experts(5, 2, 7, balance=cfg.Quantiles())
    stacks = (cfg.Stack((cfg.Kda(2, 6), experts), 2),)
    model = cfg.ModelConfig(stacks, cfg.VectorStore(20), vocab_size=257, norm="rmsnorm")
    decoder = made(model)
    options = {"max_length": 32, "kind": "rmt_tpu", "dtype": "bfloat16"}
    export(decoder, ByteTokenizer(), tmp_path / "own", **options)
    tensors = load_file(tmp_path / "own/model.safetensors")
    wide = {name for name, x in tensors.items() if x.dtype == np.float32}
    assert wide == {name for name in tensors if name.rpartition(".")[2] in own.EXACT}
    assert {name.rpartition(".")[2] for name in wide} == own.EXACT
    # Some versions of transformers look for the names in any part of a tensor's name.
    assert wide == {name for name in tensors if re.search("|".join(own.EXACT), name)}
    for name in wide:
        value = decoder
        for part in name.split("."):
            value = value[int(part)] if part.isdigit() else getattr(value, part)
        np.testing.assert_array_equal(tensors[name], value[...])
    (found,) = re.findall("^EXACT = (.*)$", SOURCES[list(SOURCES)[1]].read_text(), re.MULTILINE)
    assert ast.literal_eval(found) == own.EXACT


def test_a_new_run_takes_over_what_it_shares(tmp_path):
    """A run with the same mixer takes over all weights, and with another all but the mixes."""
    export(made(MODELS["blocks"]), ByteTokenizer(), tmp_path / "own", max_length=32, kind="rmt_tpu")
    assert not WarmStart(str(tmp_path / "own"), MODELS["blocks"]).new
    delta = dataclasses.replace(MODELS["blocks"], mixer=cfg.WideStreams(streams=2))
    new = WarmStart(str(tmp_path / "own"), delta).new
    assert new and {path[-2] for path in new} == {"mix"}


def test_mistakes_are_one_line(tmp_path):
    values = config_values(MODELS["blocks"], max_length=8, bos=0, ends=[0], kind="rmt_tpu")
    assert values["model_type"] == "rmt_tpu"
    model = values["model"] | {"mixer": {"kind": "block_attention", "num_blocks": -1}}
    with pytest.raises(
        UsageError, match="^here: the field model is not a .*: mixer.num_blocks=-1 must"
    ):
        model_config(values | {"model": model}, "here")
    with pytest.raises(
        UsageError, match="^here: the field model is not a .*: the config must be a JSON obj"
    ):
        model_config({"model_type": "rmt_tpu"}, "here")
    with pytest.raises(UsageError, match="mixer=block_attention cannot be .* --kind=rmt_tpu"):
        export(made(MODELS["blocks"]), ByteTokenizer(), tmp_path / "own", max_length=32)
    assert not (tmp_path / "own").exists()


# The PyTorch code ----------------------------------------------------------------------------

SOURCES = {name: Path(own.__file__).parent / "torch" / f"{name}.py" for name in own.CODE}
# Options that have no part in logits, that follow from shapes or from which parameters there are,
# or that are in the factors.
NOT_READ = {
    *("capacity", "compute_dtype", "conv_size", "decays", "dim", "fraction_bits", "gate_rank"),
    *("hidden_dim", "init", "init_std", "inverse_layer_scaling", "kernels", "key_dim"),
    *("max_length", "norm_bias", "null_source", "parametrization", "phase_layers"),
    *("query_key_norm_over", "query_rank", "remat", "scalars", "shared_gate", "spread"),
    *("latent_dim", "latent_norm", "vector_dim", "vectors", "weight"),
}


def test_code_is_short_and_computes_what_is_said():
    """Its own tables name the kinds that `own.CODE` names, which are all that there are."""
    for name, path in SOURCES.items():
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 420
        compile(text, path, "exec")
        (model,) = re.findall(r"^class RmtTpuForCausalLM.*", text, re.DOTALL | re.MULTILINE)
        tables = re.findall(
            r"^    (?:mixers|cores) = [^{]*\{(.*?)\}", model, re.DOTALL | re.MULTILINE
        )
        kinds = re.findall(r'"(\w+)":', " ".join(tables))
        assert len(tables) == 2 and sorted(kinds) == sorted(own.CODE[name])
    classes = (*get_args(cfg.Mixer), *get_args(cfg.Core))
    assert frozenset().union(*own.CODE.values()) == {cls.kind for cls in classes}


def test_code_reads_every_option():
    """An option that the code does not know would make another model of the same folder."""
    text = "".join(path.read_text(encoding="utf-8") for path in SOURCES.values())
    unions = (cfg.Mixer, cfg.Core, cfg.Store, cfg.Positions, cfg.Scaling, cfg.Balance)
    classes = [cls for union in unions for cls in get_args(union)] + [cfg.ModelConfig]
    names = {field.name for cls in classes for field in dataclasses.fields(cls)}
    assert {name for name in names if not re.search(rf"\.{name}\b", text)} == NOT_READ


@pytest.mark.parametrize("name, files", [("blocks", 1), ("mudd", 2)])
def test_a_folder_has_the_code_of_its_model(name, files, tmp_path):
    export(made(MODELS[name]), ByteTokenizer(), tmp_path / "own", max_length=32, kind="rmt_tpu")
    expected = list(SOURCES.values())[:files]
    found = sorted((tmp_path / "own").glob("*.py"))
    assert [path.name for path in found] == [path.name for path in expected]
    for path, source in zip(found, expected, strict=True):
        assert path.read_bytes() == source.read_bytes()
    values = json.loads((tmp_path / "own/config.json").read_text())
    assert values["auto_map"] == {
        "AutoConfig": f"{expected[-1].stem}.RmtTpuConfig",
        "AutoModelForCausalLM": f"{expected[-1].stem}.RmtTpuForCausalLM",
    }
    tensors = load_file(tmp_path / "own/model.safetensors")
    assert values["tensors"] == {name: list(tensor.shape) for name, tensor in tensors.items()}
    # Attention in layer l divides its logits by l + 1.
    scales = [6**-0.5 / layer for layer in (1, 2, 3)]
    assert values["factors"]["attention"][::2] == pytest.approx(scales)
    assert values["factors"]["attention"][1::2] == [None] * 3


def test_a_model_without_code_says_so(tmp_path, monkeypatch):
    """The folder has none, and opens here as others do."""
    monkeypatch.setitem(own.CODE, "modeling_rmt_tpu", own.CODE["modeling_rmt_tpu"] - {"attention"})
    assert own.without_code(MODELS["blocks"]) == (
        "the folder has no PyTorch code, because there is none for core=attention; only this "
        "package opens it"
    )
    decoder = made(MODELS["blocks"])
    export(decoder, ByteTokenizer(), tmp_path / "own", max_length=32, kind="rmt_tpu")
    assert not list((tmp_path / "own").glob("*.py"))
    values = json.loads((tmp_path / "own/config.json").read_text())
    assert not values.keys() & {"auto_map", "factors", "tensors"}
    assert describe(tmp_path / "own").model == MODELS["blocks"]
    monkeypatch.undo()
    assert own.without_code(MODELS["blocks"]) is None


def test_other_programs_read_bytes(tmp_path):
    """The byte tokenizer's file is one of the tokenizers library."""
    export(made(MODELS["blocks"]), ByteTokenizer(), tmp_path / "own", max_length=32, kind="rmt_tpu")
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "own/tokenizer.json"))
    text = "".join(map(chr, range(300))) + " 東京 <x>'s  \n"
    tokens = [256, *text.encode()]
    assert library.encode(text).ids == tokens and library.get_vocab_size() == 257
    assert library.decode(tokens) == text
    assert library.decode([256, 0xE6], skip_special_tokens=False) == "<|endoftext|>\ufffd"
    values = json.loads((tmp_path / "own/tokenizer_config.json").read_text())
    assert values["bos_token"] == values["eos_token"] == "<|endoftext|>"
