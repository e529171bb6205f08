"""The key-vector ops with K divided over a mesh axis: against the whole, and what they send."""

import functools
import re
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_kernels
from pallas_kernels import key_vector
from pallas_kernels.key_vector import mosaic_tpu, triton_gpu
from pallas_kernels.key_vector.interface import (
    FRACTION_BITS,
    Means,
    SiteBackward,
    SiteOperands,
    Statistics,
)
from pallas_kernels.platform import Implementations
from pallas_kernels.shapes import RMT_305M
from rmt_tpu.estimator.tuning import ptxas_usage
from tests import cuda
from tests.closeness import assert_close
from tests.pallas_kernels import plain
from tests.pallas_kernels.plain import numbers

EPSILON = 1e-5
STEPS = 2.0**FRACTION_BITS
# Largest error relative to the largest value, by dtype of the data: float sums in another order;
# bfloat16 partial sums, each rounded to 2^-9, of bfloat16 operands.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1.5e-2}


class Case(NamedTuple):
    """Of the whole; B rows for each device along `key`, K entries of a key for each."""

    n: int
    b: int = 1
    N: int = 5
    k: int = 3
    V: int = 5
    R: int = 3
    P: int = 7
    dtype: str = "float64"
    norm: str = "layernorm"

    @property
    def x64(self):
        return jax.enable_x64(self.dtype == "float64")


# Residual, store keys, data, gain, read keys; and what is retrieved, and of every row.
SPECS = (P("data", None, "key"), P(None, "key"), P(("data", "key")), P("key"), P(None, "key"))
OWN, EVERY = P(("data", "key")), P("data")
# Each group of devices along `key` gives its own part of what is summed over all tokens.
PART = (SPECS[0], P("data", None, "key"), SPECS[2], P("data", "key"), P("data", None, "key"))


def mesh_of(n, devices=None):
    devices = jax.devices() if devices is None else devices
    return jax.sharding.Mesh(np.array(devices).reshape(-1, n), ("data", "key"))


def per_device(f, n, in_specs, out_specs):
    f = jax.shard_map(f, mesh=mesh_of(n), in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(f)


def arguments(case: Case, residual=None, seed=0):
    """The five inputs, and cotangents of X' and z."""
    rows, K = 8 * case.b, case.n * case.k
    rng = np.random.default_rng(seed)
    draw = lambda dtype, *size: rng.normal(size=size).astype(dtype)
    parameters = "float64" if case.dtype == "float64" else "float32"
    # Slices that differ in mean and spread.
    X = draw(parameters, rows, case.N, K, case.V)
    X = X * np.linspace(0.5, 2, K, dtype=X.dtype)[:, None]
    X = X + np.linspace(-1, 2, K, dtype=X.dtype)[:, None]
    if residual == "int16":
        X = np.round(X * STEPS)
    args = (
        X.astype(residual or case.dtype),
        draw(parameters, case.R, K) / 2,
        draw(case.dtype, rows, case.N, case.R, case.V),
        draw(parameters, K, case.V),
        draw(parameters, case.P, K),
    )
    cotangents = (
        draw(case.dtype, rows, case.N, K, case.V),
        draw(case.dtype, rows, case.N, case.P, case.V),
    )
    return args, cotangents


def parts_of_groups(gradients):
    """Those of parameters with an axis for the groups of devices along `data`."""
    X, w, y, gain, r = gradients
    return X, w[None], y, gain[None], r[None]


def whole(gradients):
    """Those of parameters summed over groups."""
    X, w, y, gain, r = map(np.asarray, gradients)
    return X, w.sum(0), y, gain.sum(0), r.sum(0)


def expected_of(case, args, cotangents, epsilon=EPSILON):
    """What is stored, retrieved and given as gradients."""
    return plain.site(args, cotangents, norm=case.norm, epsilon=epsilon)


NIGHT = pytest.mark.slow


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(2), id="2-float64"),
        pytest.param(Case(4, norm="rmsnorm"), id="4-float64-rmsnorm"),
        pytest.param(Case(8, dtype="float32", norm="rmsnorm"), id="8-float32-rmsnorm"),
        pytest.param(Case(4, k=8, V=8, dtype="bfloat16"), id="4-bfloat16"),
        pytest.param(Case(8), id="8-float64", marks=NIGHT),
        pytest.param(Case(4, b=2, N=1, k=1, V=1, R=1, P=2), id="4-single numbers", marks=NIGHT),
        pytest.param(Case(2, b=3, dtype="float32"), id="2-float32-3 rows", marks=NIGHT),
    ],
)
def test_values_and_every_gradient_equal_the_whole(case):
    def local(args, cotangents):
        op = lambda *args: pallas_kernels.store_norm_retrieve(
            *args, norm=case.norm, epsilon=EPSILON, key_axis="key"
        )
        out, pullback = jax.vjp(op, *args)
        return out, parts_of_groups(pullback(cotangents))

    args, cotangents = arguments(case)
    with case.x64:
        specs = SPECS, (SPECS[0], OWN)
        run = per_device(local, case.n, specs, ((SPECS[0], OWN), PART))
        out, gradients = run(args, cotangents)
    for got, like in zip(gradients, args, strict=True):
        assert got.dtype == like.dtype
    expected = expected_of(case, args, cotangents)
    assert_close((out, whole(gradients)), expected, TOLERANCE[case.dtype])


@pytest.mark.parametrize("norm", ["layernorm", pytest.param("rmsnorm", marks=NIGHT)])
def test_halves_and_their_gradients_equal_the_whole(norm):
    case = Case(4, b=2, norm=norm)

    def local(args, cotangents):
        X, w, y, gain, r = args
        stored, store_pullback = jax.vjp(
            lambda *args: pallas_kernels.store(*args, key_axis="key"), X, w, y
        )
        options = dict(norm=norm, epsilon=EPSILON, key_axis="key")
        retrieved, read_pullback = jax.vjp(
            lambda *args: pallas_kernels.norm_retrieve(*args, **options), stored, gain, r
        )
        _, _, statistics = pallas_kernels.store_norm_retrieve_with_statistics(
            X, w, y, gain, r, **options
        )
        again = pallas_kernels.norm_retrieve_again(
            stored, statistics, gain, r, dtype=y.dtype, **options
        )
        d_stored, d_gain, d_r = read_pullback(cotangents[1])
        d_X, d_w, d_y = store_pullback(d_stored + cotangents[0])
        gradients = parts_of_groups((d_X, d_w, d_y, d_gain, d_r))
        return (stored, retrieved), gradients, again, statistics

    args, cotangents = arguments(case)
    with case.x64:
        out_specs = ((SPECS[0], OWN), PART, OWN, EVERY)
        run = per_device(local, case.n, (SPECS, (SPECS[0], OWN)), out_specs)
        out, gradients, again, statistics = run(args, cotangents)
    expected = expected_of(case, args, cotangents)
    assert_close((out, whole(gradients)), expected, TOLERANCE["float64"])
    assert_close(again, expected[0][1], TOLERANCE["float64"])
    stored = expected[0][0]
    mean = stored.mean((2, 3)) if norm == "layernorm" else np.zeros(stored.shape[:2])
    square = np.mean((stored - mean[..., None, None]) ** 2, (2, 3))
    np.testing.assert_allclose(statistics.mean, mean, atol=1e-13)
    np.testing.assert_allclose(statistics.rstd, (square + EPSILON) ** -0.5, rtol=1e-12)


def undone(case, args, cotangents, tolerance):
    """Writes, then takes it back and reads again, as a reversible backward pass; checks all."""
    options = dict(norm=case.norm, key_axis="key")

    def local(args, cotangents):
        X, w, y, gain, r = args
        site = pallas_kernels.store_norm_retrieve_with_statistics
        # A write of nothing: what is read is of the residual before.
        _, before, of_before = site(X, w, 0 * y, gain, r, epsilon=EPSILON, **options)
        stored, retrieved, statistics = site(X, w, y, gain, r, epsilon=EPSILON, **options)
        g = pallas_kernels.undo(
            *(stored, statistics, w, y, gain, r, *cotangents),
            retrieved=retrieved,
            again=pallas_kernels.Reread(gain, r, of_before),
            **options,
        )
        gradients = parts_of_groups((g.residual, g.store_keys, g.data, g.gain, g.read_keys))
        return (stored, retrieved), gradients, g.rebuilt, (g.retrieved, before)

    out_specs = ((SPECS[0], OWN), PART, SPECS[0], (OWN, OWN))
    run = per_device(local, case.n, (SPECS, (SPECS[0], OWN)), out_specs)
    (stored, retrieved), gradients, rebuilt, (again, before) = run(args, cotangents)
    got = (numbers(stored), retrieved), whole(gradients)
    assert_close(got, expected_of(case, args, cotangents), tolerance)
    assert_close(again, before, tolerance)
    return rebuilt


# An int16 residual is known to half a step of 2^-9, at values of about 4.
INT16_TOLERANCE = 5e-3


@pytest.mark.parametrize("norm", ["layernorm", pytest.param("rmsnorm", marks=NIGHT)])
def test_undo_gives_the_gradients_and_the_int16_residual_exactly(norm):
    case = Case(4, k=4, V=6, dtype="float32", norm=norm)
    args, cotangents = arguments(case, "int16")
    rebuilt = undone(case, args, cotangents, INT16_TOLERANCE)
    np.testing.assert_array_equal(rebuilt, args[0])


def test_undo_of_floats():
    case = Case(8, k=2, norm="layernorm")
    args, cotangents = arguments(case)
    with case.x64:
        rebuilt = undone(case, args, cotangents, TOLERANCE["float64"])
    assert_close(rebuilt, args[0], TOLERANCE["float64"])


def test_a_token_out_of_range_in_one_slice_reads_nan_everywhere():
    case = Case(4, dtype="float32")
    (X, w, y, gain, r), _ = arguments(case, "int16")
    bad = np.zeros(y.shape[:2], bool)
    for row, token, written in ((1, 2, 1e3), (3, 0, np.inf), (6, 4, np.nan)):
        y[row, token, 0, 3] = written
        bad[row, token] = True
    w[:, 3:], w[0, 0] = 0, 1  # only the first device's slice is written

    site = lambda *args: pallas_kernels.store_norm_retrieve(*args, key_axis="key")
    _, Z = per_device(site, case.n, SPECS, (SPECS[0], OWN))(X, w, y, gain, r)
    np.testing.assert_array_equal(np.isnan(Z).all((2, 3)), bad)
    np.testing.assert_array_equal(np.isnan(Z).any((2, 3)), bad)


@pytest.mark.parametrize(
    "dtype, mean, spread, tolerance",
    [
        # Rounded before the mean is taken off, the parts would be off by 64 * 2^-9.
        ("bfloat16", 64, 1, TOLERANCE["bfloat16"]),
        # A float32 mean of 1000 is known to 3e-5, a spread of 0.01 from there to 0.6% at most;
        # E[x^2] - E[x]^2 would be off by more than itself.
        ("float32", 1000, 0.01, 6e-3),
    ],
)
def test_a_mean_that_is_large_beside_the_spread(dtype, mean, spread, tolerance):
    case = Case(4, k=8, V=8, dtype=dtype)
    (X, w, y, gain, r), cotangents = arguments(case, "float32")
    args = np.float32(mean) + np.float32(spread) * X, 0 * w, y, gain, r
    site = lambda *args: pallas_kernels.store_norm_retrieve(*args, epsilon=1e-6, key_axis="key")
    got = per_device(site, case.n, SPECS, (SPECS[0], OWN))(*args)
    (_, retrieved), _ = expected_of(case, args, cotangents, epsilon=1e-6)
    assert_close(got[1], retrieved, tolerance)


# With kernels ---------------------------------------------------------------------------------


def interpreted(module):
    """The module's ops on a CPU."""
    portable = types.ModuleType("interpreted")
    for name in ("forward", "backward"):
        setattr(portable, name, functools.partial(getattr(module, name), interpret=True))
    return Implementations(portable, {}, ())


@pytest.mark.parametrize(
    "module, residual, norm",
    [
        (mosaic_tpu, "float32", "layernorm"),
        pytest.param(triton_gpu, "int16", "rmsnorm", marks=NIGHT),
        pytest.param(mosaic_tpu, "int16", "rmsnorm", marks=NIGHT),
        pytest.param(triton_gpu, "float32", "layernorm", marks=NIGHT),
    ],
    ids=lambda x: getattr(x, "__name__", x).rpartition(".")[2],
)
def test_kernels_on_slices_equal_the_whole(module, residual, norm, monkeypatch):
    monkeypatch.setattr(key_vector.calls, "IMPLEMENTATIONS", interpreted(module))
    N = 130 if module is mosaic_tpu else 3
    case = Case(4, N=N, k=4, V=8, R=2, P=3, dtype="float32", norm=norm)
    args, cotangents = arguments(case, residual)
    tolerance = INT16_TOLERANCE if residual == "int16" else TOLERANCE["float32"]
    rebuilt = undone(case, args, cotangents, tolerance)
    if residual == "int16":
        np.testing.assert_array_equal(rebuilt, args[0])


def given_means(norm, K, V, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *size: rng.normal(size=size).astype("float32")
    means = Means(draw(2, 130) if norm == "layernorm" else None, draw(2, 130))
    X, w, y = draw(2, 130, K, V), draw(4, K), draw(2, 130, 4, V)
    both = draw(2, 130) * (norm == "layernorm"), 1 + draw(2, 130) ** 2
    statistics = Statistics(np.stack(both, axis=1))
    site = SiteOperands(X, w, y, draw(K, V), draw(6, K))
    return SiteBackward(site, statistics, draw(2, 130, K, V), draw(2, 130, 6, V), means)


SLABS = mosaic_tpu.BlockSizes(128, slab=4)
BACKWARD = {
    "mosaic_tpu": functools.partial(mosaic_tpu.backward, interpret=True),
    "mosaic_tpu in slabs": functools.partial(
        mosaic_tpu.backward, block_sizes=SLABS, interpret=True
    ),
    "triton": functools.partial(triton_gpu.backward, interpret=True),
    "triton in chunks": functools.partial(
        triton_gpu.backward, blocks=triton_gpu.Blocks(16, 4, 1, 2), interpret=True
    ),
}
QUICK = [("mosaic_tpu in slabs", "layernorm"), ("triton in chunks", "rmsnorm")]


@pytest.mark.parametrize(
    "backward, norm",
    [
        pytest.param(name, norm, marks=() if (name, norm) in QUICK else NIGHT)
        for name in BACKWARD
        for norm in ("layernorm", "rmsnorm")
    ],
)
def test_kernels_take_the_means_that_are_given(backward, norm):
    """Any means: they are not those of these arrays."""
    given = given_means(norm, 24, 8)
    got = jax.jit(functools.partial(BACKWARD[backward], norm=norm))(given)
    expected = jax.jit(functools.partial(key_vector.xla.backward, norm=norm))(given)
    assert_close(got[:5], expected[:5], TOLERANCE["float32"])


# What is sent ---------------------------------------------------------------------------------


def collectives(text):
    """How many of each kind are in a compiled program."""
    kinds = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
    found = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in kinds}
    return {kind: count for kind, count in found.items() if count}


def a_site(*args):
    return pallas_kernels.store_norm_retrieve(*args, key_axis="key")


def its_gradients(args, cotangents):
    return jax.vjp(a_site, *args)[1](cotangents)


def placed(case, devices, residual=None):
    """The arguments' shapes on a mesh of these devices, and the mesh."""
    mesh = mesh_of(case.n, devices)
    args, cotangents = arguments(case, residual)
    place = lambda x, spec: jax.ShapeDtypeStruct(
        (x.shape[0] * mesh.size // 8 if spec in (SPECS[0], OWN) else x.shape[0], *x.shape[1:]),
        x.dtype,
        sharding=NamedSharding(mesh, spec),
    )
    args = tuple(map(place, args, SPECS))
    return mesh, args, tuple(map(place, cotangents, (SPECS[0], OWN)))


def compiled(f, mesh, in_specs, out_specs, *args):
    f = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(f).lower(*args).compile().as_text()


def test_a_site_sends_no_more_than_is_said():
    case = Case(4, dtype="float32")
    mesh, args, cotangents = placed(case, jax.devices())
    text = compiled(a_site, mesh, SPECS, (SPECS[0], OWN), *args)
    assert collectives(text) == {"all-gather": 2, "reduce-scatter": 1}
    # Of data, slices' statistics, cotangents and means; of what is retrieved, and d_data.
    in_specs = (SPECS, (SPECS[0], OWN))
    text = compiled(its_gradients, mesh, in_specs, SPECS, args, cotangents)
    assert collectives(text) == {"all-gather": 4, "reduce-scatter": 2}


def test_a_read_and_a_write_send_half_each():
    case = Case(4, dtype="float32")
    mesh, args, _ = placed(case, jax.devices())
    write = lambda X, w, y: pallas_kernels.store(X, w, y, key_axis="key")
    text = compiled(write, mesh, SPECS[:3], SPECS[0], *args[:3])
    assert collectives(text) == {"all-gather": 1}
    read = lambda X, gain, r: pallas_kernels.norm_retrieve(X, gain, r, key_axis="key")
    text = compiled(read, mesh, (SPECS[0], *SPECS[3:]), OWN, args[0], *args[3:])
    assert collectives(text) == {"all-gather": 1, "reduce-scatter": 1}


def test_undo_gathers_the_data_again_and_sums_the_keys():
    case = Case(4, dtype="float32")
    mesh, args, cotangents = placed(case, jax.devices())

    def undo(args, cotangents):
        X, w, y, gain, r = args
        statistics = Statistics(jnp.ones((X.shape[0], 2, X.shape[1])))
        g = pallas_kernels.undo(
            *(X, statistics, w, y, gain, r, *cotangents),
            norm="layernorm",
            key_axis="key",
            retrieved=cotangents[1],
        )
        return g.residual, g.store_keys, g.data, g.gain, g.read_keys

    text = compiled(undo, mesh, (SPECS, (SPECS[0], OWN)), SPECS, args, cotangents)
    assert collectives(text) == {"all-gather": 3, "all-reduce": 1, "reduce-scatter": 1}


def test_an_axis_of_one_device_sends_nothing():
    case = Case(1, dtype="float32")
    mesh, args, cotangents = placed(case, jax.devices())
    in_specs = (SPECS, (SPECS[0], OWN))
    text = compiled(its_gradients, mesh, in_specs, SPECS, args, cotangents)
    assert collectives(text) == {}


# Compiled for devices that are not there ------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_compiles_for_tpu_within_a_mesh(norm):
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    case = Case(4, b=1, N=256, k=16, V=16, R=16, P=48, dtype="bfloat16", norm=norm)
    mesh, args, cotangents = placed(case, devices)

    def both(args, cotangents):
        options = dict(norm=norm, key_axis="key", implementation="mosaic_tpu")
        out, pullback = jax.vjp(
            lambda *args: pallas_kernels.store_norm_retrieve(*args, **options), *args
        )
        return out, pullback(cotangents)

    specs = (SPECS, (SPECS[0], OWN))
    text = compiled(both, mesh, specs, ((SPECS[0], OWN), SPECS), args, cotangents)
    for name in ("key_vector_forward", "key_vector_backward"):
        assert len(re.findall(rf"custom-call.*{name}", text)) == 1, name
    # In the kernels' layout, or all rows would be copied after the gather.
    gathered = re.findall(r"bf16\[([\d,]+)\]\S* all-gather(?:-done)?\(", text)
    assert set(gathered) == {"4,16,16,256", "4,16,48,256"}


@pytest.mark.compile
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_backward_with_means_compiles_for_gpu_without_spilling(norm, tmp_path):
    given = RMT_305M.backward((1, 4096))
    token = jax.ShapeDtypeStruct((1, 4096), jnp.float32)
    given = given._replace(means=Means(token if norm == "layernorm" else None, token))
    backward = functools.partial(triton_gpu.backward, norm=norm)
    assert "key_vector_backward" in cuda.lowered(backward, given)
    program = cuda.ptx(backward, given, target="sm_90", folder=tmp_path)
    kernels = ptxas_usage(program)
    kernels = {k: v for k, v in kernels.items() if k.startswith("key_vector")}
    assert kernels and all(not use.spilled for use in kernels.values()), kernels


# What is refused ------------------------------------------------------------------------------


def test_what_does_not_fit_is_named():
    case = Case(4, dtype="float32")
    (X, w, y, gain, r), _ = arguments(case)
    run = lambda f, *args: jax.eval_shape(per_device(f, case.n, P(), P()), *args)
    with pytest.raises(ValueError, match="shapes do not fit.*data"):
        run(lambda *args: pallas_kernels.store(*args, key_axis="key"), X, w, y)
    read = lambda X, gain, r: pallas_kernels.norm_retrieve(X, gain, r, key_axis="key")
    with pytest.raises(ValueError, match="with key_axis='key' of 4 devices"):
        run(read, X[:3], gain, r)

    def undo(X, w, y, gain, r, dz):
        statistics = Statistics(jnp.ones((X.shape[0], 2, X.shape[1])))
        args = (X, statistics, w, y, gain, r, X, dz)
        return pallas_kernels.undo(*args, norm="rmsnorm", key_axis="key")

    d_z = np.ones((2, case.N, case.P, case.V), np.float32)
    with pytest.raises(ValueError, match="needs the argument `retrieved`"):
        run(undo, X, w, y[:2], gain, r, d_z)

    def read_again(X, w, y, gain, r, dz, short):
        statistics = Statistics(jnp.ones((X.shape[0], 2, X.shape[1])))
        again = pallas_kernels.Reread(gain, short, statistics)
        args = (X, statistics, w, y, gain, r, X, dz)
        return pallas_kernels.undo(*args, norm="rmsnorm", again=again)

    with pytest.raises(ValueError, match="shapes do not fit.*read_keys"):
        jax.eval_shape(read_again, X[:2], w, y[:2], gain, r, d_z, r[:, :-1])
    with pytest.raises(NameError, match="key"):
        jax.eval_shape(read, X, gain, r)
