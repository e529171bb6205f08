"""Folders in the hub's format for tests, and comparisons of the models that open from them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

import rmt_tpu
from rmt_tpu.data import ByteTokenizer

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
    """The logits of the same parameters in float64."""
    with jax.enable_x64(True):
        config = decoder.config.replace(compute_dtype="float64")
        graph, _ = nnx.split(nnx.eval_shape(lambda: rmt_tpu.Decoder(config, rngs=nnx.Rngs(0))))
        wide = lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x
        return np.asarray(logits(nnx.merge(graph, jax.tree.map(wide, nnx.state(decoder)))))


def parameters(decoder):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(decoder, nnx.Param)))


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, parameters(one), parameters(other))
