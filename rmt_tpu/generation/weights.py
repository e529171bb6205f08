"""A decoder's weights as products take them."""

import jax.numpy as jnp
from flax import nnx

from rmt_tpu.decoder import Decoder


def cast_once(decoder: Decoder) -> Decoder:
    """The same model with its matrices in the dtype that it computes in: the same logits.

    Cast where they multiply, they are read in float32 and written again for each few tokens. What
    is computed with in float32 (gains, key vectors, what mixers learn, and the embedding, of which
    few rows are read) stays as it is, and is shared.
    """
    graphdef, params = nnx.split(decoder, nnx.Param)
    flat = nnx.to_flat_state(params)
    cast = [(path, _cast(path, variable, decoder.dtype)) for path, variable in flat]
    return nnx.merge(graphdef, nnx.from_flat_state(cast))


def _cast(path, variable, dtype):
    multiplies = variable.get_metadata("role") in ("hidden", "unembedding")
    if not multiplies or "mix" in path or path[0] == "mixer":
        return variable
    return variable.replace(jnp.asarray(variable[...], dtype))
