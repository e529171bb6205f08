"""Every public op with one small call that a TPU's kernels can serve, for tests of transformations.

A new op is a `Call` in `CALLS`, under its name in `pallas_kernels`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels

Arrays = dict[str, np.ndarray]
B, N, K, V, R, P, S, D, H = 2, 128, 8, 16, 2, 3, 2, 128, 2


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of an op.

    Attributes:
      data: by name, with rows of a batch first: what devices may divide.
      whole: by name, what each device has whole.
      op: `op(implementation, **data, **whole)`: arrays with the batch's rows first.
      gradients: whether it has gradients of all floats.
      kernels: custom calls of a program for a TPU, of the op or of its gradient if it has one.
    """

    data: Arrays
    whole: Arrays
    op: Callable[..., Any]
    gradients: bool = True
    kernels: int = 2

    @property
    def given(self) -> Arrays:
        return self.data | self.whole

    def loss(self, implementation: str | None, given: Arrays) -> jax.Array:
        results = jax.tree.leaves(self.op(implementation, **given))
        return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in results)

    def run(self, implementation: str | None, given: Arrays) -> Any:
        """Gradients of the floats, or the results where there are none."""
        if not self.gradients:
            return self.op(implementation, **given)
        floats = {k: x for k, x in given.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        return jax.grad(lambda floats: self.loss(implementation, given | floats))(floats)


def normal(*shape, dtype=np.float32, scale=1.0):
    draws = np.random.default_rng(sum(shape)).normal(size=shape)
    return (scale * draws).astype(dtype)


def _named(op: str, *, first: Callable[[Any], Any] = lambda x: x, **options: Any):
    """The op by name, with all arrays by name."""
    run = getattr(pallas_kernels, op)
    return lambda implementation, **given: first(
        run(**given, **options, implementation=implementation)
    )


RESIDUAL, DATA = {"residual": normal(B, N, K, V)}, {"data": normal(B, N, R, V)}
STORE_KEYS, READ = {"store_keys": normal(R, K)}, {"gain": normal(K, V), "read_keys": normal(P, K)}
NORM = {"norm": "layernorm", "epsilon": 1e-6}
TOKENS = RESIDUAL | DATA
STATISTICS = {"numbers": 1 + normal(B, 2, N) ** 2}
COTANGENTS = {"d_residual": normal(B, N, K, V), "d_retrieved": normal(B, N, P, V)}


def _with_statistics(op: str, **options):
    run = _named(op, **options)
    return lambda implementation, numbers, **given: run(
        implementation, statistics=pallas_kernels.Statistics(numbers), **given
    )


def _at_layer(implementation, residual, data, **stacked):
    of_layers = {name: jnp.stack([x, x]) for name, x in stacked.items()}
    return pallas_kernels.store_norm_retrieve_at(
        1, residual, data=data, **of_layers, implementation=implementation
    )


# Sources have their number first, which is moved behind the rows of the batch and back.
SOURCES, MIXED = {"sources": normal(B, 3, N, D)}, {"mixed": normal(B, S, N, D)}
OF_ALL = {"log_sums": normal(B, S, N)}
CURRENT = {"current": normal(B, N, D), "log_sums": normal(B, N)}


def _turned(x):
    return jnp.moveaxis(x, 1, 0)


def _partial(implementation, queries, sources):
    found = pallas_kernels.depth_attention_partial(
        queries, _turned(sources), implementation=implementation
    )
    return jax.tree.map(_turned, found)


def _partial_backward(implementation, queries, sources, mixed, log_sums):
    turned = map(_turned, (sources, mixed, log_sums, mixed))
    found = pallas_kernels.depth_attention_partial_backward(
        queries, *turned, None, implementation=implementation
    )
    return _turned(found.sources)


def _merge(implementation, mixed, **given):
    mixed, current, z = pallas_kernels.depth_attention_merge(
        _turned(mixed), site=1, **given, implementation=implementation
    )
    return _turned(mixed), current, z


def _merge_at(implementation, mixed, log_sums, parameters, current):
    given = 1, parameters, _turned(mixed), _turned(log_sums), 1, current
    return pallas_kernels.depth_attention_merge_at(*given, implementation=implementation)


def _merge_read(implementation, mixed, **given):
    mixed, current, z = pallas_kernels.depth_attention_merge_read(
        _turned(mixed), site=1, **given, implementation=implementation
    )
    return _turned(mixed), current, z


def _depth_sums(implementation, weights, sources):
    given = jnp.moveaxis(weights, 0, 2), _turned(sources)
    rows, sums = pallas_kernels.depth_sums(*given, implementation=implementation)
    return _turned(rows), _turned(sums)


QKV = {"qkv": normal(B, N, 3 * H, 16, dtype=jnp.bfloat16)}
IDS = {"segment_ids": np.tile(np.arange(N, dtype=np.int32) // 50, (B, 1))}
OUT = {"out": normal(B, N, H, 16), "log_sums": 5 + normal(B, N, H), "d_out": normal(B, N, H, 16)}
OUT |= {name: OUT[name].astype(jnp.bfloat16) for name in ("out", "d_out")}
BEFORE = {"before": normal(B, N, 2 * H, 16, dtype=jnp.bfloat16)}
FILLED = {"filled": np.array([5, N], np.int32)}
HEADS = {"scale": 0.25, "rows": "head_major"}


def _attention_to(implementation, q, before, filled):
    seen = jnp.arange(N)[None] < filled[:, None]
    options = HEADS | {"implementation": implementation}
    return pallas_kernels.attention_to(q, before, seen, **options)


def _merged(implementation, out, log_sums):
    out = out.astype(jnp.float32)
    return pallas_kernels.merged((out, log_sums), (2 * out, 1 - log_sums))


LINEAR = {
    "q": normal(B, 8, 1, D, scale=0.1),
    "k": normal(B, 8, 1, D, scale=0.1),
    "v": normal(B, 8, 1, D),
    "log_decay": -(normal(B, 8, 1, D) ** 2),
    "beta": normal(B, 8, 1) ** 2,
}
ONE = {name: x[:, 0] for name, x in LINEAR.items()} | {"state": normal(B, 1, D, D)}


def _delta_step(implementation, **given):
    return pallas_kernels.delta_step(**given, scale=0.5)


# A row of the batch has two tokens with two choices each, of which three have a row.
PLACES = {"places": np.tile(np.array([1, 3, 0, 2], np.int32), (B, 1))}
ORDER = {"order": np.tile(np.array([2, 0, 3], np.int32), (B, 1))}
ROWS = {"rows": normal(B, 3, D)}


def _by_row(op):
    """Of each row of the batch, one after the other."""

    def run(implementation, **given):
        names = sorted(given)
        found = [
            op(implementation, **dict(zip(names, row, strict=True)))
            for row in zip(*(given[name] for name in names), strict=True)
        ]
        return jax.tree.map(lambda *x: jnp.stack(x), *found)

    return run


def _grouped(implementation, rows, matrices, sizes):
    options = {"implementation": implementation}
    return jnp.stack([pallas_kernels.grouped_matmul(x, matrices, sizes, **options) for x in rows])


def _product_at(implementation, rows, matrices):
    flat = rows.reshape(-1, D)
    found = pallas_kernels.product_at(1, flat, matrices, implementation=implementation)
    return found.reshape(*rows.shape[:-1], -1)


def _logits(implementation, x, kernel, targets):
    found = pallas_kernels.logits_with_sums(
        x.reshape(-1, D), kernel, targets.reshape(-1), implementation=implementation
    )
    return jax.tree.map(lambda a: a.reshape(-1, x.shape[1], *a.shape[1:]), found)


CALLS = {
    "attention_after": Call(QKV | BEFORE | FILLED, {}, _named("attention_after", **HEADS)),
    "attention_backward": Call(
        QKV | OUT | IDS, {}, _named("attention_backward", **HEADS), gradients=False, kernels=1
    ),
    "attention_forward": Call(
        QKV | IDS, {}, _named("attention_forward", **HEADS), gradients=False, kernels=1
    ),
    "attention_to": Call(
        {"q": QKV["qkv"][:, :, :H]} | BEFORE | FILLED, {}, _attention_to, gradients=False, kernels=1
    ),
    "causal_attention": Call(QKV | IDS, {}, _named("causal_attention", scale=0.25)),
    "delta_attention": Call(LINEAR, {}, _named("delta_attention", scale=0.5)),
    "delta_step": Call(ONE, {}, _delta_step, kernels=0),
    "depth_attention": Call(
        SOURCES,
        {"query": normal(D)},
        lambda implementation, query, sources: pallas_kernels.depth_attention(
            query, _turned(sources), implementation=implementation
        ),
    ),
    "depth_attention_merge": Call(
        MIXED | CURRENT, {"query": normal(D), "norm_gain": normal(D)}, _merge
    ),
    "depth_attention_merge_at": Call(
        MIXED | OF_ALL | {"current": CURRENT["current"]},
        {"parameters": normal(2, 2, D)},
        _merge_at,
        gradients=False,
        kernels=1,
    ),
    "depth_attention_merge_read": Call(
        {"mixed": MIXED["mixed"].reshape(B, S, N, K, V), "log_sums": CURRENT["log_sums"]}
        | {"current": CURRENT["current"].reshape(B, N, K, V)},
        {"query": normal(K, V), "norm_gain": normal(K, V), "read_keys": normal(P, K)},
        _merge_read,
    ),
    "depth_attention_partial": Call(SOURCES, {"queries": normal(S, D)}, _partial),
    "depth_attention_partial_backward": Call(
        SOURCES | MIXED | OF_ALL,
        {"queries": normal(S, D)},
        _partial_backward,
        gradients=False,
        kernels=1,
    ),
    "depth_sums": Call(SOURCES | {"weights": normal(B, S, 3, N)}, {}, _depth_sums),
    "grouped_matmul": Call(
        {"rows": normal(B, 9, D)},
        {"matrices": normal(2, D, D), "sizes": np.array([4, 5], np.int32)},
        _grouped,
        kernels=3,
    ),
    "logits_with_sums": Call(
        {"x": normal(B, 9, D, dtype=jnp.bfloat16), "targets": np.zeros((B, 9), np.int32)},
        {"kernel": normal(D, 20, dtype=jnp.bfloat16)},
        _logits,
        gradients=False,
        kernels=1,
    ),
    "merged": Call({name: OUT[name] for name in ("out", "log_sums")}, {}, _merged, kernels=0),
    "norm_retrieve": Call(RESIDUAL, READ, _named("norm_retrieve")),
    "norm_retrieve_again": Call(
        RESIDUAL | STATISTICS,
        READ,
        _with_statistics("norm_retrieve_again", dtype="float32", **NORM),
        gradients=False,
        kernels=1,
    ),
    "product_at": Call(
        {"rows": normal(B, 3, D)},
        {"matrices": normal(2, 2, D, 20)},
        _product_at,
        gradients=False,
        kernels=1,
    ),
    "rows_of_tokens": Call(
        {"x": normal(B, 2, D)} | ORDER | PLACES, {}, _by_row(_named("rows_of_tokens")), kernels=1
    ),
    "store": Call(TOKENS, STORE_KEYS, _named("store")),
    "store_backward": Call(
        DATA | {"d_stored": COTANGENTS["d_residual"]},
        STORE_KEYS,
        _named("store_backward", first=lambda found: found[1]),
        gradients=False,
        kernels=1,
    ),
    "store_forward": Call(TOKENS, STORE_KEYS, _named("store_forward"), gradients=False, kernels=1),
    "store_norm_retrieve": Call(TOKENS, STORE_KEYS | READ, _named("store_norm_retrieve")),
    "store_norm_retrieve_at": Call(
        TOKENS, STORE_KEYS | READ, _at_layer, gradients=False, kernels=1
    ),
    "store_norm_retrieve_with_statistics": Call(
        TOKENS,
        STORE_KEYS | READ,
        _named("store_norm_retrieve_with_statistics", **NORM),
        gradients=False,
        kernels=1,
    ),
    "sums_of_rows": Call(
        ROWS | ORDER | PLACES, {}, _by_row(_named("sums_of_rows", each=2)), kernels=1
    ),
    "to_fixed_point": Call(
        RESIDUAL,
        {},
        lambda implementation, residual: pallas_kernels.to_fixed_point(residual),
        gradients=False,
        kernels=0,
    ),
    "undo": Call(
        TOKENS | STATISTICS | COTANGENTS,
        STORE_KEYS | READ,
        _with_statistics("undo", norm="layernorm", first=lambda found: (found.rebuilt, found.data)),
        gradients=False,
        kernels=1,
    ),
}
