"""Text that goes on from a prompt, streamed as its tokens come."""

import codecs
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int, Key

from rmt_tpu import config as cfg
from rmt_tpu.data import Tokenizer
from rmt_tpu.decoder import Cache, Decoder
from rmt_tpu.errors import UsageError
from rmt_tpu.generation.sampling import Sampling, sample


def generate(
    decoder: Decoder, tokenizer: Tokenizer, prompt: str, sampling: Sampling
) -> Iterator[str]:
    """Pieces of text that follow `prompt`, until the model ends the document or the room is out.

    One new token costs one step: keys and values of earlier tokens are cached, and of the
    residual only that of the newest token exists.

    Raises:
      UsageError: the prompt leaves no room in the model's learned positions.
    """
    tokens = np.concatenate([[tokenizer.bos], tokenizer.encode(prompt)])
    room = fitting_tokens(decoder.config, len(tokens), sampling.max_tokens)
    graphdef, params = nnx.split(decoder)
    cache = decoder.empty_cache(1, len(tokens) + room)
    key = jax.random.key(sampling.seed)
    text = codecs.getincrementaldecoder("utf-8")(errors="replace")

    new = jnp.asarray(tokens, jnp.int32)[None]
    for index in range(room):
        token, cache = _next_token(
            graphdef, params, new, cache, jax.random.fold_in(key, index), sampling
        )
        if int(token[0]) == tokenizer.bos:
            break
        if piece := text.decode(tokenizer.decode_bytes(np.asarray(token, np.int32))):
            yield piece
        new = token[:, None]
    if rest := text.decode(b"", final=True):
        yield rest


def fitting_tokens(config: cfg.ModelConfig, prompt_tokens: int, max_tokens: int) -> int:
    """How many of `max_tokens` fit behind a prompt: learned positions end, others do not.

    Raises:
      UsageError: none do.
    """
    if config.learned_positions is None:
        return max_tokens
    max_length = config.learned_positions.max_length
    # The last token generated is never read, so it needs no position.
    room = max_length + 1 - prompt_tokens
    if room < 1:
        raise UsageError(
            f"--prompt has {prompt_tokens} tokens (with the start token) and the model "
            f"{max_length} learned positions; legal: at most {max_length} tokens"
        )
    return min(max_tokens, room)


@partial(jax.jit, static_argnames=("graphdef", "sampling"), donate_argnames="cache")
def _next_token(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    tokens: Int[Array, "batch new"],
    cache: Cache,
    key: Key[Array, ""],
    sampling: Sampling,
) -> tuple[Int[Array, " batch"], Cache]:
    logits, cache = nnx.merge(graphdef, params).decode(tokens, cache)
    return sample(logits[:, -1], key, sampling), cache
