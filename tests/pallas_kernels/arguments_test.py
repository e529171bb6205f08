"""What the ops say of arguments that do not fit, and which derivatives they have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import UnsupportedImplementation
from pallas_kernels.causal_attention import reference
from pallas_kernels.platform import collecting_calls
from tests import cuda
from tests.tiers import later

B, N, K, V, R, P = 2, 3, 4, 5, 2, 6


def ones(shape, dtype=np.float32):
    """Of NumPy: they are made while tests are collected, and JAX would compile a program."""
    return np.ones(shape, dtype)


def site(**changes):
    """Arguments of `store_norm_retrieve`."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jax.device_put(np.float32(rng.normal(size=shape)))
    arrays = {
        "residual": draw(B, N, K, V),
        "store_keys": draw(R, K),
        "data": draw(B, N, R, V),
        "gain": draw(K, V),
        "read_keys": draw(P, K),
    }
    return arrays | changes


def bank(**changes):
    """Arguments of `depth_attention`."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jax.device_put(np.float32(rng.normal(size=shape)))
    return {"query": draw(8), "sources": draw(3, B, N, 8)} | changes


@pytest.mark.parametrize("dtype", ["int32", "int8", "bool", "complex64"])
@pytest.mark.parametrize(
    "name, axes", [("residual", "..., K, V"), ("data", "..., R, V"), ("read_keys", "P, K")]
)
def test_key_vector_ops_take_floats(name, axes, dtype, unannotated):
    arrays = site()
    with pytest.raises(ValueError, match=rf"{name} \[{axes}\] must be .* floats.*but is {dtype}"):
        pallas_kernels.store_norm_retrieve(**arrays | {name: arrays[name].astype(dtype)})


def test_an_int16_residual_is_legal_and_int16_data_are_not(unannotated):
    fixed = site(residual=jnp.zeros((B, N, K, V), jnp.int16))
    stored, _ = jax.eval_shape(lambda x: pallas_kernels.store_norm_retrieve(**x), fixed)
    assert stored.dtype == jnp.int16
    with pytest.raises(ValueError, match=r"data .* must be an array of floats, but is int16"):
        pallas_kernels.store_norm_retrieve(**site(data=jnp.zeros((B, N, R, V), jnp.int16)))


@pytest.mark.parametrize("op", ["store", "norm_retrieve", "store_norm_retrieve"])
def test_an_int16_residual_has_no_derivatives(op):
    """`jax.grad` would take its cotangent for zero."""
    names = {"store": ("store_keys", "data"), "norm_retrieve": ("gain", "read_keys")}
    arrays = site(residual=jnp.zeros((B, N, K, V), jnp.int16))
    arrays = {name: arrays[name] for name in ("residual", *names.get(op, arrays))}
    floats = {name: x for name, x in arrays.items() if name != "residual"}
    options = {"dtype": "float32"} if op == "norm_retrieve" else {}

    def loss(floats):
        out = getattr(pallas_kernels, op)(**arrays | floats, **options)
        return sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(out))

    with pytest.raises(pallas_kernels.UnsupportedImplementation, match="dtype int16, which jax.gr"):
        jax.eval_shape(jax.grad(loss), floats)


def test_what_is_read_of_an_int16_residual_needs_a_dtype_of_floats():
    op, (_, _, _, gain, r) = pallas_kernels.norm_retrieve, site().values()
    fixed = jnp.zeros((B, N, K, V), jnp.int16)
    assert jax.eval_shape(lambda x: op(x, gain, r, dtype="bfloat16"), fixed).dtype == jnp.bfloat16
    for options in ({}, {"dtype": jnp.int16}):
        with pytest.raises(ValueError, match="dtype=int16 of retrieved vectors is not legal; leg"):
            op(fixed, gain, r, **options)
    with pytest.raises(ValueError, match="dtype=float8_e4m3fn of .* legal: floats of 16 bits or m"):
        op(fixed, gain, r, dtype=jnp.float8_e4m3fn)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"read_keys": ones(K)}, r"read_keys \[P, K\] .* with 2 axes, but has shape \(4,\)"),
        ({"store_keys": ones(K)}, r"store_keys \[R, K\] .* 2 axes, but has shape \(4,\)"),
        ({"gain": ones((1, K, V))}, r"gain \[K, V\] .* 2 axes, but has shape \(1, 4, 5\)"),
        ({"residual": ones(V)}, r"residual \[\.\.\., K, V\] .* at least 2 axes"),
        ({"data": [1.0]}, r"data \[\.\.\., R, V\] must be an array of floats, but is a list"),
        ({"gain": ones((K, V + 1))}, r"shapes do not fit: .* gain \[K, V\] has shape \(4, 6\)"),
        ({"read_keys": ones((P, K - 1))}, r"do not fit: .* read_keys \[P, K\] have .* \(6, 3\)"),
        ({"store_keys": ones((R, K - 1))}, r"do not fit: .* store_keys \[R, K\] .* \(2, 3\)"),
        ({"data": ones((B, N, R, V - 1))}, r"do not fit: .* data .* has shape \(2, 3, 2, 4\)"),
        ({"epsilon": -100}, "epsilon=-100 must be a finite number, at least 0"),
        ({"epsilon": float("nan")}, "epsilon=nan must be a finite number"),
        ({"epsilon": "1e-6"}, "epsilon='1e-6' must be a finite number"),
        (
            {"epsilon": jnp.float32(1)},
            "epsilon must be a Python number, not an array or a traced value",
        ),
        (
            {"gain": jax.ShapeDtypeStruct((K, V), np.float32)},
            r"is a ShapeDtypeStruct; use jax.eval_shape\(op",
        ),
        ({"data": ones((B, N, R, V), "float8_e4m3fn")}, "float8_e4m3fn; legal: floats of 16 bits"),
        ({"gain": ones((K, V), "float8_e5m2")}, "float8_e5m2; legal: floats of 16 bits or more"),
    ],
)
def test_key_vector_ops_name_what_does_not_fit(changes, message, unannotated):
    with pytest.raises(ValueError, match=message):
        pallas_kernels.store_norm_retrieve(**site(**changes))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"query": ones((1, 8))}, r"query \[D\] .* with 1 axis, but has shape \(1, 8\)"),
        ({"query": ones(7)}, r"shapes do not fit: queries \[S, D\] have shape \(1, 7\)"),
        ({"gain": ones(7)}, r"query \[D\] has shape \(8,\), but gain \[D\] has shape \(7,\)"),
        ({"gain": ones((3, 8))}, r"gain \[D\] .* with 1 axis, but has shape \(3, 8\)"),
        ({"sources": ones((3, B, N, 8), np.int32)}, "sources .* floats, but is int32"),
        ({"sources": ones((0, B, N, 8))}, "legal: N of at least 1"),
        ({"count": 2.5}, "count=2.5 must be an integer"),
        ({"count": ones((2,), np.int32)}, "count=.* must be an integer"),
        ({"count": 4}, "count=4 must be from 0 to the number of sources, 3"),
        ({"count": np.int64(7)}, "count=7 must be from 0 to the number of sources, 3"),
        ({"epsilon": -1e-6}, "epsilon=-1e-06 must be a finite number"),
        (
            {"prior": (ones((B, 8)), ones((B,)))},
            r"the two arrays of prior have shapes \(1, 2, 8\) and \(1, 2\)",
        ),
    ],
)
def test_depth_attention_names_what_does_not_fit(changes, message, unannotated):
    with pytest.raises(ValueError, match=message):
        pallas_kernels.depth_attention(**bank(**changes))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"query": ones(7)}, r"query \[D\] has shape \(7,\)"),
        ({"norm_gain": ones((1, 8))}, r"norm_gain \[D\] .* 1 axis"),
        ({"mixed": ones((2, 4, 8))}, r"mixed \[S, \.\.\., D\] has shape \(2, 4, 8\)"),
        ({"norm_epsilon": -1}, "norm_epsilon=-1"),
        ({"norm": "batch"}, "norm='batch' is unknown; legal: layernorm, rmsnorm"),
    ],
)
def test_merging_names_what_does_not_fit(changes, message, unannotated):
    arrays = {"mixed": jnp.ones((2, N, 8)), "log_sums": jnp.ones(N), "current": jnp.ones((N, 8))}
    arrays |= {"query": jnp.ones(8), "norm_gain": jnp.ones(8), "site": 0}
    with pytest.raises(ValueError, match=message):
        pallas_kernels.depth_attention_merge(**arrays | changes)


@pytest.mark.parametrize("dtype", ["int32", "float8_e4m3fn"])
def test_what_is_read_of_a_mix_needs_a_dtype_of_floats(dtype, unannotated):
    rows = ones((2, B, N, K, V)), ones((B, N)), 0, ones((B, N, K, V))
    with pytest.raises(ValueError, match=f"dtype={dtype} of retrieved vectors is not legal; legal"):
        pallas_kernels.depth_attention_merge_read(
            *rows, ones((K, V)), ones((K, V)), ones((P, K)), dtype=dtype
        )


@pytest.mark.parametrize(
    "shape, message",
    [
        ((3, 1, 8), r"parameters \[L, 2, D\] have shape \(3, 1, 8\); legal: L of at least 1, and"),
        (
            (3, 2, 7),
            r"current \[\.\.\., D\] has shape \(3, 8\), but parameters \[L, 2, D\] have sha",
        ),
        ((0, 2, 8), r"parameters \[L, 2, D\] have shape \(0, 2, 8\)"),
        ((3, 8), r"parameters \[L, 2, D\] must be an array of floats with 3 axes"),
    ],
)
def test_merging_at_a_layer_names_parameters_that_do_not_fit(shape, message, unannotated):
    with pytest.raises(ValueError, match=message):
        pallas_kernels.depth_attention_merge_at(
            0, ones(shape), ones((2, 3, 8)), ones((2, 3)), 0, ones((3, 8))
        )


def test_causal_attention_names_what_does_not_fit(unannotated):
    with pytest.raises(ValueError, match=r"qkv \[B, N, 3 H, D\] has shape \(1, 4, 5, 8\)"):
        pallas_kernels.causal_attention(jnp.ones((1, 4, 5, 8)), scale=1.0)
    with pytest.raises(ValueError, match=r"slopes \[H\] have shape \(3,\)"):
        pallas_kernels.causal_attention(jnp.ones((1, 4, 6, 8)), scale=1.0, slopes=jnp.ones(3))
    with pytest.raises(
        UnsupportedImplementation, match="legal: xla, mosaic_tpu, cudnn, pallas, or "
    ):
        pallas_kernels.causal_attention(jnp.ones((1, 4, 6, 8)), scale=1.0, implementation="triton")


QKV, KV = ones((2, 4, 6, 8)), ones((2, 4, 2, 8))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"window": 2.5}, "window=2.5 must be an integer, at least 1, or None"),
        ({"window": True}, "window=True must be an integer, at least 1, or None"),
        ({"kv_heads": 2.0}, "kv_heads=2.0 must be an integer, or None"),
        ({"segment_ids": ones((2, 4), bool)}, "segment_ids is bool; legal: an integer dtype"),
        ({"segment_ids": ones((2, 4))}, "segment_ids is float32; legal: an integer dtype"),
        ({"kv": (KV, ones(KV.shape, "float16"))}, "queries are float32, keys float32 and values f"),
        ({"kv": (ones(KV.shape, "float16"),) * 2}, "keys float16 and values float16; legal: the s"),
    ],
)
def test_attention_takes_no_number_for_another(changes, message, unannotated):
    with pytest.raises(ValueError, match=message):
        pallas_kernels.causal_attention(QKV, scale=1.0, **changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"before": ones((2, 5, 2, 8))},
            r"before \[B, K, 2 G, D\] has shape .*; legal: B=2, G=2 a",
        ),
        ({"before": ones((2, 5, 6, 8))}, r"has shape \(2, 5, 6, 8\); legal: B=2, G=2 and D=8, as"),
        ({"before": ones((2, 5, 4, 7))}, "G=2 and D=8"),
        ({"before": ones((2, 5, 4, 8), np.int32)}, "before .* floats, but is int32"),
        ({"filled": ones(2)}, r"filled is float32\[2\]; legal: 2 integers, one per row"),
        ({"filled": ones(3, np.int32)}, r"filled is int32\[3\]; legal: 2 integers"),
        ({"window": 1.0}, "window=1.0 must be an integer"),
    ],
)
def test_attention_after_a_cache_names_what_does_not_fit(changes, message, unannotated):
    given = {"qkv": QKV, "before": ones((2, 5, 4, 8)), "filled": ones(2, np.int32)}
    with pytest.raises(ValueError, match=message):
        pallas_kernels.attention_after(**given | changes, scale=1.0)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"before": ones((2, 5, 0, 8))},
            r"before \[B, K, 2 G, D\] has \(2, 5, 0, 8\); legal: .* G",
        ),
        ({"before": ones((2, 5, 1, 8))}, r"has \(2, 5, 1, 8\); legal: the same B and D, and a num"),
        ({"before": ones((2, 5, 2, 7))}, "legal: the same B and D"),
        ({"before": (KV, KV[:, :3])}, r"has \(2, 4, 2, 8\) and \(2, 3, 2, 8\); legal"),
        ({"seen": ones((2, 4), bool)}, r"seen is bool\[2, 4\]; legal: bool\[2, 5\], for every row"),
        ({"seen": ones((2, 5), np.int32)}, r"seen is int32\[2, 5\]; legal: bool"),
    ],
)
def test_attention_to_a_part_names_what_does_not_fit(changes, message, unannotated):
    given = {"q": KV, "before": ones((2, 5, 4, 8)), "seen": ones((2, 5), bool)}
    with pytest.raises(ValueError, match=message):
        pallas_kernels.attention_to(**given | changes, scale=1.0)


def test_what_is_filled_may_be_of_any_integers(unannotated):
    """Unsigned ones have no place before the first, where a window may begin."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    new, before, filled = draw(2, 3, 3, 8), draw(2, 40, 2, 8), np.array([5, 40])

    @jax.jit
    def attend(*filled):
        op = pallas_kernels.attention_after
        return [op(new, before, x, scale=0.3, window=9) for x in filled]

    narrow, wide = attend(filled.astype(np.uint8), filled.astype(np.int32))
    np.testing.assert_array_equal(narrow, wide)


def test_segments_of_any_integers_are_int32_to_kernels():
    """Mosaic compares no narrower ones."""
    attend = lambda qkv, ids: pallas_kernels.causal_attention(qkv, scale=1.0, segment_ids=ids)
    with collecting_calls() as calls:
        jax.eval_shape(attend, ones((2, 128, 6, 8)), ones((2, 128), np.int8))
    assert [call.args[0].segment_ids.dtype for call in calls] == [jnp.int32]


def test_an_epsilon_of_0_beside_zeros_is_no_division_by_them():
    given = site(residual=jnp.zeros((B, N, K, V)), data=jnp.zeros((B, N, R, V)))

    def read(given):
        _, retrieved = pallas_kernels.store_norm_retrieve(**given, epsilon=0)
        return jnp.sum(retrieved)

    def mixed(sources):
        return jnp.sum(pallas_kernels.depth_attention(bank()["query"], sources, epsilon=0))

    found = jax.jit(jax.value_and_grad(read))(given)
    found += jax.jit(jax.value_and_grad(mixed))(jnp.zeros_like(bank()["sources"]))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


def test_an_empty_batch_is_served_forward_and_backward():
    none = {name: x[:0] for name, x in site().items() if name in ("residual", "data")}
    stored, read = jax.jit(lambda x: pallas_kernels.store_norm_retrieve(**x))(site(**none))
    assert stored.shape == (0, N, K, V) and read.shape == (0, N, P, V)
    after = lambda *x: pallas_kernels.attention_after(*x, scale=1.0)
    given = ones((0, 4, 6, 8)), ones((0, 5, 4, 8)), ones(0, np.int32)
    assert jax.eval_shape(after, *given).shape == (0, 4, 2, 8)

    def mixed(query, sources):
        h = pallas_kernels.depth_attention(query, sources)
        current = h + 1
        options = dict(mixed=h[None], log_sums=h[..., 0], site=0, current=current, query=query)
        _, _, z = pallas_kernels.depth_attention_merge(norm_gain=query, **options)
        assert z.shape == (0, N, 8)
        return jnp.sum(z)

    query, sources = bank()["query"], bank()["sources"][:, :0]
    gradients = jax.jit(jax.grad(mixed, argnums=(0, 1)))(query, sources)
    assert not gradients[0].any() and gradients[1].shape == sources.shape


def norm_retrieve(gain, implementation=None):
    X, w, y, _, r = site().values()
    return pallas_kernels.store_norm_retrieve(X, w, y, gain, r, implementation=implementation)[1]


def depth_attention(query, implementation=None):
    return pallas_kernels.depth_attention(query, bank()["sources"], implementation=implementation)


def causal_attention(qkv, implementation=None):
    return pallas_kernels.causal_attention(qkv, scale=0.5, implementation=implementation)


OPS = {
    norm_retrieve: site()["gain"],
    depth_attention: bank()["query"],
    causal_attention: jax.device_put(
        np.float32(np.random.default_rng(1).normal(size=(1, 3, 6, 2)))
    ),
}


@pytest.mark.parametrize("op", [norm_retrieve, *later(depth_attention), causal_attention])
def test_derivatives_but_one_in_reverse_mode_are_refused_in_a_line(op):
    x, loss = OPS[op], lambda x: jnp.sum(jnp.sin(op(x)))
    twice = lambda x: jnp.sum(jax.grad(loss)(x) ** 2)
    with pytest.raises(TypeError, match="in reverse mode only; legal: .* jax.jvp, jax.jacfwd"):
        jax.jvp(loss, (x,), (x,))
    for again in (jax.grad(twice), jax.jit(jax.grad(jax.jit(twice)))):
        with pytest.raises(
            TypeError, match="legal: one derivative in reverse mode .* implementation='xla'"
        ):
            again(x)


@pytest.mark.parametrize("op", OPS)
def test_plain_jax_can_be_differentiated_twice(op):
    x = OPS[op]
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(op(x, "xla")))))
    direction = jnp.asarray(np.random.default_rng(2).normal(size=x.shape), jnp.float32)
    second = jax.jit(jax.grad(lambda x: jnp.sum(gradient(x) * direction)))(x)
    # Along the direction, by central differences: float32 is good for about four digits.
    step = 1e-2
    near = (gradient(x + step * direction) - gradient(x - step * direction)) / (2 * step)
    np.testing.assert_allclose(second, near, atol=2e-3 * float(jnp.abs(near).max()))


@pytest.mark.parametrize("implementation, device", [("triton", "cuda"), ("mosaic_tpu", "tpu")])
def test_a_named_kernel_is_lowered_for_its_own_platform_alone(implementation, device):
    shape = {"residual": (1, 128, 16, 8), "store_keys": (2, 16), "data": (1, 128, 2, 8)}
    shape |= {"gain": (16, 8), "read_keys": (3, 16)}
    arrays = [jnp.ones(size) for size in shape.values()]
    op = lambda *a: pallas_kernels.store_norm_retrieve(*a, implementation=implementation)
    message = (
        f"implementation='{implementation}' runs on {device} only, but the program is compiled "
        "for cpu"
    )
    for run in (op, jax.jit(op)):
        with pytest.raises(UnsupportedImplementation, match=message):
            run(*arrays)
    if device == "cuda":
        assert "triton" in cuda.lowered(op, *arrays)
    else:
        program = jax.jit(op).trace(*arrays).lower(lowering_platforms=("tpu",)).as_text()
        assert "tpu_custom_call" in program


def test_a_prime_length_takes_whole_blocks_and_a_filled_one(monkeypatch):
    rng = np.random.default_rng(0)
    qkv = jnp.asarray(rng.normal(size=(2, 13, 6, 4)), jnp.float32)
    options = dict(
        slopes=jnp.asarray([0.3, -2.0]), segment_ids=jnp.asarray([[1] * 7 + [2] * 6] * 2)
    )

    def both(qkv):  # a function of its own each time: traces are cached by it
        op = lambda qkv: pallas_kernels.causal_attention(qkv, scale=0.5, **options)
        out, pullback = jax.vjp(op, qkv)
        return out, pullback(jnp.cos(out))[0]

    whole = jax.jit(lambda qkv: both(qkv))(qkv)
    monkeypatch.setattr(reference, "QUERIES", 5)
    in_blocks = jax.jit(lambda qkv: both(qkv))
    assert "length=3" in str(jax.make_jaxpr(in_blocks)(qkv))
    for got, expected in zip(in_blocks(qkv), whole, strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-6)


def test_a_former_name_says_the_present_one():
    for old, new in pallas_kernels._RENAMED.items():
        assert new in pallas_kernels.__all__
        with pytest.raises(AttributeError, match=f"no attribute '{old}'; it is called {new} now$"):
            getattr(pallas_kernels, old)
    with pytest.raises(AttributeError, match="no attribute 'stor'$"):
        _ = pallas_kernels.stor
