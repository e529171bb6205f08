"""The gated delta rule: in chunks against the recurrence, token by token in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import UnsupportedImplementation, delta_attention, delta_step
from pallas_kernels.delta_attention import mosaic_tpu, reference
from pallas_kernels.delta_attention.interface import DeltaOperands, chunk_size
from rmt_tpu.estimator import lower
from tests.closeness import assert_close, float64
from tests.tiers import later
from tests.tpu import device_of

# A row each: as models begin, no decay, the strongest of bounded gates, gates far beyond what
# float32 can hold as a product, and a few entries that are forgotten at once.
GATES = {
    "begin": lambda rng, shape: -16 * rng.uniform(0.001, 0.1, shape),
    "none": lambda rng, shape: np.zeros(shape),
    "strong": lambda rng, shape: np.full(shape, -5.0),
    "extreme": lambda rng, shape: -np.exp(rng.uniform(-5, 6, shape)),
    "spike": lambda rng, shape: np.where(rng.uniform(size=shape) < 0.05, -1e4, -0.1),
}
SCALE, SEQ, HEADS, KEYS, VALUES = 0.3, 70, 2, 4, 3
NAMES = ("q", "k", "v", "log_decay", "beta", "state")


def arguments(alike=False, seq=SEQ, keys=KEYS, values=VALUES, heads=HEADS):
    rng = np.random.default_rng(0)
    shape = (len(GATES), seq, heads)
    q, k = (rng.normal(size=(*shape, keys)) for _ in range(2))
    if alike:
        k = 1 + 0.3 * k
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, beta = rng.normal(size=(*shape, values)), rng.uniform(size=shape)
    log_decay = np.stack([gate(rng, (*shape[1:], keys)) for gate in GATES.values()])
    state = rng.normal(size=(len(GATES), heads, keys, values))
    return q, k, v, log_decay, beta, state


def segments():
    """Documents of any length; the last begins in the second chunk."""
    ids = np.sort(np.random.default_rng(1).integers(0, 5, (len(GATES), SEQ)), axis=1)
    ids[:, 67:] = 9
    return ids.astype(np.int32)


def recurrence(q, k, v, log_decay, beta, state, ids):
    """`o` and the last state, a token after the other; complex where an argument is."""
    read, state = [], state + 0 * (q + k)[:, 0, :, :, None] * (v + beta[..., None])[:, 0, :, None]
    for t in range(q.shape[1]):
        if t:
            state = np.where((ids[:, t] == ids[:, t - 1])[:, None, None, None], state, 0)
        state = np.exp(log_decay[:, t])[..., None] * state
        missing = v[:, t] - np.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + np.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], missing)
        read.append(SCALE * np.einsum("bhk,bhkv->bhv", q[:, t], state))
    return np.stack(read, axis=1), state


@jax.jit
def run(arguments, ids):
    return delta_attention(*arguments, scale=SCALE, segment_ids=ids)


@pytest.mark.slow
def test_chunks_are_the_recurrence_and_so_are_their_gradients():
    """In float64; every gradient against a complex step in a direction of its own."""
    with jax.enable_x64(True):
        given, ids = arguments(), segments()
        want = recurrence(*given, ids)
        assert_close(run(given, ids), want, 1e-11)
        rng = np.random.default_rng(2)
        weights = [rng.normal(size=x.shape) for x in want]
        _, pull_back = jax.jit(lambda args: jax.vjp(lambda args: run(args, ids), args))(given)
        (gradients,) = pull_back(tuple(weights))
        for n, (name, gradient) in enumerate(zip(NAMES, gradients, strict=True)):
            direction = rng.normal(size=given[n].shape)
            moved = [x + 1e-30j * direction if n == m else x for m, x in enumerate(given)]
            moved = recurrence(*moved, ids)
            exact = sum(np.sum(w * x.imag) for w, x in zip(weights, moved, strict=True)) / 1e-30
            got = np.sum(gradient * direction)
            assert abs(got - exact) <= 1e-10 * np.abs(gradient * direction).sum(), name


def test_narrow_numbers():
    """Of any gates: no sum of decays is a difference. bfloat16 rounds every operand."""
    given, ids = arguments(), segments()
    want, _ = recurrence(*given, ids)
    single = [np.float32(x) for x in given]
    read, state = run(single, ids)
    assert read.dtype == state.dtype == np.float32
    for row in range(len(GATES)):
        assert_close(read[row], want[row], 5e-6)
    half = [jnp.bfloat16(x) for x in single[:3]] + single[3:]
    read, state = run(half, ids)
    assert read.dtype == jnp.bfloat16 and state.dtype == np.float32
    assert_close(np.float32(read), want, 2e-2)


def test_no_token_depends_on_a_later_one():
    """Not even in the last bit: whatever follows token 37."""
    given = [np.float32(x) for x in arguments()]
    other = [np.float32(x) for x in arguments(alike=True)]
    pairs = zip(given[:5], other[:5], strict=True)
    mixed = [np.concatenate([x[:, :38], 3 * y[:, 38:]], axis=1) for x, y in pairs]
    ids = np.zeros((len(GATES), SEQ), np.int32)
    first, _ = run(given, ids)
    second, _ = run([*mixed, given[5]], ids)
    np.testing.assert_array_equal(first[:, :38], second[:, :38])
    assert np.abs(first[:, 38:] - second[:, 38:]).max() > 0.1


def test_keys_that_are_alike():
    """With beta 1 and no decay: powers of their products would leave nothing right."""
    q, k, v, log_decay, _, state = arguments(alike=True)
    given = (q, k, v, 0 * log_decay, np.ones(k.shape[:3]), state)
    ids = np.zeros((len(GATES), SEQ), np.int32)
    want, _ = recurrence(*given, ids)
    read, _ = run([np.float32(x) for x in given], ids)
    assert_close(read, want, 1e-5)


@pytest.mark.slow
def test_a_state_goes_on_by_parts_and_token_by_token():
    given = [jnp.float32(x) for x in arguments()]
    whole, last = delta_attention(*given, scale=SCALE)
    *of_tokens, state = given
    first, state = delta_attention(*(x[:, :33] for x in of_tokens), state, scale=SCALE)
    second, state = delta_attention(*(x[:, 33:69] for x in of_tokens), state, scale=SCALE)
    third, state = delta_step(*(x[:, 69] for x in of_tokens), state, scale=SCALE)
    parts = np.concatenate([first, second, third[:, None]], axis=1)
    assert_close(parts, whole, 5e-6)
    assert_close(state, last, 5e-6)
    nothing = [x[:, :0] for x in of_tokens]
    read, same = delta_attention(*nothing, given[5], scale=SCALE)
    assert read.shape == (len(GATES), 0, HEADS, VALUES)
    np.testing.assert_array_equal(same, given[5])


def test_a_memory_of_orthogonal_keys():
    """Each value is found again under its key, and tokens without beta and decay change nothing."""
    keys = np.broadcast_to(np.eye(KEYS)[None, :, None], (1, KEYS, HEADS, KEYS))
    values = np.random.default_rng(0).normal(size=(1, KEYS, HEADS, VALUES))
    keys, values, beta = jnp.float32(keys), jnp.float32(values), jnp.ones((1, KEYS, HEADS))
    read, state = delta_attention(keys, keys, values, 0 * keys, beta, scale=0.5)
    np.testing.assert_array_equal(read, 0.5 * values)
    beta = 0 * beta
    _, same = delta_attention(keys, keys, values, 0 * keys, beta, state, scale=0.5)
    np.testing.assert_array_equal(same, state)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"k": np.zeros((1, 4, 2, 3))}, "k has shape .1, 4, 2, 3., .* shape .1, 4, 2, 5."),
        ({"beta": np.zeros((1, 4))}, "beta .batch, seq, heads. must be an array .* 3 axes"),
        ({"state": np.zeros((1, 2, 3, 5))}, "state has shape .1, 2, 3, 5., .* shape .1, 2, 5, 3."),
        ({"segment_ids": np.zeros((1, 3), np.int32)}, "segment_ids has shape .1, 3., .* .1, 4."),
    ],
)
def test_what_does_not_fit_is_named(changes, message, unannotated):
    shapes = {"q": 5, "k": 5, "v": 3, "log_decay": 5}
    given = {name: np.zeros((1, 4, 2, size)) for name, size in shapes.items()}
    given |= {"beta": np.zeros((1, 4, 2))}
    with pytest.raises(ValueError, match=message):
        delta_attention(**given | changes, scale=1.0)


def test_values_may_be_empty():
    q, k, v, log_decay, beta, _ = map(np.float32, arguments())
    op = lambda *x: delta_attention(*x, scale=SCALE)
    read, state = jax.eval_shape(op, q, k, v[..., :0], log_decay, beta)
    assert (read.shape, state.shape) == ((*q.shape[:3], 0), (len(GATES), HEADS, KEYS, 0))


def test_an_unknown_implementation_is_named(unannotated):
    given = [np.float32(x) for x in arguments()]
    with pytest.raises(UnsupportedImplementation, match="'triton' is unknown; legal: xla"):
        delta_attention(*given, scale=SCALE, implementation="triton")


# The kernels -----------------------------------------------------------------------------------

# Their programs are compiled once a worker.
SHARED = pytest.mark.xdist_group("kernels of delta attention")
# Two chunks, the second in part; of the smallest heads that they serve.
WIDE = {"seq": 150, "keys": 128, "values": 128}
# Of the largest value: sums in float32, or of operands rounded to bfloat16.
TOLERANCE = {"float32": 5e-6, "bfloat16": 1e-2}


def documents():
    """One in a row, one a chunk, one that goes on in the second chunk, and many."""
    ids = np.zeros((len(GATES), WIDE["seq"]), np.int32)
    ids[0, 128:] = 1
    ids[2, 100:] = 1
    ids[3] = np.arange(WIDE["seq"]) // 7
    ids[4, 37:], ids[4, 140:] = 1, 2
    return ids


@functools.partial(jax.jit, static_argnames="backward")
def run_kernels(arguments, ids, d_read, d_state, backward=True):
    """What is read, the state, and the gradients of all arguments."""
    *operands, state = arguments
    operands = DeltaOperands(*operands, ids)
    read, after, states = mosaic_tpu.forward(operands, state, scale=SCALE, interpret=True)
    if not backward:
        return read, after, ()
    given = (operands, states, d_read, d_state)
    return read, after, tuple(mosaic_tpu.backward(*given, scale=SCALE, interpret=True))


def in_dtype(arguments, dtype):
    """The operands in it, what is summed in float32."""
    return [jnp.asarray(x, dtype if n < 3 else "float32") for n, x in enumerate(arguments)]


@jax.jit
def gradients_by_token(arguments, ids, cotangents):
    by_token = lambda *x: reference.delta_attention(*x, scale=SCALE, segment_ids=ids)
    return jax.vjp(by_token, *arguments)[1](cotangents)


def check_kernels(given, ids, dtype):
    """Values and gradients of every row, each relative to its own largest."""
    given, ids = in_dtype(given, dtype), jnp.asarray(ids)
    exact = [np.asarray(x, np.float64) for x in given]
    want = recurrence(*exact, ids)
    rng = np.random.default_rng(2)
    d_read, d_state = (rng.normal(size=x.shape) for x in want)
    d_read = np.asarray(jnp.asarray(d_read, dtype), np.float64)
    read, state, gradients = run_kernels(
        given, ids, jnp.asarray(d_read, dtype), jnp.float32(d_state)
    )
    assert read.dtype == dtype and state.dtype == np.float32
    assert [x.dtype for x in gradients] == [x.dtype for x in given]
    with jax.enable_x64(True):
        of_inputs = gradients_by_token([jnp.asarray(x) for x in exact], ids, (d_read, d_state))
    for row in range(len(ids)):
        of_row = lambda tree, row=row: float64(jax.tree.map(lambda x: x[row], tree))
        got, wanted = of_row((read, state, gradients)), of_row((*want, of_inputs))
        assert_close(got, wanted, TOLERANCE[dtype])


@SHARED
@pytest.mark.parametrize("dtype", ["float32", *later("bfloat16")])
def test_kernels_are_the_recurrence_and_its_gradient(dtype):
    """Of every gate, with documents that end in a chunk, between two, and of a few tokens."""
    check_kernels(arguments(**WIDE), documents(), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [9, 18])
def test_heads_in_groups_that_are_no_power_of_two(heads):
    """9 at a time forward; backward 3 of 9, and 6 of 18."""
    given = arguments(**WIDE, heads=heads)
    check_kernels([x[:1] for x in given], documents()[:1], "float32")


@SHARED
def test_no_token_of_the_kernels_depends_on_a_later_one():
    """As above; nor the gradient of a token on one that nothing is asked of."""
    given, other = (list(map(np.float32, arguments(alike, **WIDE))) for alike in (False, True))
    mixed = [
        np.concatenate([x[:, :138], 3 * y[:, 138:]], 1) for x, y in zip(given, other, strict=True)
    ]
    ids = np.zeros((len(GATES), WIDE["seq"]), np.int32)
    d_read = np.float32(np.random.default_rng(2).normal(size=given[2].shape))
    d_read[:, 138:] = 0
    zeros = np.zeros_like(given[5])
    *first, _, d_first = run_kernels(given, ids, d_read, zeros)
    *second, _, d_second = run_kernels([*mixed[:5], given[5]], ids, d_read, zeros)
    first, second = jax.tree.map(np.asarray, ((*first, *d_first[:5]), (*second, *d_second[:5])))
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(x[:, :138], y[:, :138])
    assert np.abs((first[0] - second[0])[:, 138:]).max() > 0.1


def test_keys_that_are_alike_in_the_kernels():
    """In bfloat16: the inverse alone would be off by half a percent."""
    q, k, v, log_decay, _, state = arguments(alike=True, **WIDE)
    ids = np.zeros((len(GATES), WIDE["seq"]), np.int32)
    given = (q, k, v, 0 * log_decay, np.ones(k.shape[:3]), state)
    given = in_dtype([x[:1] for x in given], "bfloat16")
    want, _ = recurrence(*(np.asarray(x, np.float64) for x in given), ids[:1])
    read, *_ = run_kernels(given, ids[:1], None, None, backward=False)
    assert_close(read, want, 1e-2)


def test_what_the_kernels_do_not_serve_is_said(unannotated):
    given = [np.float32(x) for x in arguments()]
    with pytest.raises(UnsupportedImplementation, match="heads of K=4 and V=3"):
        delta_attention(*given, scale=SCALE, implementation="mosaic_tpu")


@pytest.mark.compile
@pytest.mark.parametrize(
    "topology, implementation, dtype, heads",
    [
        ("v5e:2x2", "xla", "bfloat16", 4),
        ("v6e:2x2", "xla", "bfloat16", 4),
        ("v4:2x2x1", "mosaic_tpu", "bfloat16", 32),
        ("v4:2x2x1", "mosaic_tpu", "float32", 16),
        ("v5e:2x2", "mosaic_tpu", "bfloat16", 4),
        ("v5e:2x2", "mosaic_tpu", "float32", 16),
        ("v5p:2x2x1", "mosaic_tpu", "bfloat16", 4),
        ("v6e:2x2", "mosaic_tpu", "bfloat16", 4),
        ("tpu7x:2x2x1", "mosaic_tpu", "bfloat16", 4),
    ],
)
def test_both_passes_compile_for_tpus(topology, implementation, dtype, heads):
    """Compile heads of the paper's size; only states take memory beside the operands.

    The cases with more than 4 heads have too many for the VMEM of one grid step.
    """
    shape = (1, 1024, heads, 128)
    operands = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))] * 3
    operands += [jax.ShapeDtypeStruct(shape, jnp.float32)]
    operands += [jax.ShapeDtypeStruct(shape[:3], jnp.float32)]

    def loss(*args):
        read, _ = delta_attention(*args, scale=0.1, implementation=implementation)
        return jnp.sum(read.astype(jnp.float32) ** 2)

    program = lower(jax.grad(loss, range(5)), operands, device_of(topology)).compile()
    kernels = program.as_text().count('custom_call_target="tpu_custom_call"')
    assert kernels == (2 if implementation == "mosaic_tpu" else 0)
    of_states = 1024 // chunk_size(128) * heads * 128 * 128 * 4
    of_arguments = sum(x.size * x.dtype.itemsize for x in operands)
    assert program.memory_analysis().temp_size_in_bytes < of_states + 4 * of_arguments
