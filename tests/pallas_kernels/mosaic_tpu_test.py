"""The key-vector kernels for TPU: interpreted on a CPU against float64 NumPy, and compiled."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from pallas_kernels.key_vector import mosaic_tpu
from pallas_kernels.key_vector.block_sizes import BlockSizes, Sizes, choose_block_sizes
from pallas_kernels.key_vector.interface import FRACTION_BITS, Statistics
from tests.closeness import assert_close, float64
from tests.pallas_kernels import plain
from tests.pallas_kernels.halves import Halves
from tests.pallas_kernels.plain import numbers

tpu = Halves(mosaic_tpu)

# Many tests run the programs of a few cases.
SHARED = pytest.mark.xdist_group("key-vector kernels for TPU")

EPSILON = 1e-6
# Largest error relative to the largest value, by dtype of the data: every operand of a bfloat16
# product is rounded to 2^-9, float32 sums of up to 10^5 terms are off by some units of 2^-24.
TOLERANCE = {"bfloat16": 1e-2, "float32": 3e-6}
# An int16 residual is itself known to half a step of 2^-9, at values of about 4; its float32
# gradients come from what is stored, and the cotangent of the residual is bfloat16.
INT16_TOLERANCE = 5e-3


class Case(NamedTuple):
    B: int
    N: int
    K: int
    V: int
    R: int
    P: int
    residual: str
    data: str
    norm: str
    blocks: BlockSizes | None = None

    @property
    def cotangent(self):
        return "bfloat16" if self.residual == "int16" else self.residual

    @property
    def tolerance(self):
        return max(
            TOLERANCE[self.data],
            TOLERANCE[self.cotangent],
            INT16_TOLERANCE if self.residual == "int16" else 0,
        )


SLABS = BlockSizes(128, slab=4, store_group=2, read_group=2)
# Each dtype of a residual and of data, each norm, slabs or not, and whole or ragged tiles; at night
# every pair of them.
QUICK = [
    Case(1, 300, 16, 8, 8, 12, "float32", "float32", "layernorm"),  # a ragged last tile
    # Tiles split over cores; more rows of what is retrieved than of data.
    Case(1, 256, 16, 8, 4, 20, "float32", "bfloat16", "rmsnorm", SLABS),
    Case(3, 200, 12, 6, 5, 7, "int16", "bfloat16", "rmsnorm"),  # rows of v never whole tiles
    Case(2, 256, 16, 8, 4, 12, "bfloat16", "bfloat16", "layernorm"),
]
CASES = [
    *QUICK,
    Case(1, 128, 16, 8, 4, 6, "int16", "float32", "layernorm", SLABS),
    Case(1, 200, 16, 8, 4, 12, "bfloat16", "float32", "rmsnorm", SLABS),
    Case(1, 300, 16, 8, 16, 48, "float32", "float32", "layernorm"),
    Case(2, 128, 16, 8, 4, 12, "int16", "float32", "layernorm", SLABS),
    Case(1, 600, 24, 6, 3, 9, "bfloat16", "bfloat16", "layernorm"),  # half-full bfloat16 tiles
    Case(1, 256, 16, 8, 4, 1, "float32", "bfloat16", "rmsnorm"),
    Case(3, 200, 12, 6, 5, 7, "int16", "bfloat16", "layernorm"),
    Case(1, 128, 8, 8, 8, 8, "bfloat16", "bfloat16", "rmsnorm"),
    Case(1, 200, 16, 8, 4, 12, "bfloat16", "float32", "layernorm", SLABS),
    Case(1, 128, 16, 8, 4, 12, "int16", "bfloat16", "rmsnorm", SLABS),
]


def arguments(case: Case, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda dtype, *size: rng.normal(size=size).astype(dtype)
    X = draw("float32", case.B, case.N, case.K, case.V)
    if case.residual == "int16":
        X = np.round(X * 2**FRACTION_BITS)
    return (
        X.astype(case.residual),
        draw("float32", case.R, case.K) / 4,
        draw(case.data, case.B, case.N, case.R, case.V),
        draw("float32", case.K, case.V),
        draw("float32", case.P, case.K),
    )


def cotangents_of(case: Case, seed=1):
    """Of the residual and of what is retrieved."""
    rng = np.random.default_rng(seed)
    draw = lambda dtype, *size: rng.normal(size=(case.B, case.N, *size)).astype(dtype)
    return draw(case.cotangent, case.K, case.V), draw(case.data, case.P, case.V)


@functools.partial(jax.jit, static_argnums=0)
def forward(case: Case, args):
    return tpu.store_norm_retrieve(
        *args, norm=case.norm, epsilon=EPSILON, block_sizes=case.blocks, interpret=True
    )


@functools.partial(jax.jit, static_argnums=0)
def backward(case: Case, stored, statistics, args, cotangents):
    """Of all, and the residual before."""
    return tpu.backward(
        *(stored, statistics, *args[1:], *cotangents),
        norm=case.norm,
        rebuild=True,
        block_sizes=case.blocks,
        interpret=True,
    )


def expected_of(case: Case, args, cotangents):
    """The residual and retrieved vectors, and gradients in the order of `args`."""
    return plain.site(args, cotangents, norm=case.norm, epsilon=EPSILON)


def name_of(c: Case):
    sizes = "x".join(map(str, c[:6]))
    return "-".join([c.residual, c.data, c.norm, sizes] + ["slabs"] * (c.blocks == SLABS))


def marked(case: Case):
    return pytest.param(case, id=name_of(case), marks=() if case in QUICK else pytest.mark.slow)


@SHARED
@pytest.mark.parametrize("case", [marked(c) for c in CASES])
def test_values_and_every_gradient_equal_numpy(case):
    args, cotangents = arguments(case), cotangents_of(case)
    stored, retrieved, statistics = forward(case, args)
    g = backward(case, stored, statistics, args, cotangents)
    assert stored.dtype == case.residual and retrieved.dtype == case.data
    assert g.residual.dtype == case.cotangent and g.data.dtype == case.data
    got = (numbers(stored), retrieved), (g.residual, g.store_keys, g.data, g.gain, g.read_keys)
    assert_close(got, expected_of(case, args, cotangents), case.tolerance)
    if case.residual == "int16":
        np.testing.assert_array_equal(g.rebuilt, args[0])
    else:
        assert_close(g.rebuilt, args[0], TOLERANCE[case.residual])


@SHARED
@pytest.mark.parametrize("case", [marked(QUICK[0]), marked(CASES[-2])])
def test_halves_are_the_whole(case):
    args = arguments(case)
    stored, retrieved, statistics = forward(case, args)
    half = functools.partial(tpu.store, block_sizes=case.blocks, interpret=True)
    np.testing.assert_array_equal(jax.jit(half)(*args[:3]), stored)
    read = functools.partial(
        tpu.norm_retrieve,
        norm=case.norm,
        epsilon=EPSILON,
        dtype=case.data,
        block_sizes=case.blocks,
        interpret=True,
    )
    got, read_statistics = jax.jit(read)(stored, *args[3:])
    np.testing.assert_allclose(got, retrieved, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(read_statistics.rstd, statistics.rstd, rtol=1e-6)


@SHARED
@pytest.mark.parametrize("case", [marked(QUICK[0]), marked(CASES[-2])])
def test_backward_halves_are_the_whole(case):
    args, (d_stored, d_retrieved) = arguments(case), cotangents_of(case)
    stored, _, statistics = forward(case, args)
    blocks = {"block_sizes": case.blocks, "interpret": True}

    @jax.jit
    def halves(stored, statistics, args, d_stored, d_retrieved):
        _, store_keys, data, gain, read_keys = args
        given = (stored, statistics, gain, read_keys, d_retrieved)
        d_X, d_gain, d_read = tpu.read_backward(*given, norm=case.norm, **blocks)
        d_X = d_stored + d_X
        d_store, d_data = tpu.store_backward(d_X, store_keys, data, **blocks)
        return d_X, d_store, d_data, d_gain, d_read

    got = halves(stored, statistics, args, d_stored, d_retrieved)
    _, want = expected_of(case, args, (d_stored, d_retrieved))
    assert got[0].dtype == case.residual and got[2].dtype == case.data
    assert_close(got, want, case.tolerance)


@SHARED
@pytest.mark.parametrize(
    "data, blocks",
    [
        pytest.param("float32", None, id="float32"),
        pytest.param("bfloat16", SLABS, id="bfloat16-slabs", marks=pytest.mark.slow),
        pytest.param("bfloat16", None, id="bfloat16", marks=pytest.mark.slow),
        pytest.param("float32", SLABS, id="float32-slabs", marks=pytest.mark.slow),
    ],
)
def test_small_spread_on_a_large_mean(data, blocks):
    """mean(x^2) - mean(x)^2 would lose every digit here, and so would a bfloat16 operand."""
    case = QUICK[0]._replace(data=data, blocks=blocks)
    X, w, y, gain, r = arguments(case)
    args = 1000 + np.float32(0.01) * X, 0 * w, y, gain, r
    _, Z, statistics = forward(case, args)
    expected = plain.norm_retrieve(args[0], gain, r, norm=case.norm, epsilon=EPSILON)
    # The op is given the very X that NumPy is: float32 is only what it computes in.
    assert_close(Z, expected, 1e-2 if data == "bfloat16" else 1e-4)
    spread = numbers(args[0]).std(axis=(2, 3))
    np.testing.assert_allclose(statistics.rstd, 1 / np.sqrt(spread**2 + EPSILON), rtol=1e-4)


@SHARED
def test_gradient_with_a_mean_that_is_large_beside_the_spread():
    case = QUICK[3]
    X, w, y, gain, r = arguments(case)
    args = (X + 64).astype(case.residual), 0 * w, y, gain, r
    cotangents = np.zeros_like(X), cotangents_of(case)[1]
    _, expected = expected_of(case, args, cotangents)
    stored, _, statistics = forward(case, args)
    g = backward(case, stored, statistics, args, cotangents)
    got = g.residual, g.gain, g.read_keys
    assert_close(got, (expected[0], *expected[3:]), TOLERANCE["bfloat16"])


def test_int16_comes_back_exactly_through_48_sublayers():
    # The tiles differ from those that rebuilding takes, the products must not.
    blocks = BlockSizes(256, slab=8, store_group=8, read_group=4)
    case = Case(1, 256, 16, 8, 4, 4, "int16", "bfloat16", "layernorm", blocks)
    other = case._replace(blocks=BlockSizes(128, slab=8, store_group=8, read_group=2, keep=True))
    X, w, _, gain, r = arguments(case)
    written = np.random.default_rng(0).normal(size=(48, 1, 256, 4, 8)).astype("bfloat16")

    @jax.jit
    def down(X, written):
        def step(X, y):
            X, _, statistics = forward(case, (X, w, y, gain, r))
            return X, statistics

        return jax.lax.scan(step, X, written)

    @jax.jit
    def up(X, steps):
        def step(X, of_step):
            y, statistics = of_step
            zero = jnp.zeros(X.shape, jnp.bfloat16)
            args = X, w, y, gain, r
            return backward(other, X, statistics, args, (zero, zero[:, :, :4])).rebuilt, None

        return jax.lax.scan(step, X, steps, reverse=True)[0]

    last, statistics = down(X, written)
    assert np.abs(np.asarray(last, np.int32) - X).max() > 2**FRACTION_BITS
    assert np.isfinite(statistics.rstd).all()
    np.testing.assert_array_equal(up(last, (written, statistics)), X)


@SHARED
def test_a_token_out_of_int16_range_reads_nan():
    case = QUICK[2]
    X, w, y, gain, r = arguments(case)
    w[:, 0], w[0, 0] = 0, 1
    for written in (1e3, -1e3, 1e9, np.inf, np.nan):
        y[0, 5, 0, 3] = written
        stored, Z, statistics = forward(case, (X, w, y, gain, r))
        bad = np.arange(case.N) == 5
        np.testing.assert_array_equal(np.isnan(statistics.rstd[0]), bad)
        np.testing.assert_array_equal(np.isnan(Z[0]).all((1, 2)), bad)
        assert np.isfinite(statistics.rstd[0, ~bad]).all() and np.isfinite(Z[0, ~bad]).all()
        if abs(written) == 1e3:
            assert stored[0, 5, 0, 3] == np.sign(written) * (2**15 - 1)


@SHARED
def test_gradients_are_the_same_bits_every_time():
    case = QUICK[3]
    args = arguments(case)
    stored, retrieved, statistics = forward(case, args)
    run = lambda: backward(case, stored, statistics, args, (stored, retrieved))
    for a, b in zip(run(), run(), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# Compiled for TPU ----------------------------------------------------------------------------


def place_on(topology: str):
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    sharding = SingleDeviceSharding(device)
    return lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def shapes(array, case: Case):
    c = case
    return (
        array(c.residual, c.B, c.N, c.K, c.V),
        array("float32", c.R, c.K),
        array(c.data, c.B, c.N, c.R, c.V),
        array("float32", c.K, c.V),
        array("float32", c.P, c.K),
    )


@pytest.mark.compile
@pytest.mark.parametrize(
    "topology, case",
    [
        ("v5e:2x2", Case(2, 512, 64, 64, 16, 48, "bfloat16", "bfloat16", "layernorm")),
        ("v5p:2x2x1", Case(2, 512, 256, 64, 16, 16, "bfloat16", "bfloat16", "layernorm")),
        ("v5p:2x2x1", Case(1, 512, 4096, 64, 16, 48, "bfloat16", "bfloat16", "rmsnorm")),
        ("v6e:2x2", Case(1, 1000, 48, 16, 14, 42, "int16", "bfloat16", "layernorm")),
        ("v6e:2x2", Case(2, 256, 12, 10, 5, 7, "float32", "float32", "layernorm")),
        ("tpu7x:2x2x1", Case(1, 256, 16, 16, 4, 12, "bfloat16", "bfloat16", "layernorm")),
    ],
    ids=[
        "v5e-64x64",
        "v5p-256x64",
        "v5p-4096x64",
        "v6e-48x16-int16",
        "v6e-12x10-float32",
        "tpu7x-16x16",
    ],
)
def test_compiles_within_vmem(topology, case):
    array = place_on(topology)
    args = shapes(array, case)
    token = array("float32", case.B, case.N)
    cotangents = (
        array(case.cotangent, *args[0].shape),
        array(case.data, case.B, case.N, case.P, case.V),
    )

    @jax.jit
    def both(args, statistics, cotangents):
        out = tpu.store_norm_retrieve(*args, norm=case.norm, epsilon=EPSILON)
        g = tpu.backward(
            *(args[0], statistics, *args[1:], *cotangents), norm=case.norm, rebuild=True
        )
        return out, g

    compiled = both.lower(args, Statistics(token, token), cotangents).compile()
    for name in ("key_vector_forward", "key_vector_backward"):
        assert re.search(rf"custom-call.*{name}", compiled.as_text()), name


@pytest.mark.compile
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_halves_compile(topology):
    case = Case(1, 256, 16, 16, 4, 12, "int16", "bfloat16", "rmsnorm")
    read = functools.partial(tpu.norm_retrieve, norm=case.norm, epsilon=EPSILON, dtype=jnp.bfloat16)

    @jax.jit
    def both(X, w, y, gain, r):
        return tpu.store(X, w, y), read(X, gain, r)

    @jax.jit
    def gradients(X, w, y, gain, r):
        """Those of both halves, of X as a cotangent too, and of P vectors y."""
        statistics = Statistics(*jnp.ones((2, *X.shape[:2])))
        dz = jnp.concatenate([y] * 3, axis=2)
        d_read = tpu.read_backward(X, statistics, gain, r, dz, norm=case.norm)
        return tpu.store_backward(X, w, y), d_read

    place = place_on(topology)
    text = both.lower(*shapes(place, case)).compile().as_text()
    floats = shapes(place, case._replace(residual="bfloat16"))
    text += gradients.lower(*floats).compile().as_text()
    for name in ("store", "read", "store_backward", "read_backward"):
        assert len(re.findall(rf"custom-call.*/key_vector_{name}/", text)) == 1, name


@pytest.mark.compile
def test_a_scan_over_layers_copies_no_residual():
    # Too large for VMEM, where XLA would else move it to and fro.
    case = Case(16, 512, 64, 64, 16, 16, "bfloat16", "bfloat16", "layernorm")
    B, N, K, V, R, P = case[:6]
    layers = 4
    blocks = BlockSizes(512, 64, 8, 2, store_unroll=1, read_unroll=1, keep=True)

    @jax.custom_vjp
    def op(*args):
        return op_forward(*args)[0]

    def op_forward(*args):
        out = tpu.store_norm_retrieve(*args, norm=case.norm, epsilon=EPSILON, block_sizes=blocks)
        return out[:2], (out[0], out[2], *args[1:])

    def op_backward(saved, cotangents):
        g = tpu.backward(*saved, *cotangents, norm=case.norm, block_sizes=blocks)
        return g.residual, g.store_keys, g.data, g.gain, g.read_keys

    op.defvjp(op_forward, op_backward)

    def layer(carry, p):
        X, y = carry
        X, z = op(X, p["w"], y, p["gain"], p["r"])
        h = jax.nn.gelu(z.swapaxes(-1, -2).reshape(B, N, V * P) @ p["up"])
        y = (h @ p["down"]).reshape(B, N, V, R).swapaxes(-1, -2)
        return (X, y), None

    def loss(p, X, y):
        X, y = jax.lax.scan(layer, (X, y), p)[0]
        return jnp.sum(jnp.square(X.astype(jnp.float32))) + jnp.sum(y.astype(jnp.float32))

    array = place_on("v5p:2x2x1")
    X, _, y, _, _ = shapes(array, case)
    parameters = {
        "w": array("float32", layers, R, K),
        "gain": array("float32", layers, K, V),
        "r": array("float32", layers, P, K),
        "up": array("bfloat16", layers, V * P, 512),
        "down": array("bfloat16", layers, 512, V * R),
    }
    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(parameters, X, y).compile().as_text()
    in_loops = big_copies(text, X.size, within=loop_bodies(text))
    assert in_loops == []
    # The converter finds what there is: at the edges the carry has to take its layout.
    assert big_copies(text, X.size, within=None)


def loop_bodies(text):
    bodies = set(re.findall(r"\bbody=%?([\w.\-]+)", text))
    assert len(bodies) >= 2, "a loop forward and one backward"
    return bodies


def big_copies(text, size, within):
    """Copies and transposes of `size` elements or more, in fusions or not."""
    found, computation = [], None
    for line in text.splitlines():
        if start := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            computation = start[1]
        out = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = \(?\w+\[([\d,]*)\]\S* ([\w\-]+)\(", line)
        if out is None or (within is not None and computation not in within):
            continue
        elements = np.prod([int(n) for n in out[2].split(",") if n])
        name = out[1] if out[3] == "fusion" else out[3]
        # A loop saves and takes up residuals: slices of a stack, which are no copies of a layout.
        if elements >= size and re.search(r"copy|transpose", name) and "slice" not in name:
            found.append(line.strip()[:120])
    return found


# What is refused, and block sizes ------------------------------------------------------------


def test_unsupported_names_the_reason():
    case = Case(1, 128, 16, 8, 4, 4, "bfloat16", "bfloat16", "layernorm")
    args = arguments(case)
    reason = tpu.unsupported
    assert reason(*args) is None
    assert "float16" in reason(args[0].astype(np.float16), *args[1:])
    assert "float16" in reason(*args[:2], args[2].astype(np.float16), *args[3:])
    assert "100 tokens" in reason(args[0][:, :100], args[1], args[2][:, :100], *args[3:])
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    large = case._replace(N=512, K=4096, V=4096, P=512, R=512)
    assert "VMEM" in reason(*shapes(array, large))
    assert "5000 entries" in reason(*shapes(array, case._replace(K=5000)))


@pytest.mark.parametrize("K, V", [(64, 64), (256, 64), (64, 128), (32, 32), (64, 256), (8, 64)])
def test_the_residual_is_read_once_where_a_tile_fits(K, V):
    sizes = Sizes(K, V, 16, 48, "bfloat16", "bfloat16")
    for op in ("forward", "backward"):
        assert choose_block_sizes(op, sizes, 512).slab == V


@SHARED
@pytest.mark.parametrize("how", ["shard_map", pytest.param("vmap", marks=pytest.mark.slow)])
def test_kernels_run_batched_and_on_a_mesh(how):
    """Bit for bit as in one call, but for sums over all rows."""
    case = QUICK[3]
    args, cotangents = arguments(case), cotangents_of(case)

    def run(args, cotangents):
        """Rows of the batch, and this call's part of the gradients of what all rows share."""
        stored, retrieved, statistics = forward(case, args)
        g = backward(case, stored, statistics, args, cotangents)
        parts = (g.store_keys[None], g.gain[None], g.read_keys[None])
        return (stored, retrieved, g.residual, g.data), parts

    expected, sums = run(args, cotangents)
    if how == "vmap":
        split = lambda x: x.reshape(2, 1, *x.shape[1:])
        X, w, y, gain, r = args
        over = jax.vmap(run, in_axes=((0, None, 0, None, None), 0))
        rows = (split(X), w, split(y), gain, r), tuple(map(split, cotangents))
        got, parts = jax.jit(over)(*rows)
    else:
        mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        row, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
        in_specs = ((row, whole, row, whole, whole), row)
        spread = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=row, check_vma=False)
        got, parts = jax.jit(spread)(args, cotangents)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(*float64((a.reshape(b.shape), b)))
    # The same terms in another order.
    of_all = [np.sum(p, axis=0).reshape(s.shape) for p, s in zip(parts, sums, strict=True)]
    assert_close(of_all, sums, 1e-5)
