"""Qwen3 with attention over depth, in the format of open-attention-residuals: `qwen3_attnres`."""

import dataclasses

import numpy as np
import pytest

import rmt_tpu
from rmt_tpu import config as cfg
from rmt_tpu.errors import UsageError
from rmt_tpu.hub.folder import export
from rmt_tpu.hub.models import config_values, model_config
from tests.rmt_tpu.hub import oracle
from tests.rmt_tpu.hub.configs import CONFIGS, LAYER_TYPES
from tests.rmt_tpu.hub.folders import TOKENS, logits, same, written


def attnres(**changes):
    return model_config(CONFIGS["qwen3_attnres"] | changes, "x")


def test_attention_over_depth_of_every_sublayer(tmp_path):
    """The mode `full`, whose newest source is there twice at every site."""
    config = CONFIGS["qwen3_attnres"] | {"attnres_mode": "full", "num_hidden_layers": 3}
    config |= {"layer_types": LAYER_TYPES[:3], "tie_word_embeddings": True}
    tensors = oracle.drawn(config)
    decoder, tokenizer = rmt_tpu.load(written(tmp_path / "hub", config, tensors))
    assert isinstance(decoder.config.mixer, cfg.FullAttention)
    wanted = oracle.logits(tensors, config, TOKENS)
    np.testing.assert_allclose(logits(decoder), wanted, atol=1e-4)
    export(decoder, tokenizer, tmp_path / "out", max_length=64)
    reloaded, _ = rmt_tpu.load(tmp_path / "out")
    assert reloaded.config == decoder.config
    same(reloaded, decoder)


@pytest.mark.parametrize("changes, message", [
    ({"output_site": "attention"}, "output_site=attention cannot be .* legal: newest, or this p"),
    ({"epsilon": 0.5}, "epsilon=0.5 cannot be written as qwen3_attnres; legal: 0.001, or"),
    ({"layers_per_block": 4}, "sublayers_per_block=8 cannot be .* legal: 6, or"),
    ({"cumulative": False}, "model.mixer=block_attention cannot be .* legal: sum, or this package"),
])  # fmt: skip
def test_other_attention_over_depth_is_refused(changes, message):
    model = attnres()
    fields = {"max_length": 1, "bos": 0, "ends": [0]}
    with pytest.raises(UsageError, match=message):
        changed = dataclasses.replace(model.mixer, **changes)
        config_values(model.replace(mixer=changed), **fields)
    alike = dataclasses.replace(model.mixer, sublayers_per_block=6, layers_per_block=None)
    assert config_values(model.replace(mixer=alike), **fields) == config_values(model, **fields)


def test_other_kinds_with_attention_over_depth_are_refused():
    for kind, legal in (("qwen3_next", "legal: sum"), ("qwen2", "model.attention=bias and atten")):
        model = model_config(CONFIGS[kind], "x")
        model = model.replace(mixer=attnres(num_hidden_layers=5).mixer)
        with pytest.raises(UsageError, match=legal):
            config_values(model, max_length=1, bos=0, ends=[0])
