"""Conversion of a decoder's weights to the dtype in which it computes."""

import jax.numpy as jnp
from flax import nnx

from rmt_tpu.decoder import Decoder


def cast_once(decoder: Decoder) -> Decoder:
    """Return the same model with its matrices cast to the dtype in which it computes.

    The logits do not change. Without this call, every decode step would cast each matrix again. XLA
    would even cast the whole embedding matrix to look up a few rows. Parameters that are used in
    float32 are not cast but shared with `decoder`. These are gains, key vectors, the parameters of
    mixers, and an embedding with a multiplier.
    """
    roles = ["hidden", "unembedding"]
    if decoder.embedding.multiplier == 1:
        roles.append("embedding")
    graphdef, params = nnx.split(decoder, nnx.Param)
    flat = nnx.to_flat_state(params)
    cast = [(path, _cast(path, variable, roles, decoder.dtype)) for path, variable in flat]
    return nnx.merge(graphdef, nnx.from_flat_state(cast))


def _cast(path, variable, roles, dtype):
    if variable.get_metadata("role") not in roles or "mix" in path or path[0] == "mixer":
        return variable
    return variable.replace(jnp.asarray(variable[...], dtype))
