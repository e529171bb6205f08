"""The key-vector kernels for TPU: interpreted on a CPU against float64 NumPy, and compiled."""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from pallas_kernels import UnsupportedImplementation, norm_retrieve
from pallas_kernels.key_vector import block_sizes, mosaic_tpu, mosaic_tpu_kernels, xla
from pallas_kernels.key_vector.block_sizes import BlockSizes, Sizes, choose_block_sizes
from pallas_kernels.key_vector.interface import Reread, SiteBackward, SiteOperands, Statistics
from pallas_kernels.key_vector.mosaic_tpu_call import Walk
from pallas_kernels.shapes import RMT_305M, RMT_LARGE, TOKENS, KeyVector, array
from pallas_kernels.target import Target, lowering_for, target
from tests.closeness import assert_close, float64
from tests.pallas_kernels.key_vector_battery import (
    EPSILON,
    Battery,
    Case,
    arguments,
    cotangents_of,
    expected_of,
    gradients_of,
    retrieved_of,
)
from tests.tiers import later
from tests.tpu import placed_on, schedules

# Many tests run the programs of a few cases.
SHARED = pytest.mark.xdist_group("key-vector kernels for TPU")

SLABS = BlockSizes(128, slab=4)
# Each dtype of a residual and of data, each norm, slabs or not, and whole or ragged tiles; at night
# every pair of them.
RAGGED = Case(1, 300, 16, 8, 8, 12, "float32", "float32", "layernorm")  # a last tile
# Rows of v never whole tiles.
ODD = Case(3, 200, 12, 6, 5, 7, "int16", "bfloat16", "rmsnorm", bits=17)
TILES = Case(2, 256, 16, 8, 4, 12, "bfloat16", "bfloat16", "layernorm")
IN_SLABS = Case(1, 200, 16, 8, 4, 12, "bfloat16", "float32", "layernorm", SLABS)
# The tiles differ from those that rebuilding takes, the products must not.
UNDONE = Case(
    *(1, 256, 16, 8, 4, 4, "int16", "bfloat16", "layernorm"),
    BlockSizes(256, slab=8),
    BlockSizes(128, slab=8, keep=True),
)


@SHARED
class TestKernels(Battery):
    module = mosaic_tpu
    cases = (
        RAGGED,
        # Tiles split over cores; more rows of what is retrieved than of data.
        Case(1, 256, 16, 8, 4, 20, "float32", "bfloat16", "rmsnorm", SLABS),
        ODD._replace(norm="layernorm"),
        TILES,
        *later(
            (Case(1, 128, 16, 8, 4, 6, "int16", "float32", "layernorm", SLABS),),
            (IN_SLABS._replace(norm="rmsnorm"),),
            (RAGGED._replace(R=16, P=48),),
            (Case(2, 128, 16, 8, 4, 12, "int16", "float32", "layernorm", SLABS),),
            # Half-full bfloat16 tiles.
            (Case(1, 600, 24, 6, 3, 9, "bfloat16", "bfloat16", "layernorm"),),
            (Case(1, 256, 16, 8, 4, 1, "float32", "bfloat16", "rmsnorm"),),
            (ODD,),
            (ODD._replace(norm="layernorm", bits=9),),
            (Case(1, 128, 8, 8, 8, 8, "bfloat16", "bfloat16", "rmsnorm"),),
            (IN_SLABS,),
            (Case(1, 128, 16, 8, 4, 12, "int16", "bfloat16", "rmsnorm", SLABS),),
        ),
    )
    halves = (RAGGED, *later((IN_SLABS,)))
    spreads = (
        RAGGED,
        *later(
            (RAGGED._replace(data="bfloat16", blocks=SLABS),),
            (RAGGED._replace(data="bfloat16"),),
            (RAGGED._replace(blocks=SLABS),),
        ),
    )
    shifted = (TILES,)
    exact = (UNDONE, *later((UNDONE._replace(data="float32"),)))
    held = (ODD, *later((ODD._replace(bits=9),)))
    repeated = (TILES,)
    spread = 1e-4  # about the mean it is not rounded

    def options(self, case, op):
        blocks = (op == "backward" and case.undone) or case.blocks
        return {"interpret": True} | ({} if blocks is None else {"block_sizes": blocks})


@SHARED
def test_in_slabs_what_was_retrieved_gives_the_means():
    case, kernels = IN_SLABS._replace(residual="float32"), TestKernels()
    site, cotangents = arguments(case), cotangents_of(case)
    (stored, _), gradients = expected_of(case, site, cotangents)
    mean, rstd = stored.mean((2, 3)), (stored.var((2, 3)) + EPSILON) ** -0.5
    statistics = Statistics(np.float32(np.stack([mean, rstd], 1)))
    retrieved = retrieved_of(case, stored, site).astype(case.data)
    given = site._replace(residual=np.float32(stored)), statistics, *cotangents, None, None
    g = kernels.backward(case, *given, retrieved)
    assert_close(gradients_of(g), gradients, case.tolerance)
    # Zeros give other means.
    other = kernels.backward(case, *given, 0 * retrieved).residual
    assert np.abs(other - g.residual).max() > 0.01 * np.abs(g.residual).max()


@pytest.mark.parametrize("scale", [True, False])
def test_a_nan_written_to_int16_reads_nan_where_a_maximum_drops_it(scale, monkeypatch):
    case = Case(1, 128, 8, 4, 2, 3, "int16", "bfloat16", "layernorm")
    site = SiteOperands(*map(jnp.asarray, arguments(case)))
    site = site._replace(data=site.data.at[0, 5].set(jnp.nan))
    numbers = types.SimpleNamespace(**vars(jnp))
    numbers.maximum, numbers.minimum = jnp.fmax, jnp.fmin
    monkeypatch.setattr(mosaic_tpu_kernels, "jnp", numbers)
    options = {"norm": case.norm, "dtype": jnp.bfloat16, "scale": scale, "interpret": True}
    out = mosaic_tpu.forward(site, **options, epsilon=EPSILON)
    bad = np.arange(case.N) == 5
    np.testing.assert_array_equal(np.isnan(out.statistics.rstd[0]), bad)


# Compiled for TPU ----------------------------------------------------------------------------


SMALL, LARGE = KeyVector(16, 16, 4, 12), RMT_LARGE.before_feed_forward


@pytest.mark.compile
@pytest.mark.parametrize(
    "topology, tokens, size, residual, data, norm",
    [
        ("v5e:2x2", (2, 512), RMT_305M, "bfloat16", "bfloat16", "layernorm"),
        ("v5p:2x2x1", (2, 512), LARGE, "bfloat16", "bfloat16", "layernorm"),
        ("v5p:2x2x1", (1, 512), RMT_305M._replace(K=4096), "bfloat16", "bfloat16", "rmsnorm"),
        ("v6e:2x2", (1, 1000), KeyVector(48, 16, 14, 42), "int16", "bfloat16", "layernorm"),
        ("v6e:2x2", (2, 256), KeyVector(12, 10, 5, 7), "float32", "float32", "layernorm"),
        ("v5e:2x2", (2, 512), RMT_305M._replace(K=128), "int16", "float32", "layernorm"),
        ("tpu7x:2x2x1", (1, 256), SMALL, "bfloat16", "bfloat16", "layernorm"),
    ],
    ids=lambda x: "x".join(map(str, x)) if isinstance(x, tuple) else x,
)
def test_compiles_within_vmem(topology, tokens, size, residual, data, norm):
    @jax.jit
    def both(given):
        out = mosaic_tpu.forward(given.site, norm=norm, epsilon=EPSILON)
        return out, mosaic_tpu.backward(given, norm=norm, rebuild=True)

    given = size.backward(tokens, data, residual)._replace(again=size.reread(tokens))
    text = both.lower(placed_on(topology, given)).compile().as_text()
    for name in ("key_vector_forward", "key_vector_backward"):
        assert re.search(rf"custom-call.*{name}", text), name


def lower_store(device, tokens):
    """A store of float32 data in int16, in tiles of so many tokens."""
    K, V, R = 16, 2, 8
    on_device = SingleDeviceSharding(device)
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=on_device)
    given = array("int16", 1, 512, K, V), array("float32", R, K), array("float32", 1, 512, R, V)
    blocks = BlockSizes(tokens, slab=V)
    return jax.jit(lambda *of: mosaic_tpu.forward(SiteOperands(*of), block_sizes=blocks)).lower(
        *given
    )


@pytest.mark.compile
def test_a_float32_product_is_rounded_to_int16_as_a_whole_at_every_tile(tmp_path):
    tiles = (128, 256, 512)
    jobs = [(f"{__name__}:lower_store", {"tokens": tokens}) for tokens in tiles]
    for tokens, of_instructions in zip(tiles, schedules("v5e:2x2", jobs, tmp_path), strict=True):
        (text,) = (x for name, x in of_instructions.items() if name.startswith("key_vector_store"))
        sums = dict(re.findall(r"(%\w+) = (vadd\.f32 %\w+, %\w+)", text))

        def terms(name, sums=sums):
            parts = re.findall(r"%\w+", sums.get(name, ""))
            return sum(map(terms, parts)) if parts else 1

        rounded = re.findall(r"= v(?:add|sub)\.f32 12582912\.0, (%\w+)", text)
        # Six bfloat16 products make a float32 one; a register has 8 rows of 128 tokens.
        assert [terms(name) for name in rounded] == [6] * (2 * tokens // 128)


@pytest.mark.compile
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_halves_compile(topology):
    norm = {"norm": "rmsnorm"}
    read = functools.partial(mosaic_tpu.forward, **norm, epsilon=EPSILON, dtype=jnp.bfloat16)

    @jax.jit
    def both(X, w, y, gain, r):
        written = mosaic_tpu.forward(SiteOperands(X, w, y))
        return written, read(SiteOperands(X, gain=gain, read_keys=r))

    @jax.jit
    def gradients(X, w, y, gain, r):
        """Those of both halves, of X as a cotangent too, and of P vectors y."""
        statistics = Statistics(jnp.ones((X.shape[0], 2, X.shape[1])))
        dz = jnp.concatenate([y] * 3, axis=2)
        of_read = SiteBackward(SiteOperands(X, gain=gain, read_keys=r), statistics, None, dz)
        of_store = SiteBackward(SiteOperands(None, w, y), None, X, None)
        return mosaic_tpu.backward(of_store), mosaic_tpu.backward(of_read, **norm)

    site = lambda **options: placed_on(topology, SMALL.site((1, 256), **options))
    text = both.lower(*site(residual="int16")).compile().as_text()
    text += gradients.lower(*site()).compile().as_text()
    for name in ("store", "read", "store_backward", "read_backward"):
        assert len(re.findall(rf"custom-call.*/key_vector_{name}/", text)) == 1, name


@pytest.mark.compile
def test_a_scan_over_layers_copies_no_residual():
    # Too large for VMEM, where XLA would else move it to and fro.
    size, norm, layers = RMT_305M.before_feed_forward, {"norm": "layernorm"}, 4
    (K, V, R, P), (B, N) = size, TOKENS
    blocks = BlockSizes(512, 64, store_unroll=1, read_unroll=1, keep=True)

    @jax.custom_vjp
    def op(*args):
        return op_forward(*args)[0]

    def op_forward(*args):
        site = SiteOperands(*args)
        out = mosaic_tpu.forward(site, **norm, epsilon=EPSILON, block_sizes=blocks)
        return out[:2], (site._replace(residual=out.residual), out.statistics)

    def op_backward(saved, cotangents):
        g = mosaic_tpu.backward(SiteBackward(*saved, *cotangents), **norm, block_sizes=blocks)
        return gradients_of(g)

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

    X, _, y, *_ = size.site(TOKENS)
    parameters = {
        "w": array("float32", layers, R, K),
        "gain": array("float32", layers, K, V),
        "r": array("float32", layers, P, K),
        "up": array("bfloat16", layers, V * P, 512),
        "down": array("bfloat16", layers, 512, V * R),
    }
    given = placed_on("v5p:2x2x1", (parameters, X, y))
    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*given).compile().as_text()
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
    def reason(size=SMALL, tokens=128, **dtypes):
        return mosaic_tpu.unsupported("forward", size.site((1, tokens), **dtypes))

    assert reason() is None
    assert "float16" in reason(residual="float16")
    assert "float16" in reason(data="float16", residual="bfloat16")
    assert "100 tokens" in reason(tokens=100)
    assert "VMEM" in reason(KeyVector(4096, 4096, 512, 512), 512)
    assert "5000 entries" in reason(SMALL._replace(K=5000))


@pytest.mark.parametrize("residual", ["bfloat16", "float32", "int16"])
def test_keys_of_one_entry_have_no_gradient_in_bfloat16(residual):
    """Mosaic does not compile it. A write to int16 needs the kernel that undoes it."""
    one, why = SMALL._replace(K=1), "keys of one entry with bfloat16 data (legal: at least 2)"
    sizes = {"tokens": (1, 256), "residual": residual}
    given = one.backward(**sizes, data="bfloat16")
    assert mosaic_tpu.unsupported("backward", given) == why
    forward = mosaic_tpu.unsupported("forward", given.site)
    assert forward == (why if residual == "int16" else None)
    assert mosaic_tpu.unsupported("backward", one.backward(**sizes, data="float32")) is None
    two = one._replace(K=2).backward(**sizes, data="bfloat16")
    assert mosaic_tpu.unsupported("backward", two) is None


def test_the_dtype_of_what_is_read_decides_whether_it_fits():
    """Plain JAX reads vectors that do not fit, unless the kernels are asked for by name."""
    X, _, _, *of_read = KeyVector(64, 64, 0, 192).site((1, 256))

    def read(dtype, implementation=None):
        op = functools.partial(norm_retrieve, dtype=dtype, implementation=implementation)
        return jax.eval_shape(op, X, *of_read).dtype

    with lowering_for("TPU v4"):
        assert read("bfloat16", "mosaic_tpu") == jnp.bfloat16
        assert read("float32") == jnp.float32
        with pytest.raises(UnsupportedImplementation, match="does not support .* P=192: a tile"):
            read("float32", "mosaic_tpu")
    with jax.enable_x64(True):
        assert read("float64") == jnp.float64
        with pytest.raises(UnsupportedImplementation, match="retrieved vectors of float64 .legal"):
            read("float64", "mosaic_tpu")


@pytest.mark.parametrize(
    "data, K, fits",
    [("bfloat16", 2560, True), ("bfloat16", 3072, False), ("float32", 2048, True)]
    + [("float32", 2560, False)],
)
def test_a_write_to_int16_has_the_kernel_that_undoes_it(data, K, fits):
    """Products of plain JAX are added up in another order, and would not undo it exactly."""
    size = RMT_305M._replace(K=K)
    given = size.backward((1, 256), data, "int16")
    with lowering_for("TPU v4"):
        forward = mosaic_tpu.unsupported("forward", given.site)
        assert forward == mosaic_tpu.unsupported("backward", given)
        again = given._replace(again=size.reread((1, 256)))
        assert forward == mosaic_tpu.unsupported("backward", again)
        assert (forward is None) == fits
        # A write that nothing undoes needs less.
        assert mosaic_tpu.unsupported("forward", size.site((1, 256), data, "bfloat16")) is None


@SHARED
def test_what_does_not_fit_beside_a_backward_pass_is_read_afterwards(monkeypatch):
    case, kernels = IN_SLABS._replace(residual="float32", blocks=None), TestKernels()
    draw = np.random.default_rng(0).normal
    site, cotangents = arguments(case), cotangents_of(case)
    stored, retrieved, statistics = kernels.forward(case, site)
    site = site._replace(residual=stored)
    keys = np.float32(draw(size=(case.K, case.V))), np.float32(draw(size=(40, case.K)))
    again = Reread(*keys, statistics)
    given = SiteBackward(site, statistics, *cotangents, None, again, retrieved)
    options = {"norm": case.norm, "rebuild": True}
    sizes = Sizes(case.K, case.V, case.R, case.P, case.residual, case.data)
    least = block_sizes.vmem_bytes("rebuild", sizes, BlockSizes(128, slab=1))
    monkeypatch.setattr(Target, "vmem_part", lambda *_: least)
    assert choose_block_sizes("rebuild", dataclasses.replace(sizes, A=40), case.N) is None
    got = jax.jit(lambda x: mosaic_tpu.backward(x, **options, interpret=True).retrieved)(given)
    want = jax.jit(lambda x: xla.backward(x, **options).retrieved)(given)
    assert_close(got, want, 1e-5)


@pytest.mark.parametrize("K, V", [(64, 64), (256, 64), (64, 128), (32, 32), (64, 256), (8, 64)])
def test_the_residual_is_read_once_where_a_tile_fits(K, V):
    sizes = Sizes(K, V, 16, 48, "bfloat16", "bfloat16")
    for op in ("forward", "backward"):
        assert choose_block_sizes(op, sizes, 512).slab == V


@pytest.mark.parametrize("kind, K", [("TPU v5 lite", 128), ("TPU v5 lite", 256), ("TPU v4", 128)])
def test_the_float32_cotangents_of_an_int16_residual_fit(kind, K):
    V, R, P = 64, 16, 48
    with lowering_for(kind):
        blocks = choose_block_sizes("rebuild", Sizes(K, V, R, P, "int16", "float32"), 512)
        limit = target().vmem_limit
    matrices = blocks.tokens * blocks.slab * K * (2 * (2 + 2 + 4 + 4) + 4 * blocks.keep)
    vectors = blocks.tokens * blocks.slab * (4 * R + 3 * P) * 4
    assert matrices + vectors <= limit


@SHARED
def test_on_one_core_sums_are_those_of_two():
    case, kernels = TILES, TestKernels()
    site, cotangents = arguments(case), cotangents_of(case)
    statistics = kernels.forward(case, site).statistics
    of_two = kernels.backward(case, site, statistics, *cotangents)
    with lowering_for("TPU v6 lite"):
        assert Walk.over(2, 2).cores == 1
        of_one = kernels.backward(case, site, statistics, *cotangents)
    for name in ("residual", "data"):
        np.testing.assert_array_equal(*float64((getattr(of_one, name), getattr(of_two, name))))
    sums = lambda g: (g.store_keys, g.gain, g.read_keys)
    assert_close(sums(of_one), sums(of_two), 1e-5)  # the same terms in another order


@SHARED
@pytest.mark.parametrize("how", ["shard_map", pytest.param("vmap", marks=pytest.mark.slow)])
def test_kernels_run_batched_and_on_a_mesh(how):
    """Bit for bit as in one call, but for sums over all rows."""
    case, kernels = TILES, TestKernels()
    site, cotangents = arguments(case), cotangents_of(case)

    def run(site, cotangents):
        """Rows of the batch, and this call's part of the gradients of what all rows share."""
        stored, retrieved, statistics = kernels.forward(case, site)
        site = site._replace(residual=stored)
        g = kernels.backward(case, site, statistics, *cotangents)
        parts = (g.store_keys[None], g.gain[None], g.read_keys[None])
        return (stored, retrieved, g.residual, g.data), parts

    expected, sums = run(site, cotangents)
    if how == "vmap":
        split = lambda x: x.reshape(2, 1, *x.shape[1:])
        rows = site._replace(residual=split(site.residual), data=split(site.data))
        over = jax.vmap(run, in_axes=(SiteOperands(0, None, 0, None, None), 0))
        got, parts = jax.jit(over)(rows, tuple(map(split, cotangents)))
    else:
        mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        row, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
        in_specs = (SiteOperands(row, whole, row, whole, whole), row)
        spread = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=row, check_vma=False)
        got, parts = jax.jit(spread)(site, cotangents)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(*float64((a.reshape(b.shape), b)))
    # The same terms in another order.
    of_all = [np.sum(p, axis=0).reshape(s.shape) for p, s in zip(parts, sums, strict=True)]
    assert_close(of_all, sums, 1e-5)
