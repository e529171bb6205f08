"""A Residual Matrix Transformer in plain JAX: model, loss and optimizer step.

It follows Mak and Flanigan (2025), "Residual Matrix Transformers: Scaling the Size of the Residual
Stream", https://arxiv.org/abs/2506.22696. Numbers in parentheses are equations of that paper.
`python docs/examples/rmt_in_200_lines.py` trains a small one on the source of a Python module.

Sizes, with the letter of their axis in `jnp.einsum`:

    B    b      texts in a batch            R     r   data vectors of a token, and heads
    N    n, m   positions in a text         D_k   k   size of a key vector
    V    t      tokens in the vocabulary    D_v   v   size of a data vector
    L           layers                      D_FF  f   hidden size of a feed-forward layer

Arrays that functions pass on:

    tokens  [B, N]            X  [B, N, D_k, D_v]   the residual: one matrix for each token
    w, r    [R, D_k]          x, y, z  [B, N, R, D_v]   data vectors: what sublayers read and write
    gain    [D_k, D_v]        logits  [B, N, V]
"""

import argparse
import functools
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import optax


@dataclass(frozen=True)
class Config:
    """Sizes of a model, and how it is trained."""

    vocab_size: int = 256  # V: a token is a byte
    length: int = 64  # N
    layers: int = 2  # L
    rank: int = 4  # R
    key_dim: int = 16  # D_k
    value_dim: int = 16  # D_v
    hidden_dim: int = 256  # D_FF
    epsilon: float = 1e-6  # of the norm
    alibi: bool = False  # distances in attention, as in the authors' code, not learned positions
    batch_size: int = 8  # B
    steps: int = 100
    learning_rate: float = 1e-2
    weight_decay: float = 1e-4
    z_loss: float = 1e-4


PER_LAYER = ("gain_A", "r_Q", "r_K", "r_V", "w_O", "gain_FF", "r_FF", "W_1", "W_2", "w_FF")
NO_DECAY = ("E", "P", "W_U", "gain_A", "gain_FF", "gain_U")


def parameters(config: Config, key: jax.Array) -> dict[str, jax.Array]:
    """Draw all parameters. Those of layers have a first axis L; a gain begins as ones."""
    V, N, L, R = config.vocab_size, config.length, config.layers, config.rank
    D_k, D_v, D_FF = config.key_dim, config.value_dim, config.hidden_dim
    small = (2 * L) ** -0.5  # of keys that write, for 2 L sublayers add to one residual
    shape_and_std = {
        "E": ((V, R, D_v), 1.0),  # W_E: the data vectors of each token
        "w_E": ((R, D_k), R**-0.5),
        "P": ((N, R, D_v), 1.0),  # W_PE: those of each position
        "w_PE": ((R, D_k), R**-0.5),
        "gain_A": ((L, D_k, D_v), None),  # attention
        "r_Q": ((L, R, D_k), D_k**-0.5),
        "r_K": ((L, R, D_k), D_k**-0.5),
        "r_V": ((L, R, D_k), D_k**-0.5),
        "w_O": ((L, R, D_k), small * R**-0.5),
        "gain_FF": ((L, D_k, D_v), None),  # feed-forward
        "r_FF": ((L, R, D_k), D_k**-0.5),
        "W_1": ((L, R, D_v, D_FF), (R * D_v) ** -0.5),
        "W_2": ((L, D_FF, R, D_v), D_FF**-0.5),
        "w_FF": ((L, R, D_k), small * R**-0.5),
        "gain_U": ((D_k, D_v), None),  # unembedding
        "r_U": ((R, D_k), D_k**-0.5),
        "W_U": ((R, D_v, V), (R * D_v) ** -0.5),
    }
    if config.alibi:
        del shape_and_std["P"], shape_and_std["w_PE"]
    keys = jax.random.split(key, len(shape_and_std))
    return {
        name: jnp.ones(shape) if std is None else std * jax.random.normal(key, shape)
        for key, (name, (shape, std)) in zip(keys, shape_and_std.items(), strict=True)
    }


def store(X, w, y):
    """Write R data vectors as outer products with storage keys: `X + sum_h w^h (x) y^h` (12)."""
    return X + jnp.einsum("rk,bnrv->bnkv", w, y)


def norm(X, gain, epsilon):
    """Return `LN(X)` (12, 15): over all `D_k D_v` entries of a token together, without a bias."""
    X = X - X.mean(axis=(-2, -1), keepdims=True)
    return gain * X / jnp.sqrt((X**2).mean(axis=(-2, -1), keepdims=True) + epsilon)


def retrieve(X, r):
    """Read R data vectors with retrieval keys: `x^h = r^h ._1 X` (13)."""
    return jnp.einsum("rk,bnkv->bnrv", r, X)


def embed(params, tokens):
    """Return `X_0 = sum_h w_E^h (x) E^h[token] + sum_h w_PE^h (x) P^h[position]` (14, 18, 19)."""
    X = store(0.0, params["w_E"], params["E"][tokens])
    positions = params.get("P")
    return X if positions is None else store(X, params["w_PE"], positions[None, : X.shape[1]])


def attention(X, layer, number, alibi):
    """Return `softmax(q^h k^h / sqrt(D_v)) v^h` of all R heads, [B, N, R, D_v] (21, 22).

    Each head reads its query, key and value with one key vector: `q^h = r_Q^h ._1 X`. Logits are
    divided by the number of the layer, from 1, as the paper does for stability.
    """
    q, k, v = (retrieve(X, layer[name]) for name in ("r_Q", "r_K", "r_V"))
    logits = jnp.einsum("bnrv,bmrv->brnm", q, k) / (q.shape[-1] ** 0.5 * number)
    length, heads = q.shape[1:3]
    distance = jnp.arange(length)[:, None] - jnp.arange(length)
    if alibi:
        slopes = 2.0 ** (-8.0 * jnp.arange(1, heads + 1) / heads)
        logits -= slopes[:, None, None] * distance
    weights = jax.nn.softmax(jnp.where(distance >= 0, logits, -jnp.inf), axis=-1)
    return jnp.einsum("brnm,bmrv->bnrv", weights, v)


def feed_forward(X, layer):
    """Return `unvec(W_2 gelu(W_1 concat_h(r_FF^h ._1 X)))`, [B, N, R, D_v] (23, 24, 25).

    W_1 and W_2 keep the axes R and D_v apart, so that nothing has to be concatenated.
    """
    z = retrieve(X, layer["r_FF"])
    hidden = jax.nn.gelu(jnp.einsum("bnrv,rvf->bnf", z, layer["W_1"]))
    return jnp.einsum("bnf,frv->bnrv", hidden, layer["W_2"])


def unembed(X, params):
    """Return logits, `sum_h W_U^h (r_U^h ._1 X)`, [B, N, V] (26, 27)."""
    return jnp.einsum("bnrv,rvt->bnt", retrieve(X, params["r_U"]), params["W_U"])


def model(config, params, tokens):
    """Return the logits of each next token, [B, N, V] (14 to 17, with the write of 20 and 23)."""
    X, epsilon = embed(params, tokens), config.epsilon
    for l in range(config.layers):
        layer = {name: params[name][l] for name in PER_LAYER}
        y = attention(norm(X, layer["gain_A"], epsilon), layer, l + 1, config.alibi)
        X = store(X, layer["w_O"], y)
        y = feed_forward(norm(X, layer["gain_FF"], epsilon), layer)
        X = store(X, layer["w_FF"], y)
    return unembed(norm(X, params["gain_U"], epsilon), params)


def loss(params, config, tokens, targets):
    """Return the means of `-log softmax(logits)[target]`, in nats, plus `z_loss log(Z)^2`."""
    logits = model(config, params, tokens)
    log_Z = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(log_Z - chosen + config.z_loss * log_Z**2)


def optimizer(config):
    """Make AdamW with a linear warmup, then a cosine to a tenth; gradients have at most norm 1."""
    warmup, rate = max(1, round(0.05 * config.steps)), config.learning_rate
    curve = optax.warmup_cosine_decay_schedule(0.0, rate, warmup, config.steps, 0.1 * rate)
    decays = lambda params: {name: name not in NO_DECAY for name in params}
    options = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": config.weight_decay}
    adamw = optax.adamw(lambda step: curve(step + 1), **options, mask=decays)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


@functools.partial(jax.jit, static_argnums=0)
def train_step(config, params, state, tokens, targets):
    """Return the parameters and the optimizer's state after a step, and the loss before it."""
    value, gradients = jax.value_and_grad(loss)(params, config, tokens, targets)
    updates, state = optimizer(config).update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value


def main(config=Config()):
    """Train on random windows of the text of `argparse.py`, and print the mean of 20 losses."""
    data = jnp.frombuffer(Path(argparse.__file__).read_bytes(), jnp.uint8).astype(jnp.int32)
    key, losses = jax.random.key(0), []
    params = parameters(config, key)
    state = optimizer(config).init(params)
    print(f"{sum(p.size for p in params.values()):,} parameters, {len(data):,} bytes of text")
    for step in range(config.steps):
        draw = jax.random.fold_in(key, step)
        starts = jax.random.randint(draw, (config.batch_size, 1), 0, len(data) - config.length)
        rows = data[starts + jnp.arange(config.length + 1)]
        params, state, value = train_step(config, params, state, rows[:, :-1], rows[:, 1:])
        losses.append(value)
        if step % 20 == 19 or step == config.steps - 1:
            print(f"step {step + 1:3}   loss {sum(losses[-20:]) / len(losses[-20:]):.3f}")


if __name__ == "__main__":
    main()
