"""Conversion of a decoder's weights to the dtype in which it computes."""

import math

import jax.numpy as jnp
from flax import nnx

from rmt_tpu.decoder import Decoder


def cast_once(decoder: Decoder) -> Decoder:
    """Return the same model with its matrices cast to the dtype in which it computes.

    The logits do not change. Without this call, every decode step would cast each matrix again. XLA
    would even cast the whole embedding matrix to look up a few rows. Parameters that are used in
    float32 are not cast but shared with `decoder`. These are gains, key vectors, experts' routers,
    the parameters of mixers, and an embedding whose factor (the multiplier times the scale) is
    neither 1 nor another power of two.
    """
    roles = ["hidden", "unembedding"]
    # The embedding is rounded after the multiplication. Rounding it before gives the same result
    # only if the multiplication is exact.
    if _is_power_of_two(decoder.embedding.multiplier * decoder.embedding.scale):
        roles.append("embedding")
    graphdef, params = nnx.split(decoder, nnx.Param)
    flat = nnx.to_flat_state(params)
    cast = [(path, _cast(path, variable, roles, decoder.dtype)) for path, variable in flat]
    return nnx.merge(graphdef, nnx.from_flat_state(cast))


def _is_power_of_two(factor: float) -> bool:
    return math.frexp(factor)[0] == 0.5


def _cast(path, variable, roles, dtype):
    if variable.get_metadata("role") not in roles or "mix" in path or path[0] == "mixer":
        return variable
    if variable.get_metadata().get("exact", True):
        return variable
    return variable.replace(jnp.asarray(variable[...], dtype))
