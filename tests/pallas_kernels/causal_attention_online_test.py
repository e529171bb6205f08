"""Attention by an online softmax: against NumPy, in bounded memory, and where it is chosen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pallas_kernels import attention_after, causal_attention
from pallas_kernels.causal_attention import online, plain, reference
from pallas_kernels.causal_attention.interface import (
    AttentionOperands,
    PartOperands,
    ResultsAndCotangent,
)
from tests.closeness import assert_close
from tests.pallas_kernels.causal_attention_battery import (
    TOLERANCE,
    Battery,
    Case,
    arguments,
    by_kernels,
    by_tier,
    numpy_attention,
)
from tests.tiers import later


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks of the tests' short sequences, and never the other form."""
    monkeypatch.setattr(online, "SIZES", (48,))
    monkeypatch.setattr(online, "LOGITS", 0)


class TestOnline(Battery):
    module = online
    cases = by_tier(
        (
            Case((2, 131, 4, 12), "float32", True, True, 2),
            Case((2, 131, 4, 12), "bfloat16", True, True, 2),
            Case((1, 97, 3, 20), "bfloat16", False, True),
            Case((1, 144, 6, 8), "float32", True, False, 1),
            Case((2, 49, 2, 5), "float16", False, True, 1),
            Case((1, 7, 2, 9), "float32"),
            Case((3, 1, 2, 8), "float32", True, True),
        ),
        Case((2, 131, 4, 12), "float32", True, True, 2),
        Case((1, 97, 3, 20), "bfloat16", False, True),
    )


def test_it_is_exact_in_float64():
    qkv, d_out, options = arguments(2, 75, 4, 6, "float64", alibi=True, segments=True, kv_heads=2)
    run = functools.partial(by_kernels, online, kv_heads=2)
    with jax.enable_x64(True):
        got = jax.jit(run)(qkv, d_out, options)
    assert_close(got, numpy_attention(qkv, d_out, **options, kv_heads=2), 1e-13)


@pytest.mark.parametrize("value_size", [5, *later(16)])
def test_values_of_a_size_of_their_own(value_size):
    """As with the larger of both sizes, and zeros in the other."""
    heads, kv_heads, size, whole = 4, 2, 12, 16
    qkv, d_out, options = arguments(2, 101, heads, whole, "float32", segments=True, kv_heads=2)
    qkv[:, :, : heads + kv_heads, size:] = 0
    qkv[:, :, heads + kv_heads :, value_size:] = 0
    d_out[..., value_size:] = 0
    q, k, v = np.split(qkv, [heads, heads + kv_heads], axis=2)
    given = AttentionOperands(q[..., :size], **options, kv=(k[..., :size], v[..., :value_size]))

    @jax.jit
    def run(given, d_out):
        out, sums = online.attention_forward(given, kv_heads=kv_heads)
        attended = ResultsAndCotangent(out, sums, d_out)
        return out, sums, *online.attention_backward(given, attended, kv_heads=kv_heads)

    got = run(given, d_out[..., :value_size])
    out, sums, d_qkv = numpy_attention(qkv, d_out, **options, kv_heads=kv_heads)
    d_q, d_k, d_v = np.split(d_qkv, [heads, heads + kv_heads], axis=2)
    kv = d_k[..., :size], d_v[..., :value_size]
    want = out[..., :value_size], sums, d_q[..., :size], kv
    assert_close(got, want, TOLERANCE["float32"])


@pytest.mark.parametrize("queries, keys, added", [(60, 101, True), *later((101, 33, False))])
def test_parts_equal_the_reference(queries, keys, added):
    """Gradients of what was attended, and those that JAX takes of outputs and of log sums."""
    draw = np.random.default_rng(0).normal
    q, d_out = draw(size=(2, 2, queries, 4, 8))
    kv = draw(size=(2, keys, 4, 8))
    slopes = np.array([0.5, 0.25, 0.1, 0.05]) if added else None
    ids = [np.random.default_rng(n).integers(0, 3, (2, n)) for n in (queries, keys)]
    d_sums = draw(size=(2, queries, 4))

    def run(module, q, kv, d_out, d_sums, slopes, segments):
        part = lambda q, kv: PartOperands(q, kv, 0.3, 111, slopes, segments)
        (out, sums), pullback = jax.vjp(lambda *x: module.part_forward(part(*x)), q, kv)
        pulled = pullback((d_out.astype(out.dtype), d_sums))
        # As if there were other keys too.
        found = module.part_backward(part(q, kv), ResultsAndCotangent(out, sums + 0.5, d_out))
        return out, sums, pulled, found

    with jax.enable_x64(True):
        given = q, kv, d_out, d_sums, slopes, tuple(ids) if added else None
        got, want = (
            jax.jit(functools.partial(run, module))(*given) for module in (online, reference)
        )
    assert_close(got, want, 1e-13)


def test_a_query_that_sees_no_key_counts_for_nothing():
    """As before the first block of a prompt: gradients are numbers, and those of the reference."""
    qkv, d_out, options = arguments(2, 50, 4, 8, "float32", alibi=True, kv_heads=2)
    before = np.random.default_rng(1).normal(size=(2, 70, 4, 8)).astype("float32")

    @jax.jit
    def run(qkv, before, filled, d_out, options):
        op = lambda qkv, before: attention_after(qkv, before, filled, kv_heads=2, **options)
        out, pullback = jax.vjp(op, qkv, before)
        return out, pullback(d_out)

    out, (d_qkv, d_before) = run(qkv, before, jnp.array([0, 55]), d_out, options)
    want = numpy_attention(qkv, d_out, **options, kv_heads=2)
    assert_close((out[:1], d_qkv[:1]), (want[0][:1], want[2][:1]), TOLERANCE["float32"])
    assert not np.any(d_before[0]) and not np.any(d_before[1, 55:])
    # As the last tokens of a longer row, whose first ones ask nothing.
    none = np.zeros((1, 55, 4, 8), "float32")
    row = np.concatenate([np.concatenate([none, before[1:, :55]], axis=2), qkv[1:]], axis=1)
    more = np.concatenate([none, d_out[1:]], axis=1)
    want = numpy_attention(row, more, **options, kv_heads=2)
    assert_close(out[1:], want[0][:, 55:], TOLERANCE["float32"])
    pulled = want[2][:, 55:], want[2][:, :55, 4:]
    assert_close((d_qkv[1:], d_before[1:, :55]), pulled, TOLERANCE["float32"])


def test_no_block_above_the_diagonal_is_computed():
    blocks = online._OnlineBlocks(
        True, PartOperands(*[jnp.zeros((1, 240, 2, 8))] * 2, 1.0, 0, None, None)
    )
    pairs = {tuple(map(int, pair)) for pair in zip(*blocks.pairs, strict=True)}
    assert pairs == {(i, j) for i in range(5) for j in range(i + 1)}


def test_it_can_be_differentiated_twice(monkeypatch):
    qkv, _, options = arguments(1, 60, 2, 4, "float64", segments=True)

    def second(qkv, options):
        op = lambda x: jnp.sum(causal_attention(x, implementation="xla", **options) ** 2)
        return jax.grad(lambda x: jnp.sum(jax.grad(op)(x) ** 2))(qkv)

    with jax.enable_x64(True):
        got = jax.jit(second)(qkv, options)
        monkeypatch.undo()
        want = jax.jit(lambda *args: second(*args))(qkv, options)
    assert_close(got, want, 1e-11)


@pytest.mark.parametrize("checked", [True, *later(False)])
def test_rows_over_a_mesh_and_under_vmap(checked):
    qkv, d_out, options = arguments(4, 70, 2, 4, "float32", segments=True)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    scale, rows = options["scale"], PartitionSpec("data")

    def gradient(qkv, ids, d_out):
        one = lambda qkv, ids: causal_attention(qkv[None], scale=scale, segment_ids=ids[None])[0]
        return jax.vjp(lambda qkv: jax.vmap(one)(qkv, ids), qkv)[1](d_out)[0]

    run = jax.shard_map(
        gradient, mesh=mesh, in_specs=3 * (rows,), out_specs=rows, check_vma=checked
    )
    got = jax.jit(run)(qkv, options["segment_ids"], d_out)
    assert_close(got, numpy_attention(qkv, d_out, **options)[2], TOLERANCE["float32"])


def temporary(module, length: int) -> int:
    """Bytes that forward and backward need beside operands and results, of 16 heads of 64."""
    given = AttentionOperands(jax.ShapeDtypeStruct((1, length, 48, 64), jnp.bfloat16), 0.1)
    given = given._replace(segment_ids=jax.ShapeDtypeStruct((1, length), jnp.int32))
    d_out = jax.ShapeDtypeStruct((1, length, 16, 64), jnp.bfloat16)

    def run(given, d_out):
        out, sums = module.attention_forward(given, kv_heads=16)
        return module.attention_backward(given, ResultsAndCotangent(out, sums, d_out), kv_heads=16)[
            0
        ]

    compiled = jax.jit(run).lower(given, d_out).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_grows_with_the_length_and_not_with_its_square(monkeypatch):
    monkeypatch.undo()
    short, long = (temporary(online, length) for length in (2048, 4096))
    assert long < 2 * short
    # All logits of 4096 tokens are 1 GiB of float32, and those of 1024 queries 256 MiB.
    assert long < 256 * 2**20 < temporary(reference, 4096)


@pytest.mark.parametrize(
    "rows, heads, queries, keys, form",
    [
        (1, 16, 1448, 1448, reference),
        (1, 16, 1449, 1449, online),
        (16, 32, 256, 256, reference),
        (16, 32, 257, 257, online),
        (1, 32, 512, 4096, online),
        (1, 32, 1, 131072, reference),
    ],
)
def test_it_takes_over_where_logits_are_many(rows, heads, queries, keys, form, monkeypatch):
    monkeypatch.undo()
    assert plain.module_for(rows, heads, queries, keys) is form


@pytest.mark.parametrize("tokens, blocks", [(1448, "724,1448"), (1449, "488,488")])
def test_the_op_has_the_logits_of_its_form(tokens, blocks, monkeypatch):
    monkeypatch.undo()
    qkv = jax.ShapeDtypeStruct((1, tokens, 48, 8), jnp.bfloat16)
    op = functools.partial(causal_attention, scale=0.1, implementation="xla")
    text = str(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(op(x).astype(jnp.float32))))(qkv))
    assert {x for x in ("724,1448", "488,488") if f",{x}]" in text} == {blocks}
