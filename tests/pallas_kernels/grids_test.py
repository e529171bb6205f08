"""Grids, index maps and aliases of every TPU kernel, evaluated without running it.

Sizes are odd, and have several blocks and a last one that is not whole.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.arguments import StackSlice
from pallas_kernels.causal_attention import mosaic_tpu as causal_attention
from pallas_kernels.causal_attention.block_sizes import Blocks
from pallas_kernels.causal_attention.interface import (
    AttentionOperands,
    PartOperands,
    ResultsAndCotangent,
    Window,
)
from pallas_kernels.delta_attention import mosaic_tpu as delta_attention
from pallas_kernels.delta_attention.interface import DeltaOperands
from pallas_kernels.depth_attention import mosaic_tpu as vectors
from pallas_kernels.depth_attention import mosaic_tpu_matrices as matrices
from pallas_kernels.depth_attention.interface import (
    Merge,
    MergeCotangents,
    Partial,
    PartialCotangents,
)
from pallas_kernels.key_vector import mosaic_tpu as key_vector
from pallas_kernels.key_vector.block_sizes import BlockSizes
from pallas_kernels.key_vector.interface import Reread, SiteBackward, SiteOperands, Statistics
from pallas_kernels.target import lowering_for
from tests.grids import faults, kernels_of
from tests.pallas_kernels.public_ops import CALLS, N
from tests.tiers import later

LONG, B = 1300, 3
K, V, R, P, S, D = 16, 8, 3, 5, 3, 128
# Those that have their own number of tokens, which is made this.
SEQUENCES = {
    "delta_attention": (8, 200),
    "depth_sums": (N, 1304),
    "logits_with_sums": (9, 3000),
    "product_at": (3, 5),
}


def f(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def half(*shape):
    return f(*shape, dtype="bfloat16")


def whole(*shape):
    return f(*shape, dtype="int32")


def longer(op):
    """The call's arrays, with many tokens; integers that choose blocks as they are."""
    call, (old, new) = CALLS[op], SEQUENCES.get(op, (N, LONG))

    def array(name, x):
        shape = list(x.shape)
        if name in call.data and old in shape:
            shape[shape.index(old)] = new
        return x if shape == list(x.shape) else f(*shape, dtype=x.dtype)

    return {name: array(name, x) for name, x in call.given.items()}


def check(function, args, names):
    found = kernels_of(function, *args)
    assert {kernel.name for kernel in found} == set(names.split())
    assert [line for kernel in found for line in faults(kernel)] == []
    assert all(len(kernel.steps) > 1 for kernel in found)


BOTH = "{0} {0}_backward".format
BLOCKS = "attention_blocks_forward attention_blocks_backward"
QUICK = {
    "depth_attention_merge_at": "depth_attention_merge_decode",
    "depth_attention_merge_read": BOTH("depth_attention_matrices_merge_read"),
    "depth_sums": BOTH("depth_sums"),
    "logits_with_sums": "logits",
    "norm_retrieve": BOTH("key_vector_read"),
    "store": BOTH("key_vector_store"),
    "store_norm_retrieve": "key_vector_forward key_vector_backward",
    "product_at": "stacked_product",
    "store_norm_retrieve_at": "key_vector_decode",
    "undo": "key_vector_backward",
}
# The cases below have their kernels, or those above.
AT_NIGHT = {
    "attention_after": "attention_blocks_forward",
    "causal_attention": BLOCKS,
    "delta_attention": "delta_forward delta_backward",
    "depth_attention_merge": BOTH("depth_attention_merge"),
    "depth_attention_partial": BOTH("depth_attention_partial"),
    "attention_backward": "attention_blocks_backward",
    "attention_forward": "attention_blocks_forward",
    "depth_attention": BOTH("depth_attention_partial"),
    "depth_attention_partial_backward": "depth_attention_partial_backward",
    "norm_retrieve_again": "key_vector_read",
    "store_backward": "key_vector_store_backward",
    "store_forward": "key_vector_store",
    "store_norm_retrieve_with_statistics": "key_vector_forward",
}


# A chip whose programs run on one core, which has all sums. Kernels for an unknown chip are those
# of two cores, of which each has sums of its own.
ONE_CORE = "TPU v5 lite"


@pytest.mark.slow
@pytest.mark.parametrize("chip", [None, ONE_CORE])
@pytest.mark.parametrize("op, names", [*QUICK.items(), *later(*AT_NIGHT.items())])
def test_ops(op, names, chip):
    with lowering_for(chip) if chip else contextlib.nullcontext():
        check(lambda given: CALLS[op].run("pallas", given), [longer(op)], names)


# Kernels for which tables of groups choose blocks.
GROUPED = {"grouped_matmul", "rows_of_tokens", "sums_of_rows"}


def test_every_op_with_kernels_is_tested():
    tested = QUICK.keys() | AT_NIGHT.keys() | GROUPED | {"attention_to"}
    assert tested == {op for op, call in CALLS.items() if call.kernels}


@pytest.mark.slow
@pytest.mark.parametrize("chip", [None, ONE_CORE])
def test_grouped_products(chip):
    """All tiles of rows belong to a group here; products of other rows are not written."""
    sizes = np.array([384, 0, 256, 384], np.int32)
    given = {"rows": f(1024, D), "matrices": f(4, D, 256)}

    def run(rows, matrices):
        op = lambda *x: pallas_kernels.grouped_matmul(
            *x, jnp.asarray(sizes), alignment=128, implementation="mosaic_tpu"
        )
        products, pull_back = jax.vjp(op, rows, matrices)
        return products, *pull_back(products)

    kernels = "grouped_matmul grouped_matmul_transposed grouped_matmul_of_matrices"
    with lowering_for(chip) if chip else contextlib.nullcontext():
        check(lambda given: run(**given), [given], kernels)


# What an op alone does not ask for -----------------------------------------------------------

SITE = SiteOperands(whole(B, 300, K, V), f(R, K), half(B, 300, R, V), f(K, V), f(P, K))
STATISTICS = Statistics(f(B, 2, 300))
COTANGENTS = half(B, 300, K, V), half(B, 300, P, V)


def key_vector_case(residual, blocks, more=""):
    """A site, there and back; a stack's slots; a read again."""
    options = {"norm": "layernorm", "block_sizes": blocks}

    def run(site, statistics, cotangents, stacks):
        slots = site._replace(**{name: StackSlice(x, 1) for name, x in stacks.items()})
        again = Reread(slots.gain, slots.read_keys, statistics)
        out = key_vector.forward(slots, **options)
        given = SiteBackward(slots, statistics, *cotangents, again=again)
        return out, key_vector.backward(given, rebuild=True, **options)

    names = "store_keys", "data", "gain", "read_keys"
    stacks = {
        name: f(2, *getattr(SITE, name).shape, dtype=getattr(SITE, name).dtype) for name in names
    }
    site = SITE._replace(residual=f(*SITE.residual.shape, dtype=residual))
    given = site, STATISTICS, COTANGENTS, stacks
    return run, given, "key_vector_forward key_vector_backward" + more


def depth_case(module, size, tokens, rows, sites, count):
    """After a prior, and onto gradients that there are; a merge, of which rows are left alone."""
    norm = "rmsnorm" if module is vectors else None

    def run(given, scored, merge, cotangents):
        given, merge = given._replace(count=jnp.int32(count)), merge._replace(site=jnp.int32(1))
        options = {"epsilon": 1e-6, "norm_epsilon": 1e-6, "norm": norm}
        return (
            module.partial(given, epsilon=1e-6),
            module.partial_backward(given._replace(prior=None), scored, epsilon=1e-6),
            module.merge(merge, **options),
            module.merge_backward(merge, cotangents, **options),
        )

    of = lambda *lead: half(*lead, *tokens, *size)
    sums, mixed = f(sites, *tokens), of(sites)
    given = Partial(f(sites, *size), of(rows), None, (mixed, sums))
    gain = None if norm is None else f(*size)
    merge = Merge(f(*size), mixed, f(*tokens), None, of(), f(dtype="bool"), gain)
    args = (
        given,
        PartialCotangents(sums, sums, mixed, of(rows)),
        merge,
        MergeCotangents(of(), mixed, of()),
    )
    prefix = "depth_attention_" if module is vectors else "depth_attention_matrices_"
    kinds = "partial partial_backward merge merge_backward".split()
    kinds += ["measure"] * (module is matrices)
    return run, args, " ".join(prefix + kind for kind in kinds)


def attention_case(rows, shape, names, blocks=None, window=None):
    """Of fewer heads of keys in blocks; into a slot of a stack, and back from it."""
    (batch, length, heads, size), kv_heads = shape, 1 if blocks else shape[2]
    qkv, out = half(batch, length, heads + 2 * kv_heads, size), half(*shape)

    def run(qkv, stack, sums, d_out, ids):
        to = StackSlice(stack, 1)
        given = AttentionOperands(qkv, scale=0.3, segment_ids=ids, to=to, window=window)
        options = {"rows": rows, "kv_heads": kv_heads, "blocks": blocks}
        forward = causal_attention.attention_forward(given, **options)
        attended = ResultsAndCotangent(StackSlice(stack, 1), sums, d_out)
        return forward, causal_attention.attention_backward(given, attended, **options)

    return run, (qkv, half(2, *shape), f(*shape[:3]), out, whole(batch, length)), names


def part_case(queries, keys, heads, size, window=None):
    def run(q, kv, sums):
        given = PartOperands(q, kv, 0.3, jnp.int32(keys), None, None, window)
        return (
            causal_attention.part_forward(given),
            causal_attention.part_backward(given, ResultsAndCotangent(q, sums, q)),
        )

    args = half(B, queries, heads, size), half(B, keys, 2, size), f(B, queries, heads)
    return run, args, BLOCKS


def decode_case(tokens):
    def run(queries, sources):
        return vectors.partial(Partial(queries, sources, jnp.int32(2)), epsilon=1e-6)

    args = f(S, D), half(4, tokens, D)
    return run, args, "depth_attention_partial_decode"


def delta_case(heads):
    def run(q, log_decay, beta, documents, states, state):
        given = DeltaOperands(q, q, q, log_decay, beta, documents)
        return (
            delta_attention.forward(given, state, scale=0.3),
            delta_attention.backward(given, states, q, state, scale=0.3),
        )

    shape, chunks = (B, 300, heads, D), 3
    of = half(*shape), f(*shape), f(*shape[:3]), whole(B, 300)
    return run, (*of, f(chunks, B, heads, D, D), f(B, heads, D, D)), "delta_forward delta_backward"


CASES = {
    "attention": attention_case(
        "head_major", (B, 256, 2, 16), "attention_forward attention_backward"
    ),
    "attention in rows of sizes": attention_case(
        "size_major", (B, 256, 16, 16), "attention_forward attention_backward"
    ),
    "attention in blocks": attention_case(
        "head_major", (B, 384, 3, 16), BLOCKS, Blocks(128, 128, 1)
    ),
    "attention in blocks of sizes": attention_case(
        "size_major", (B, 384, 8, 16), BLOCKS, Blocks(128, 128, 1)
    ),
    "attention to a part": part_case(384, 256, 4, 16),
    "attention in windows": attention_case(
        "head_major", (B, 640, 3, 16), BLOCKS, Blocks(128, 256, 1), Window(150)
    ),
    "attention in windows in rows of sizes": attention_case(
        "size_major", (B, 640, 8, 16), BLOCKS, Blocks(128, 128, 1), Window(130)
    ),
    "attention to a part in windows": part_case(384, 640, 4, 16, Window(-300)),
    "delta attention": delta_case(9),
    "depth of few tokens": decode_case(75),
    "key vectors": key_vector_case("bfloat16", None),
    "key vectors in slabs": key_vector_case("int16", BlockSizes(128, slab=4), " key_vector_read"),
    "depth": depth_case(vectors, (D,), (LONG,), 5, S, 4),
    "depth of matrices": depth_case(matrices, (K, V), (B, 300), 4, S, 3),
    "depth of matrices with a read": (
        lambda given: CALLS["depth_attention_merge_read"].run("pallas", given),
        [longer("depth_attention_merge_read")],
        QUICK["depth_attention_merge_read"],
    ),
}


@pytest.mark.parametrize("chip", [None, ONE_CORE])
@pytest.mark.parametrize("name", CASES)
def test_cases(name, chip):
    function, args, names = CASES[name]
    with lowering_for(chip) if chip else contextlib.nullcontext():
        check(function, args, names)
