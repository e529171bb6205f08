"""A decoder's weights as products take them."""

import jax.numpy as jnp
from flax import nnx

from rmt_tpu.decoder import Decoder


def cast_once(decoder: Decoder) -> Decoder:
    """The same model with its matrices in the dtype that it computes in: the same logits.

    Cast where they multiply, they are read in float32 and written again for each few tokens; an
    embedding is cast as a whole, for XLA does so before it takes rows. What is computed with in
    float32 (gains, key vectors, what mixers learn, an embedding with a multiplier) stays as it is,
    and is shared.
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
