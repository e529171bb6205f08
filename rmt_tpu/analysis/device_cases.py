"""Calls of every op that a device's kernels are checked with: two sizes each, and what is wanted.

A new op is a function here that yields its cases, and its name in `OPS`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import shapes
from pallas_kernels.delta_attention import reference as delta_reference
from pallas_kernels.depth_attention import reference as depth_reference
from pallas_kernels.depth_attention.interface import Merge, Partial
from pallas_kernels.grouped_matmul import reference as grouped_reference
from pallas_kernels.key_vector import reference as key_vector_reference
from pallas_kernels.logits import reference as logits_reference
from pallas_kernels.shapes import Depth, Heads, KeyVector
from pallas_kernels.token_rows import reference as rows_reference

Scale = Literal["real", "small"]
Arrays = dict[str, Any]
_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of an op.

    Attributes:
      op: its name.
      size: in words.
      function: `function(implementation, **inputs)`, results by name.
      inputs: makes them, by name.
      flops: of the forward pass.
      gradients: whether the floating inputs have gradients; all results are then floats.
      reference: `reference(**inputs)`, the equations as they are written; None is the plain form.
      exact: results that are an input again, to the bit: the input, by the result.
    """

    op: str
    size: str
    function: Callable[..., Arrays]
    inputs: Callable[[], Arrays]
    flops: int
    gradients: bool = True
    reference: Callable[..., Arrays] | None = None
    exact: Mapping[str, str] = dataclasses.field(default_factory=dict)


def cases(scale: Scale) -> list[Case]:
    """Of all ops: as in models, or as small as the kernels allow, in odd numbers of tokens."""
    return [case for op in OPS.values() for case in op(scale)]


def _normal(seed: int, dtype: str, *shape: int, scale: float = 1.0) -> jax.Array:
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


# Key-vector ops -------------------------------------------------------------------------------


def _sites(scale: Scale) -> list[tuple[KeyVector, tuple[int, int]]]:
    if scale == "small":
        return [(KeyVector(8, 16, 3, 5), (1, 130))]
    return [(shapes.RMT_305M, shapes.TOKENS), (shapes.RMT_134M, (5, 1000))]


def _site_inputs(size: KeyVector, tokens: tuple[int, int]) -> Arrays:
    K, V, R, P = size
    return {
        "residual": _normal(0, "bfloat16", *tokens, K, V),
        "store_keys": _normal(1, "float32", R, K, scale=R**-0.5),
        "data": _normal(2, "bfloat16", *tokens, R, V),
        "gain": 1 + _normal(3, "float32", K, V, scale=0.1),
        "read_keys": _normal(4, "float32", P, K, scale=K**-0.5),
    }


def _key_vector(scale: Scale) -> Iterator[Case]:
    for size, tokens in _sites(scale):
        K, V, R, P = size
        words = f"{_words(tokens)} K={K} V={V} R={R} P={P}"
        inputs = functools.partial(_site_inputs, size, tokens)
        each = 2 * tokens[0] * tokens[1] * K * V
        written, read = ("residual", "store_keys", "data"), ("residual", "gain", "read_keys")
        yield Case(
            "store_norm_retrieve",
            words,
            _store_norm_retrieve,
            inputs,
            (R + P) * each,
            reference=_store_norm_retrieve_plainly,
        )
        yield Case(
            "store",
            words,
            lambda implementation, **given: {
                "stored": pallas_kernels.store(**given, implementation=implementation)
            },
            functools.partial(_only, inputs, written),
            R * each,
            reference=lambda **given: {"stored": key_vector_reference.store(**given)},
        )
        yield Case(
            "norm_retrieve",
            words,
            lambda implementation, **given: {
                "retrieved": pallas_kernels.norm_retrieve(**given, implementation=implementation)
            },
            functools.partial(_only, inputs, read),
            P * each,
            reference=lambda **given: {
                "retrieved": key_vector_reference.norm_retrieve(
                    **given, norm="layernorm", epsilon=_EPSILON, dtype=given["residual"].dtype
                )
            },
        )
        yield Case(
            "undo",
            words,
            _store_and_undo,
            functools.partial(_undo_inputs, size, tokens),
            3 * (R + P) * each,
            gradients=False,
            exact={"rebuilt": "residual"},
        )
        few = (tokens[0], 1)
        yield Case(
            "store_norm_retrieve_at",
            f"{_words(few)} K={K} V={V} R={R} P={P}",
            _store_norm_retrieve_at,
            functools.partial(_at_inputs, size, few),
            (R + P) * 2 * tokens[0] * K * V,
            gradients=False,
        )


def _store_norm_retrieve(implementation, **given) -> Arrays:
    stored, retrieved = pallas_kernels.store_norm_retrieve(**given, implementation=implementation)
    return {"stored": stored, "retrieved": retrieved}


def _store_norm_retrieve_plainly(**given) -> Arrays:
    given |= {"norm": "layernorm", "epsilon": _EPSILON}
    return dict(
        zip(("stored", "retrieved"), key_vector_reference.store_norm_retrieve(**given), strict=True)
    )


def _undo_inputs(size: KeyVector, tokens: tuple[int, int]) -> Arrays:
    K, V, _, P = size
    inputs = _site_inputs(size, tokens)
    residual = pallas_kernels.to_fixed_point(inputs["residual"].astype(jnp.float32))
    cotangents = {
        "d_stored": _normal(5, "bfloat16", *tokens, K, V),
        "d_retrieved": _normal(6, "bfloat16", *tokens, P, V),
    }
    return inputs | cotangents | {"residual": residual}


def _store_and_undo(implementation, d_stored, d_retrieved, **given) -> Arrays:
    """What a reversible backward pass does: store, and take that back with all cotangents."""
    options = {"norm": "layernorm", "implementation": implementation}
    residual = given.pop("residual")
    stored, retrieved, statistics = pallas_kernels.store_norm_retrieve_with_statistics(
        residual, **given, epsilon=_EPSILON, **options
    )
    g = pallas_kernels.undo(
        stored, statistics, **given, d_residual=d_stored, d_retrieved=d_retrieved, **options
    )
    gradients = {f"d_{name}": getattr(g, name) for name in ("residual", *given)}
    return {"stored": stored, "retrieved": retrieved, "rebuilt": g.rebuilt} | gradients


def _at_inputs(size: KeyVector, tokens: tuple[int, int]) -> Arrays:
    inputs = _site_inputs(size, tokens)
    of_layers = lambda x: jnp.stack([jnp.zeros_like(x), x])  # the second is read
    stacked = {name: of_layers(inputs[name]) for name in ("store_keys", "gain", "read_keys")}
    return inputs | stacked


def _store_norm_retrieve_at(implementation, **given) -> Arrays:
    stored, retrieved = pallas_kernels.store_norm_retrieve_at(
        1, **given, implementation=implementation
    )
    return {"stored": stored, "retrieved": retrieved}


# Depth attention ------------------------------------------------------------------------------


def _depth(scale: Scale) -> Iterator[Case]:
    if scale == "small":
        sizes = [(Depth(2, 3, 128), (1, 37), None), (Depth(2, 3, 128), (1, 130), (8, 16))]
    else:
        sizes = [
            (shapes.OVER_BLOCKS, shapes.TOKENS, None),
            (Depth(8, 9, 1024), (5, 700), None),
            (Depth(2, 9, 4096), (4, 512), (64, 64)),
            (Depth(2, 5, 2048), (3, 400), (32, 64)),
        ]
    for size, tokens, matrix in sizes:
        S, N, D = size
        count = tokens[0] * tokens[1]
        entries = matrix or (D,)
        of = f" K={matrix[0]} V={matrix[1]}" if matrix else f" D={D}"
        words = f"{_words(tokens)} S={S} N={N}{of}"
        sources = functools.partial(_partial_inputs, S, N, tokens, entries)
        kind = "depth_attention_matrices" if matrix else "depth_attention"
        if not matrix:
            yield Case(
                "depth_attention",
                words,
                lambda implementation, queries, sources: {
                    "mixed": pallas_kernels.depth_attention(
                        queries[0], sources, implementation=implementation
                    )
                },
                sources,
                4 * N * count * D,
                reference=lambda queries, sources: {
                    "mixed": _partial_plainly(queries[:1], sources)["mixed"][0]
                },
            )
        flops = 4 * S * N * count * D
        yield Case(f"{kind}_partial", words, _partial, sources, flops, reference=_partial_plainly)
        merge = functools.partial(_merge_inputs, S, tokens, entries)
        if not matrix:
            yield Case(
                "depth_attention_merge",
                words,
                _merge,
                merge,
                15 * count * D,
                reference=_merge_plainly,
            )
            few = functools.partial(_merge_at_inputs, S, (tokens[0], 1), D)
            yield Case(
                "depth_attention_merge_at",
                f"{_words((tokens[0], 1))} S={S} D={D}",
                _merge_at,
                few,
                15 * tokens[0] * D,
                gradients=False,
            )
        else:
            yield Case(
                f"{kind}_merge",
                words,
                _merge_matrices,
                merge,
                15 * count * D,
                reference=_merge_plainly,
            )
            read = functools.partial(_merge_read_inputs, S, tokens, entries)
            flops = (15 + 2 * _READ) * count * D
            yield Case("depth_attention_merge_read", words, _merge_read, read, flops)


_READ = 12


def _partial_inputs(S: int, N: int, tokens, entries) -> Arrays:
    return {
        "queries": _normal(10, "float32", S, *entries, scale=0.1),
        "sources": _normal(11, "bfloat16", N, *tokens, *entries),
    }


def _partial(implementation, queries, sources) -> Arrays:
    mixed, log_sums = pallas_kernels.depth_attention_partial(
        queries, sources, implementation=implementation
    )
    return {"mixed": mixed, "log_sums": log_sums}


def _partial_plainly(queries, sources) -> Arrays:
    S, (N, B, T, *entries) = len(queries), sources.shape
    given = Partial(queries.reshape(S, -1), sources.reshape(N, B * T, -1), N, None)
    mixed, log_sums = depth_reference.partial(given, epsilon=_EPSILON)
    return {
        "mixed": mixed.reshape(S, B, T, *entries),
        "log_sums": log_sums.reshape(S, B, T),
    }


def _merge_inputs(S: int, tokens, entries) -> Arrays:
    inputs = {
        "mixed": _normal(12, "bfloat16", S, *tokens, *entries),
        "log_sums": _normal(13, "float32", *tokens),
        "current": _normal(14, "bfloat16", *tokens, *entries),
        "query": _normal(15, "float32", *entries, scale=0.1),
    }
    if len(entries) > 1:
        return inputs
    return inputs | {"norm_gain": 1 + _normal(16, "float32", *entries, scale=0.1)}


def _merge(implementation, mixed, log_sums, current, query, norm_gain) -> Arrays:
    site = mixed.shape[0] - 1
    mixed, current, z = pallas_kernels.depth_attention_merge(
        mixed, log_sums, site, current, query, norm_gain, implementation=implementation
    )
    return {"mixed": mixed, "current": current, "z": z}


def _merge_plainly(mixed, log_sums, current, query, norm_gain=None) -> Arrays:
    S, tokens = len(mixed), log_sums.size
    flat = mixed.reshape(S, tokens, -1), log_sums.reshape(-1), S - 1, current.reshape(tokens, -1)
    norm = None if norm_gain is None else "layernorm"
    z = depth_reference.merge(
        Merge(query.reshape(-1), *flat, True, norm_gain),
        norm=norm,
        epsilon=_EPSILON,
        norm_epsilon=_EPSILON,
    )
    # A site is merged once: its row has no later use, and so no other gradient.
    mixed = mixed.at[-1].set(jax.lax.stop_gradient(mixed[-1]))
    return {"mixed": mixed, "current": current, "z": z.reshape(current.shape)}


def _merge_matrices(implementation, mixed, log_sums, current, query) -> Arrays:
    site = mixed.shape[0] - 1
    options = {"norm": None, "implementation": implementation}
    mixed, current, z = pallas_kernels.depth_attention_merge(
        mixed, log_sums, site, current, query, None, **options
    )
    return {"mixed": mixed, "current": current, "z": z}


def _merge_read_inputs(S: int, tokens, entries) -> Arrays:
    keys = _normal(17, "float32", _READ, entries[0], scale=entries[0] ** -0.5)
    gain = 1 + _normal(16, "float32", *entries, scale=0.1)
    return _merge_inputs(S, tokens, entries) | {"norm_gain": gain, "read_keys": keys}


def _merge_read(implementation, mixed, log_sums, current, **given) -> Arrays:
    site = mixed.shape[0] - 1
    mixed, current, z = pallas_kernels.depth_attention_merge_read(
        mixed, log_sums, site, current, **given, implementation=implementation
    )
    return {"mixed": mixed, "current": current, "z": z}


def _merge_at_inputs(S: int, tokens, D: int) -> Arrays:
    inputs = _merge_inputs(S, tokens, (D,))
    query, gain = inputs.pop("query"), inputs.pop("norm_gain")
    own = jnp.stack([query, gain])
    inputs["log_sums"] = jnp.stack([inputs["log_sums"]] * S)
    return inputs | {"parameters": jnp.stack([jnp.zeros_like(own), own])}


def _merge_at(implementation, parameters, mixed, log_sums, current) -> Arrays:
    site = mixed.shape[0] - 1
    given = 1, parameters, mixed, log_sums, site, current
    z = pallas_kernels.depth_attention_merge_at(*given, implementation=implementation)
    return {"z": z}


# Attention ------------------------------------------------------------------------------------


def _attention(scale: Scale) -> Iterator[Case]:
    if scale == "small":
        whole = [(Heads(2, 16), (1, 128))]
        blocks = [(Heads(2, 16), (1, 130))]
        after, decode = [(Heads(2, 16), (1, 128), 128)], [(Heads(2, 16), (1, 1), 128)]
    else:
        whole = [(shapes.GPT2_405M, shapes.TOKENS), (shapes.GPT2_160M, (4, 1024))]
        blocks = [(Heads(16, 128), (1, 4096)), (shapes.GPT2_405M, (2, 2100))]
        after = [(shapes.GPT2_405M, (2, 512), 2048), (Heads(16, 128), (1, 256), 1024)]
        decode = [(shapes.GPT2_405M, (8, 1), 2048), (Heads(16, 128), (4, 1), 1024)]
    for name, sizes in {"whole": whole, "blocks": blocks}.items():
        for (heads, size), tokens in sizes:
            product = tokens[0] * tokens[1] ** 2 * heads * size
            yield Case(
                f"causal_attention_{name}",
                f"{_words(tokens)} H={heads} D={size}",
                _attend,
                functools.partial(_attention_inputs, heads, size, tokens),
                2 * product,
            )
    for (heads, size), tokens, before in after:
        product = 2 * tokens[0] * tokens[1] * (before + tokens[1] // 2) * heads * size
        yield Case(
            "attention_after",
            f"{_words(tokens)} H={heads} D={size} before={before}",
            _attend_after,
            functools.partial(_after_inputs, heads, size, tokens, before),
            2 * product,
            gradients=False,  # they are those of the plain form
        )
    for (heads, size), tokens, before in decode:
        yield Case(
            "attention_to",
            f"{_words(tokens)} H={heads} D={size} before={before}",
            _attend_to,
            functools.partial(_to_inputs, heads, size, tokens, before),
            4 * tokens[0] * tokens[1] * before * heads * size,
            gradients=False,
        )


def _attention_inputs(heads: int, size: int, tokens) -> Arrays:
    batch, length = tokens
    ids = (jnp.arange(length) >= length // 3).astype(jnp.int32)
    qkv = _normal(20, "bfloat16", *tokens, 3 * heads, size)
    return {"qkv": qkv, "segment_ids": jnp.tile(ids, (batch, 1))}


def _attend(implementation, qkv, segment_ids) -> Arrays:
    scale = qkv.shape[-1] ** -0.5
    options = {"scale": scale, "segment_ids": segment_ids, "implementation": implementation}
    return {"out": pallas_kernels.causal_attention(qkv, **options)}


def _after_inputs(heads: int, size: int, tokens, before: int) -> Arrays:
    return {
        "qkv": _normal(21, "bfloat16", *tokens, 3 * heads, size),
        "before": _normal(22, "bfloat16", tokens[0], before, 2 * heads, size),
        "filled": jnp.arange(before - tokens[0], before, dtype=jnp.int32),
    }


def _attend_after(implementation, qkv, before, filled) -> Arrays:
    scale = qkv.shape[-1] ** -0.5
    options = {"scale": scale, "implementation": implementation}
    return {"out": pallas_kernels.attention_after(qkv, before, filled, **options)}


def _to_inputs(heads: int, size: int, tokens, before: int) -> Arrays:
    filled = jnp.arange(before - tokens[0], before)
    return {
        "q": _normal(23, "bfloat16", *tokens, heads, size),
        "before": _normal(24, "bfloat16", tokens[0], before, 2 * heads, size),
        "seen": jnp.arange(before)[None] < filled[:, None],
    }


def _attend_to(implementation, q, before, seen) -> Arrays:
    options = {"scale": q.shape[-1] ** -0.5, "implementation": implementation}
    out, log_sums = pallas_kernels.attention_to(q, before, seen, **options)
    return {"out": out, "log_sums": log_sums}


def _delta(scale: Scale) -> Iterator[Case]:
    small = [((1, 140), Heads(1, 128))]
    sizes = small if scale == "small" else [((1, 4096), Heads(16, 128)), ((3, 700), Heads(8, 128))]
    for tokens, (heads, size) in sizes:
        yield Case(
            "delta_attention",
            f"{_words(tokens)} H={heads} D={size}",
            _delta_attention,
            functools.partial(_delta_inputs, heads, size, tokens),
            11 * tokens[0] * tokens[1] * heads * size**2,
            reference=_delta_plainly if scale == "small" else None,  # it keeps every state
        )


def _delta_inputs(heads: int, size: int, tokens) -> Arrays:
    rows = *tokens, heads
    unit = lambda x: (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype("bfloat16")
    return {
        "q": unit(_normal(30, "float32", *rows, size)),
        "k": unit(_normal(31, "float32", *rows, size)),
        "v": _normal(32, "bfloat16", *rows, size),
        "log_decay": -jax.nn.softplus(_normal(33, "float32", *rows, size) - 2),
        "beta": jax.nn.sigmoid(_normal(34, "float32", *rows)),
        "state": _normal(35, "float32", tokens[0], heads, size, size, scale=0.1),
    }


def _delta_attention(implementation, **given) -> Arrays:
    read, state = pallas_kernels.delta_attention(**given, scale=1.0, implementation=implementation)
    return {"read": read, "state": state}


def _delta_plainly(**given) -> Arrays:
    read, state = delta_reference.delta_attention(**given, scale=1.0)
    return {"read": read, "state": state}


# Experts and logits ---------------------------------------------------------------------------


def _grouped(scale: Scale) -> Iterator[Case]:
    small = [(300, 128, 128, 3)]
    sizes = small if scale == "small" else [(8192, 1024, 2048, 16), (5000, 768, 1024, 7)]
    for M, K, N, G in sizes:
        yield Case(
            "grouped_matmul",
            f"rows={M} K={K} N={N} groups={G}",
            _grouped_matmul,
            functools.partial(_grouped_inputs, M, K, N, G),
            2 * M * K * N,
            reference=_grouped_plainly if scale == "small" else None,  # a matrix for every row
        )


def _grouped_inputs(M: int, K: int, N: int, G: int) -> Arrays:
    # Some rows are of no group; one group is empty.
    sizes = jnp.full(G, (M - M // 10) // (G - 1), jnp.int32).at[1].set(0)
    return {
        "rows": _normal(40, "bfloat16", M, K),
        "matrices": _normal(41, "bfloat16", G, K, N, scale=K**-0.5),
        "sizes": sizes,
    }


def _grouped_matmul(implementation, rows, matrices, sizes) -> Arrays:
    given = jnp.where(_of_a_group(rows, sizes), rows, 0)
    products = pallas_kernels.grouped_matmul(given, matrices, sizes, implementation=implementation)
    # What there is of other rows may be anything.
    return {"products": jnp.where(_of_a_group(rows, sizes), products, 0)}


def _grouped_plainly(rows, matrices, sizes) -> Arrays:
    return {"products": grouped_reference.grouped_matmul(rows, matrices, sizes)}


def _of_a_group(rows, sizes):
    return (jnp.arange(len(rows)) < jnp.sum(sizes))[:, None]


def _token_rows(scale: Scale) -> Iterator[Case]:
    sizes = (
        [(70, 2, 40, 128)] if scale == "small" else [(4096, 8, 8192, 1024), (1000, 4, 1500, 768)]
    )
    for tokens, each, count, width in sizes:
        yield Case(
            "token_rows",
            f"tokens={tokens} choices={each} rows={count} width={width}",
            functools.partial(_sums, each),
            functools.partial(_rows_inputs, tokens, each, count, width),
            count * width,
            reference=functools.partial(_sums_plainly, each),
        )


def _rows_inputs(tokens: int, each: int, count: int, width: int) -> Arrays:
    order = jax.random.permutation(jax.random.key(50), tokens * each)[:count].astype(jnp.int32)
    places = jnp.full(tokens * each, count, jnp.int32).at[order].set(jnp.arange(count))
    return {
        "rows": _normal(51, "bfloat16", count, width),
        "x": _normal(52, "bfloat16", tokens, width),
        "order": order,
        "places": places,
    }


def _sums(each: int, implementation, rows, x, order, places) -> Arrays:
    options = {"implementation": implementation}
    return {
        "sums": pallas_kernels.sums_of_rows(rows, order, places, each=each, **options),
        "rows": pallas_kernels.rows_of_tokens(x, order, places, **options),
    }


def _sums_plainly(each: int, rows, x, order, places) -> Arrays:
    sums = rows_reference.sums_of_rows(rows, places, each=each)
    return {"sums": sums, "rows": x[order // each]}


def _logits(scale: Scale) -> Iterator[Case]:
    small = [(70, 128, 300)]
    for tokens, width, vocab in (
        small
        if scale == "small"
        else [
            (4096, 1024, 50257),
            (1000, 768, 32000),
        ]
    ):
        yield Case(
            "logits",
            f"tokens={tokens} width={width} vocab={vocab}",
            lambda implementation, x, kernel, targets: pallas_kernels.logits_with_sums(
                x, kernel, targets, implementation=implementation
            )._asdict(),
            functools.partial(_logits_inputs, tokens, width, vocab),
            2 * tokens * width * vocab,
            gradients=False,
            reference=lambda x, kernel, targets: logits_reference.logits(
                x, kernel, targets, multiplier=1.0
            )._asdict(),
        )


def _logits_inputs(tokens: int, width: int, vocab: int) -> Arrays:
    return {
        "x": _normal(60, "bfloat16", tokens, width),
        "kernel": _normal(61, "bfloat16", width, vocab, scale=width**-0.5),
        "targets": jax.random.randint(jax.random.key(62), (tokens,), 0, vocab),
    }


def _words(tokens: tuple[int, int]) -> str:
    return f"{tokens[0]}x{tokens[1]}"


def _only(inputs: Callable[[], Arrays], names) -> Arrays:
    made = inputs()
    return {name: made[name] for name in names}


OPS: dict[str, Callable[[Scale], Iterator[Case]]] = {
    "key_vector": _key_vector,
    "depth_attention": _depth,
    "attention": _attention,
    "delta_attention": _delta,
    "grouped_matmul": _grouped,
    "token_rows": _token_rows,
    "logits": _logits,
}
