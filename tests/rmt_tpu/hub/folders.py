"""Folders in the hub's format for tests, and comparisons of the models that open from them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from rmt_tpu.data import ByteTokenizer
from tests import models

TOKENS = np.random.default_rng(0).integers(0, 257, 40)


def written(folder, config, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    ByteTokenizer().save(str(folder))
    return folder


def logits(decoder):
    return jax.jit(lambda tokens: decoder(tokens))(jnp.array(TOKENS)[None])[0]


def exact_logits(decoder):
    """The logits in float64, with the same parameters."""
    with jax.enable_x64(True):
        graph = models.graph(decoder.config.replace(compute_dtype="float64"))
        params = jax.tree.map(np.float64, nnx.to_pure_dict(nnx.state(decoder, nnx.Param)))
        return jax.jit(lambda p: nnx.merge(graph, p)(jnp.array(TOKENS)[None])[0])(params)


def parameters(decoder):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(decoder, nnx.Param)))


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, parameters(one), parameters(other))
