"""A decoder written plainly, unrolled, for any residual system that mixes what was written.

`mix(k, site, written)` is what site k reads, before its norm: `written` are the embedding and what
each of the k sublayers before it wrote, a vector or a matrix for each token.

In NumPy, of real numbers or complex ones: `derivative` is exact to rounding.
"""

import jax
import numpy as np

from rmt_tpu import config as cfg


def derivative(f, params, direction):
    """Of real f(params) along a tree of directions, by a complex step: no difference is taken."""
    step = 1e-30
    moved = jax.tree.map(lambda p, d: p + 1j * step * d, params, direction)
    return np.imag(f(moved)) / step


def plain_sum(k, site, written):
    """What the plain residual holds: equations 2 and 3, and 15 and 16."""
    return sum(written)


def norm(x, gain, config):
    axes = tuple(range(2, x.ndim))
    if config.norm == "layernorm":
        x = x - x.mean(axes, keepdims=True)
    return gain * x / np.sqrt((x**2).mean(axes, keepdims=True) + config.norm_epsilon)


def attention(q, k, v, layer, config):
    """Equations 8 and 21, causal, over one document: [batch, seq, heads, head_dim]."""
    length = q.shape[1]
    logits = np.einsum("bnhd,bmhd->bhnm", q, k) / np.sqrt(q.shape[-1])
    if config.attention.inverse_layer_scaling:
        logits = logits / (layer + 1)
    logits = np.where(np.tril(np.ones((length, length), bool)), logits, -np.inf)
    return np.einsum("bhnm,bmhd->bnhd", softmax(logits, -1), v)


def softmax(logits, axis):
    weights = np.exp(logits - logits.real.max(axis, keepdims=True))
    return weights / weights.sum(axis, keepdims=True)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


class Vector:
    """Reads and writes of the Transformer: equations 7 and 9."""

    def __init__(self, config):
        self.heads = config.attention.num_heads

    def qkv(self, x, site):
        split = lambda x: x.reshape(*x.shape[:2], self.heads, -1)
        return [split(x @ w) for w in site["read"]]

    def write_heads(self, heads, site):
        return heads.reshape(*heads.shape[:2], -1) @ site["write"]

    def read(self, x, site):
        return x

    def write(self, y, site):
        return y


class Matrix:
    """Reads and writes of the RMT: equations 12, 13 and 18 to 27."""

    def __init__(self, config):
        self.R, self.V = config.attention.num_heads, config.attention.head_dim

    def qkv(self, x, site):
        return [np.einsum("hk,bnkv->bnhv", r, x) for r in np.split(site["read_keys"], 3)]

    def write_heads(self, heads, site):
        return np.einsum("hk,bnhv->bnkv", site["store_keys"], heads)

    def read(self, x, site):
        vectors = np.einsum("hk,bnkv->bnhv", site["read_keys"], x)
        return vectors.swapaxes(-1, -2).reshape(*x.shape[:2], -1)

    def write(self, y, site):
        separate = y.reshape(*y.shape[:-1], self.V, self.R).swapaxes(-1, -2)
        return self.write_heads(separate, site)


def model(params, tokens, config, mix=plain_sum):
    """Logits: equations 1 to 11, and 14 to 27."""
    L = config.num_layers
    store = Matrix(config) if isinstance(config.store, cfg.MatrixStore) else Vector(config)
    layers = [jax.tree.map(lambda p, l=l: p[l], params["layers"]) for l in range(L)]
    last = params["final_site"]
    written = [_embedded(params, tokens, layers[0]["attention_site"], store, config)]
    for l, layer in enumerate(layers):
        site = layer["attention_site"]
        x = norm(mix(2 * l, site, written), site["gain"], config)
        heads = attention(*store.qkv(x, site), l, config)
        site = layer["feed_forward_site"]
        written.append(store.write_heads(heads, site))
        x = norm(mix(2 * l + 1, site, written), site["gain"], config)
        hidden = gelu(store.read(x, site) @ layer["feed_forward"]["w_1"])
        after = layers[l + 1]["attention_site"] if l + 1 < L else last
        written.append(store.write(hidden @ layer["feed_forward"]["w_2"], after))
    x = norm(mix(2 * L, last, written), last["gain"], config)
    return store.read(x, last) @ params["unembedding"]["kernel"]


def _embedded(params, tokens, first_site, store, config):
    embedding = params["embedding"]
    rows = embedding["tokens"][np.asarray(tokens)]
    positions = embedding["positions"][: tokens.shape[1]][None]
    if isinstance(store, Vector):
        return rows + positions
    at_positions = store.write(positions, {"store_keys": params["store"]["position_keys"]})
    return store.write(rows, first_site) + at_positions
