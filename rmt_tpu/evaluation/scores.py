"""Log-probabilities of tokens, computed without holding all logits in memory."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

import sharding
from rmt_tpu.decoder import Decoder
from rmt_tpu.execution import kernels
from rmt_tpu.layers.data_vectors import concatenate

# Logits are computed for one chunk of tokens at a time. LOGITS: the maximum number of logits in
# memory (128 MiB in float32). _MIN_CHUNK: the minimum number of tokens in a chunk.
LOGITS, _MIN_CHUNK = 2**25, 64

# The target that marks a position as not scored.
NONE = -1


class TokenScores(NamedTuple):
    """The scores of targets, which are the tokens for which scores were requested.

    At positions without a target, the log-probability is 0, and `greedy` is False.

    Attributes:
      log_probability: `log softmax(logits)[target]`, in nats.
      greedy: whether the target is the likeliest token. If several tokens are equally likely, the
        one with the lowest id counts as the likeliest.
    """

    log_probability: Float[Array, "rows seq"]
    greedy: Bool[Array, "rows seq"]


@kernels.as_configured
def token_scores(
    decoder: Decoder,
    tokens: Int[Array, "batch seq"],
    targets: Int[Array, "batch seq"],
    schedule: sharding.Schedule | None = None,
) -> TokenScores:
    """Return the log-probability of each target, given the tokens of its row up to its position.

    Logits are computed only at positions with a target. Their dtype is at least float32. Padding at
    the end of a row does not affect scores, because attention is causal.

    In per-device code (see `sharding.per_device`), the result covers only this device's tokens.
    With a `schedule` of pipeline stages, it covers only this stage's part of the rows.

    Args:
      decoder: the model.
      tokens: the rows.
      targets: the token that follows each token, or NONE where no score is requested.
      schedule: the schedule of pipeline stages, if there are any.
    """
    z, _ = decoder.features(tokens, schedule=schedule)
    targets = sharding.own_part(targets, "stage", axis=0)
    targets = sharding.own_part(targets, sharding.token_axes(), axis=1)
    x, flat_targets = concatenate(z).reshape(targets.size, -1), targets.reshape(-1)
    unembedding = decoder.unembedding
    kernel = sharding.gather(unembedding.matrix.astype(x.dtype), "fsdp", axis=0)
    chunk = min(targets.size, max(LOGITS // kernel.shape[1], _MIN_CHUNK))
    dtype = jnp.result_type(x, jnp.float32)

    # List the positions with a target first, followed by out-of-range positions as padding.
    size = targets.size + -targets.size % chunk
    places = jnp.nonzero(flat_targets >= 0, size=size, fill_value=targets.size)[0]

    def score(number, scores):
        at = jax.lax.dynamic_slice_in_dim(places, number * chunk, chunk)
        target = flat_targets.at[at].get(mode="fill", fill_value=0)
        inputs = x.at[at].get(mode="fill", fill_value=0)
        logits = jnp.dot(inputs, kernel, preferred_element_type=dtype)
        logits = unembedding.scaled(logits)
        target_logits = jnp.take_along_axis(logits, target[:, None], axis=1)[:, 0]
        log_probability = target_logits - jax.nn.logsumexp(logits, axis=1)
        return TokenScores(
            scores.log_probability.at[at].set(log_probability, mode="drop"),
            scores.greedy.at[at].set(jnp.argmax(logits, axis=1) == target, mode="drop"),
        )

    chunks = -(-jnp.sum(flat_targets >= 0) // chunk)
    none = TokenScores(jnp.zeros(targets.size, dtype), jnp.zeros(targets.size, bool))
    with jax.named_scope("scores"):
        scores = jax.lax.fori_loop(0, chunks, score, none)
    return TokenScores(*(array.reshape(targets.shape) for array in scores))
