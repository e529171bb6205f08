"""Folders of the kind `rmt_tpu` hold any model, bit for bit."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import rmt_tpu
from rmt_tpu import config as cfg
from rmt_tpu.data import ByteTokenizer
from rmt_tpu.errors import UsageError
from rmt_tpu.hub import weights
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
    monkeypatch.setattr(weights, "_SHARD", 9000)  # bytes
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


def test_a_new_run_takes_over_what_it_shares(tmp_path):
    """A run with the same mixer takes over all weights, and with another all but the mixes."""
    export(made(MODELS["blocks"]), ByteTokenizer(), tmp_path / "own", max_length=32, kind="rmt_tpu")
    assert not WarmStart(str(tmp_path / "own"), MODELS["blocks"]).new
    delta = dataclasses.replace(MODELS["blocks"], mixer=cfg.WideStreams(streams=2))
    new = WarmStart(str(tmp_path / "own"), delta).new
    assert new and {path[-2] for path in new} == {"mix"}


def test_mistakes_are_one_line(tmp_path):
    values = config_values(MODELS["blocks"], max_length=8, bos=0, ends=[0], kind="rmt_tpu")
    assert values["model_type"] == "rmt_tpu"  # transformers refuses a type that it does not know
    model = values["model"] | {"mixer": {"kind": "block_attention", "num_blocks": -1}}
    with pytest.raises(UsageError, match="^here: model: mixer.num_blocks=-1 must be positive"):
        model_config(values | {"model": model}, "here")
    with pytest.raises(UsageError, match="^here: model: the config must be an object of fields$"):
        model_config({"model_type": "rmt_tpu"}, "here")
    with pytest.raises(UsageError, match="mixer=block_attention cannot be .* --kind=rmt_tpu"):
        export(made(MODELS["blocks"]), ByteTokenizer(), tmp_path / "own", max_length=32)
    assert not (tmp_path / "own").exists()
