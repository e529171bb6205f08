"""Unembedding and next-token loss, computed in chunks of tokens with a custom gradient.

The logits of a whole batch would be the largest array in a train step, so only the logits of one
chunk exist at a time. The forward pass uses them to compute both the loss of the chunk and its
gradient. This takes three matrix products per chunk. Recomputing the logits in the backward pass
would take four.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import sharding
from pallas_kernels import logits_with_sums
from pallas_kernels.target import target
from rmt_tpu.cores import Aux
from rmt_tpu.layers.caps import soft_capped
from rmt_tpu.layers.data_vectors import concatenate
from rmt_tpu.layers.stacks import isolate

# On GPUs, the number of columns of W_U is padded to a multiple of this number.
_GPU_COLUMNS = 128
# Maximum number of logits in memory at a time: 2^27 logits in float32 take 512 MB.
LOGITS = 2**27


class Loss(NamedTuple):
    """Weighted sums of losses over tokens, in nats.

    To obtain means, divide by the sum of the tokens' weights.

    Attributes:
      objective: the training objective `cross_entropy + z_loss * z`, plus `aux["loss"]` if the
        model's cores return it. Only this field has a gradient.
      cross_entropy: sum of the negative log-probabilities of the targets.
      z: sum of the squared log-sum-exps of the logits.
      aux: the scalars that the model's cores return, summed over all tokens.
      texts: for a mixture of texts, two rows with a sum over the tokens of each text: the losses in
        the first row, and the weights in the second. () without a mixture.
    """

    objective: Float[Array, ""]
    cross_entropy: Float[Array, ""]
    z: Float[Array, ""]
    aux: Aux = {}
    texts: Float[Array, "2 texts"] | tuple[()] = ()


def next_token_loss(
    z: Float[Array, "batch seq vectors size"],
    kernel: Float[Array, "own_width vocab"],
    targets: Int[Array, "batch seq"],
    weights: Float[Array, "batch seq"],
    *,
    multiplier: int | float = 1.0,
    cap: float | None = None,
    z_loss: int | float = 0.0,
    aux: Aux | None = None,
    texts: Int[Array, "batch seq"] | None = None,
    num_texts: int = 0,
) -> Loss:
    """Return the sums of `-log softmax(logits)[target]` and of `logsumexp(logits)^2` over tokens.

    The logits are `x = multiplier * concatenate(z) W_U`, or `cap tanh(x / cap)` with a soft cap, in
    float32 or wider.

    Args:
      z: the input of the unembedding.
      kernel: the matrix W_U, or this device's rows of it if it is sharded along the mesh axis
        `fsdp`.
      targets: the next token after each token; no gradient is computed for them.
      weights: weight of each token in the sums; no gradient is computed for them.
      multiplier: factor by which logits are multiplied.
      cap: the soft cap on logits, or None.
      z_loss: weight of the squared log-sum-exps in the objective.
      aux: the scalars that the model's cores return.
      texts: the number of the text that each token is from, for a mixture of texts.
      num_texts: number of texts in the mixture.
    """
    vocab = kernel.shape[1]
    chunks = _chunks(z.shape[0], z.shape[1], vocab)
    static = (multiplier, cap, z_loss, vocab, chunks, num_texts)
    loss = _chunked_loss(static, concatenate(z), kernel, targets, weights, texts)
    aux = aux or {}
    objective = loss.objective + aux["loss"] if "loss" in aux else loss.objective
    return Loss(objective, *jax.lax.stop_gradient((loss.cross_entropy, loss.z, aux, loss.texts)))


def _chunks(batch: int, seq: int, vocab: int) -> int:
    """Return the number of chunks to split a sequence into, so each has at most `LOGITS` logits.

    Let n be the smallest sufficient number. If n does not divide the length, a divisor of the
    length between n and 2n is returned if there is one. Otherwise the result is n, and the last
    chunk is padded with tokens of weight 0.
    """
    tokens = max(LOGITS // max(batch * vocab, 1), 1)  # The number of tokens in a chunk.
    fewest = max(-(-seq // tokens), 1)
    equal = (n for n in range(fewest, 2 * fewest) if seq % n == 0)
    return next(equal, fewest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked_loss(static, x, kernel, targets, weights, texts) -> Loss:
    *_, chunks, num_texts = static
    narrow = _unembedding(kernel, x.dtype)

    def chunk_loss(total, chunk):
        loss, *_ = _loss(static, narrow, *chunk)
        return jax.tree.map(jnp.add, total, loss), None

    zero = _zero_loss(jnp.result_type(x, jnp.float32), texts, num_texts)
    split = (_split(a, chunks) for a in (x, targets, weights, texts))
    return jax.lax.scan(chunk_loss, zero, tuple(split))[0]


def _zero_loss(dtype, texts, num_texts) -> Loss:
    zero = jnp.zeros((), dtype)
    return Loss(zero, zero, zero, texts=() if texts is None else jnp.zeros((2, num_texts), dtype))


def _chunked_loss_forward(static, x, kernel, targets, weights, texts):
    """Compute the loss and its gradient, so that the backward pass only scales the gradient."""
    *_, chunks, num_texts = static
    narrow = _unembedding(kernel, x.dtype)
    dtype = jnp.result_type(x, jnp.float32)

    def chunk_gradient(carry, chunk):
        total, d_kernel = carry
        x = _tokens(chunk[0])
        loss, log_z, d_logits = _loss(static, narrow, *chunk)
        d, again = _for_two_products(d_logits, log_z)
        d_x = jnp.einsum("tv,wv->tw", d, narrow).reshape(chunk[0].shape)
        d_kernel += jnp.einsum("tw,tv->wv", x, again, preferred_element_type=dtype)
        return (jax.tree.map(jnp.add, total, loss), d_kernel), d_x

    split = tuple(_split(a, chunks) for a in (x, targets, weights, texts))
    carry = (_zero_loss(dtype, texts, num_texts), jnp.zeros(narrow.shape, dtype))
    (loss, d_kernel), d_x = jax.lax.scan(chunk_gradient, carry, split)
    d_x = d_x.swapaxes(0, 1).reshape(x.shape[0], -1, x.shape[2])[:, : x.shape[1]]
    d_kernel = sharding.scatter_sum(d_kernel[:, : kernel.shape[1]], "fsdp", axis=0)
    return loss, (d_x, d_kernel.astype(kernel.dtype))


def _unembedding(kernel, dtype):
    """Return all rows of W_U in `dtype`, on GPUs padded with columns of zeros.

    A matrix product for a GPU's tensor cores needs rows that begin at a multiple of 16 bytes. With
    GPT-2's 50,257 words, two products of the loss took three and four times as long as the third,
    which has as many FLOPs (docs/benchmarks/gpus.md).
    """
    kernel = sharding.gather(kernel.astype(dtype), "fsdp", axis=0)
    missing = -kernel.shape[1] % _GPU_COLUMNS if target().platform == "cuda" else 0
    return jnp.pad(kernel, [(0, 0), (0, missing)]) if missing else kernel


def _for_two_products(d_logits, log_z):
    """Return the gradient of the logits twice, as operands of two matrix products.

    XLA for TPUs fuses the computation of an operand into a matrix product. On TPUs the gradient is
    computed twice, because an array that both products share would be written to memory and read
    back. On GPUs the gradient is computed once and written to memory, because a product with such a
    fusion is slow there. On an H100, it takes at least three times as long as a product of two
    arrays (docs/benchmarks/gpus.md).
    """
    if target().platform == "cuda":
        gradient = isolate(d_logits(log_z))
        return gradient, gradient
    return d_logits(log_z), d_logits(isolate(log_z))


def _chunked_loss_backward(static, gradient, cotangents):
    scale = cotangents.objective
    d_x, d_kernel = gradient
    return (
        d_x * scale.astype(d_x.dtype),
        d_kernel * scale.astype(d_kernel.dtype),
        None,
        None,
        None,
    )


_chunked_loss.defvjp(_chunked_loss_forward, _chunked_loss_backward)


def _split(x: Array | None, chunks: int) -> Array | None:
    """Reshape [batch, seq, ...] to [chunks, batch, seq / chunks, ...], padding seq with zeros.

    None stays None.
    """
    if x is None:
        return None
    missing = -x.shape[1] % chunks
    x = jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)]) if missing else x
    return x.reshape(x.shape[0], chunks, -1, *x.shape[2:]).swapaxes(0, 1)


def _tokens(x: Array) -> Array:
    """Flatten [batch, seq, ...] to [batch * seq, ...]."""
    return x.reshape(-1, *x.shape[2:])


def _loss(static, kernel, x, targets, weights, texts):
    """Return the loss sums of a chunk, its log-sum-exps `log_z`, and the function `d_logits`.

    `d_logits(log_z)` returns the gradient of the objective with respect to `concatenate(z) W_U`.
    """
    multiplier, cap, z_loss, vocab, _, num_texts = static
    x, targets, weights = map(_tokens, (x, targets, weights))
    logits, log_z, chosen = logits_with_sums(x, kernel, targets, multiplier=multiplier)
    padded = kernel.shape[1] > vocab  # `_unembedding` has added columns of zeros.
    logits, chosen = soft_capped(logits, cap), soft_capped(chosen, cap)
    if padded:
        is_word = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) < vocab
        logits = jnp.where(is_word, logits, -jnp.inf)
    if padded or cap is not None:
        log_z = jax.nn.logsumexp(logits, axis=1)
    cross_entropy = jnp.sum((log_z - chosen) * weights)
    z = jnp.sum(jnp.square(log_z) * weights)

    def d_logits(log_z):
        softmax = jnp.exp(logits - log_z[:, None])
        is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 1) == targets[:, None]
        gradient = softmax * (1 + 2 * z_loss * log_z[:, None]) - is_target
        if cap is not None:
            # Multiply by the derivative of the soft cap. In a column of padding the gradient is 0,
            # so any factor is right.
            gradient = gradient * (1 - jnp.square(jnp.maximum(logits, -cap) / cap))
        return (multiplier * weights[:, None] * gradient).astype(x.dtype)

    loss = Loss(cross_entropy + z_loss * z, cross_entropy, z)
    if texts is not None:
        own = _tokens(texts)[:, None] == jnp.arange(num_texts)
        sums = [
            jnp.sum(jnp.where(own, values[:, None], 0), axis=0, dtype=z.dtype)
            for values in ((log_z - chosen) * weights, weights)
        ]
        loss = loss._replace(texts=jnp.stack(sums))
    return loss, log_z, d_logits
