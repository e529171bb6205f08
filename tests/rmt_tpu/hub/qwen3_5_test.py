"""Qwen3.5: files of both forms, and the text model of a model of images."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import rmt_tpu
from rmt_tpu import config as cfg
from rmt_tpu.errors import UsageError
from rmt_tpu.hub.folder import export
from rmt_tpu.hub.models import config_values, describe, model_config
from tests.rmt_tpu.hub import oracle
from tests.rmt_tpu.hub.configs import CONFIGS
from tests.rmt_tpu.hub.folders import same, written

MOE = CONFIGS["qwen3_5_moe_text"] | {"num_hidden_layers": 2, "full_attention_interval": 2}
MOE.pop("layer_types")


def apart(tensors):
    """The same tensors with those of each expert on their own, as transformers writes them."""
    found = {}
    for name, x in tensors.items():
        base = name.rpartition(".")[0]
        for e, matrix in enumerate(x if "mlp.experts." in name else ()):
            if name.endswith("gate_up_proj"):
                gate, up = np.split(matrix, 2)
                found |= {f"{base}.{e}.gate_proj.weight": gate, f"{base}.{e}.up_proj.weight": up}
            else:
                found[f"{base}.{e}.down_proj.weight"] = matrix
        if "mlp.experts." not in name:
            found[name] = x
    return {name: np.ascontiguousarray(x) for name, x in found.items()}


def test_the_text_model_of_a_model_of_images(tmp_path):
    """There are experts in either form, layers that predict more tokens, and an end token."""
    tensors = oracle.drawn(MOE)
    text, tokenizer = rmt_tpu.load(written(tmp_path / "text", MOE, tensors))
    again, _ = rmt_tpu.load(written(tmp_path / "apart", MOE, apart(tensors)))
    same(again, text)
    outside = {"model_type": "qwen3_5_moe", "text_config": MOE | {"eos_token_id": 7}}
    base = "model.language_model."
    renamed = {base + name.removeprefix("model."): x for name, x in tensors.items()}
    others = {name: np.ones(8, np.float32) for name in ("model.visual.x.weight", "mtp.fc.weight")}
    found, _ = rmt_tpu.load(written(tmp_path / "both", outside, renamed | others))
    assert describe(tmp_path / "both").ends == (7,)
    same(found, text)
    export(found, tokenizer, tmp_path / "out", max_length=64)
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "qwen3_next"
    # The hub's own files of qwen3_next have layers that predict more tokens, too.
    tensors = load_file(tmp_path / "out/model.safetensors")
    tensors["mtp.fc.weight"] = np.ones(8, np.float32)
    save_file(tensors, tmp_path / "out/model.safetensors")
    next_one, _ = rmt_tpu.load(tmp_path / "out")
    assert next_one.config == text.config
    same(next_one, text)


def test_no_other_kind_is_written_by_name(tmp_path):
    model = model_config(MOE, "x")
    decoder, tokenizer = rmt_tpu.load(written(tmp_path / "hub", MOE, oracle.drawn(MOE)))
    with pytest.raises(UsageError, match="kind=llama cannot be chosen; legal: None, rmt_tpu, qwen"):
        export(decoder, tokenizer, tmp_path / "out", max_length=64, kind="llama")
    layers = list(zip(*2 * (iter(model.sublayers),), strict=True))
    (net, experts), (attention, _) = layers[0], layers[-1]
    mixed = cfg.stacks([(net, experts), (attention, cfg.FeedForward(8, "swiglu"))])
    values = {"max_length": 1, "bos": 0, "ends": [0], "kind": "qwen3_5_moe_text"}
    assert config_values(model, **values)["num_experts"] == 12
    with pytest.raises(
        UsageError, match="model.stacks=layers with feed_forward cannot be .* legal: experts, or"
    ):
        config_values(model.replace(stacks=mixed), **values)
