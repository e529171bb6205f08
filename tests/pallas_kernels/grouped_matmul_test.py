"""Products of rows with their groups' matrices, and what a group is given back."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import UnsupportedImplementation, grouped_matmul, row_alignment
from pallas_kernels.grouped_matmul import mosaic_tpu, reference, triton_gpu, xla
from pallas_kernels.grouped_matmul.layout import spread
from pallas_kernels.target import lowering_for
from rmt_tpu.estimator.tuning import ptxas_usage
from tests import cuda
from tests.closeness import assert_close
from tests.tiers import later
from tests.tpu import device_of, place_on

# Of a group: none, one row, more than a tile of the kernel; and rows that are of none.
SIZES = np.array([5, 0, 140, 1, 37], np.int32)
M, K, N = 200, 24, 136
# Of the largest value: sums of up to 140 numbers, rounded at the end.
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}


def arguments(dtype):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(dtype)
    return draw(M, K), draw(len(SIZES), K, N), draw(M, N)


def plain(rows, matrices, d_products, sizes=SIZES):
    """Products of the rows of some group, and the gradients of rows and matrices."""
    rows, matrices, d_products = (np.float64(x) for x in (rows, matrices, d_products))
    ends = np.cumsum(sizes)
    products, d_rows, d_matrices = [], [], []
    for matrix, end, size in zip(matrices, ends, sizes, strict=True):
        own = slice(end - size, end)
        products.append(rows[own] @ matrix)
        d_rows.append(d_products[own] @ matrix.T)
        d_matrices.append(rows[own].T @ d_products[own])
    return np.concatenate(products), np.concatenate(d_rows), np.stack(d_matrices)


def given_back(module, sizes=SIZES, **options):
    """A compiled function of rows, matrices and d_products that has all of an implementation."""
    sizes = jnp.asarray(sizes)

    def run(rows, matrices, d_products):
        products = module.product(rows, matrices, sizes, **options)
        d_rows = module.product(d_products, matrices, sizes, transposed=True, **options)
        return products, d_rows, module.of_matrices(rows, d_products, sizes, **options)

    return jax.jit(run)


def of_the_op(rows, matrices, d_products):
    op = lambda *given: grouped_matmul(*given, jnp.asarray(SIZES))
    products, pull_back = jax.vjp(op, rows, matrices)
    return products, *pull_back(d_products)


RUNS = {
    "op": jax.jit(of_the_op),
    "xla": given_back(xla),
    "mosaic_tpu": given_back(mosaic_tpu, interpret=True),
    "triton": given_back(triton_gpu, interpret=True),
}


@pytest.mark.parametrize(
    "run, dtype",
    [
        ("op", "float32"),
        ("mosaic_tpu", "float32"),
        ("triton", "float32"),
        *later(*((run, "bfloat16") for run in ("xla", "mosaic_tpu", "triton")), ("xla", "float32")),
    ],
)
def test_each_row_meets_its_group_s_matrix(run, dtype):
    """Rows of none are not a number, of products too, and are in nobody's gradient."""
    rows, matrices, d_products = arguments(dtype)
    rows[SIZES.sum() :] = d_products[SIZES.sum() :] = np.nan
    products, d_rows, d_matrices = RUNS[run](rows, matrices, d_products)
    of_some = lambda x: x[: SIZES.sum()]
    want = plain(*arguments(dtype))
    assert_close((of_some(products), of_some(d_rows), d_matrices), want, TOLERANCE[dtype])


def test_the_reference_is_the_plain_product():
    rows, matrices, d_products = arguments("float32")
    given = map(jnp.asarray, (rows, matrices, SIZES))
    products = reference.grouped_matmul(*given)
    want, *_ = plain(rows, matrices, d_products)
    assert_close(products, np.pad(want, [(0, M - len(want)), (0, 0)]), TOLERANCE["float32"])


def with_gradient(topology, rows, groups, inner, columns, dtype="bfloat16", alignment=1):
    """The op with its gradients, compiled for a chip."""

    def run(rows, matrices, d_products, sizes):
        op = lambda *given: grouped_matmul(*given, sizes, alignment=alignment)
        products, pull_back = jax.vjp(op, rows, matrices)
        return products, *pull_back(d_products)

    place = place_on(topology)
    given = (
        place(dtype, rows, inner),
        place(dtype, groups, inner, columns),
        place(dtype, rows, columns),
        place("int32", groups),
    )
    with lowering_for(device_of(topology).device_kind):
        return jax.jit(run).lower(*given).compile()


@pytest.mark.compile
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_the_gradient_on_a_tpu_costs_what_rows_cost(topology):
    """Twice the product's FLOPs, and not as many again for each of 64 matrices."""
    program = with_gradient(topology, 4096, 64, 768, 512, alignment=64)
    assert 0.9 < program.cost_analysis()["flops"] / (6 * 4096 * 768 * 512) < 1.2


@pytest.mark.compile
@pytest.mark.parametrize(
    "topology, sizes, options",
    [
        # Kimi Linear's 48B, DeepSeek-V3, a few tokens for many experts, and odd sizes.
        ("v6e:2x2", (8192, 8, 2304, 2048), {"alignment": 256}),
        ("v4:2x2x1", (8192, 8, 1024, 2304), {"alignment": 128}),
        ("v5e:2x2", (1024, 4, 768, 512), {"alignment": 128, "dtype": "float32"}),
        ("v4:2x2x1", (1024, 4, 2048, 1536), {"alignment": 128, "dtype": "float32"}),
        ("v5p:2x2x1", (64, 256, 2304, 2048), {}),
        *later(
            ("v5p:2x2x1", (8192, 8, 2304, 2048), {"alignment": 128}),
            ("tpu7x:2x2x1", (8192, 8, 7168, 4096), {"alignment": 256}),
            ("v4:2x2x1", (1024, 4, 7168, 2048), {"alignment": 128}),
            ("v4:2x2x1", (1024, 4, 16384, 8), {"alignment": 128}),
            ("v5p:2x2x1", (1024, 4, 4096, 14336), {"alignment": 128, "dtype": "float32"}),
            ("v6e:2x2", (4096, 4, 7168, 4096), {"alignment": 512, "dtype": "float32"}),
            ("v5e:2x2", (1024, 4, 7168, 2048), {"alignment": 128, "dtype": "float32"}),
            ("v5e:2x2", (300, 5, 200, 136), {"dtype": "float32"}),
        ),
    ],
)
def test_experts_of_many_sizes_compile_for_tpus(topology, sizes, options):
    program = with_gradient(topology, *sizes, **options).as_text()
    assert program.count("tpu_custom_call") == 3


KERNELS = ["grouped_matmul", "grouped_matmul_of_matrices", "grouped_matmul_transposed"]


def of_experts(dtype):
    """The op with its gradient, of 64 groups, and the shapes of what it is given."""
    array = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype)
    given = array(4096, 768), array(64, 768, 512), array(4096, 512), array(64, dtype="int32")

    def run(rows, matrices, d_products, sizes):
        products, pull_back = jax.vjp(lambda *x: grouped_matmul(*x, sizes), rows, matrices)
        return products, *pull_back(d_products)

    return run, *given


def test_on_gpus_nothing_is_dense_over_groups():
    program = cuda.lowered(*of_experts("bfloat16"))
    assert "chlo.ragged_dot" not in program and "stablehlo.dot_general" not in program
    assert sorted(set(re.findall(r'"(grouped_matmul\w*)"', program))) == KERNELS


def test_experts_of_any_size_have_kernels_on_gpus():
    """Offsets into an array of more than 2^32 bytes have 64 bits."""
    array = lambda *shape, dtype="bfloat16": jax.ShapeDtypeStruct(shape, dtype)
    rows, matrices = array(4096, 7168), array(384, 7168, 2048)
    program = cuda.lowered(grouped_matmul, rows, matrices, array(384, dtype="int32"))
    assert matrices.size > 2**32 and "grouped_matmul" in program
    assert "chlo.ragged_dot" not in program


@pytest.mark.compile
@pytest.mark.parametrize(
    "dtype, target",
    [
        ("bfloat16", "sm_90"),
        *later(("float32", "sm_90"), *(("bfloat16", t) for t in cuda.TARGETS if t != "sm_90")),
    ],
)
def test_compiles_for_each_gpu_without_spilling(dtype, target, tmp_path):
    program = cuda.ptx(*of_experts(dtype), target=target, folder=tmp_path)
    kernels = {k: v for k, v in ptxas_usage(program).items() if k.startswith("grouped_matmul")}
    assert sorted(kernels) == KERNELS
    assert not any(use.spilled for use in kernels.values()), kernels
    assert re.search(r"ld\.global\S*\.v4\.|cp\.async\S* .*16", program), "16 bytes at a time"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rows": np.zeros(3, np.float32)}, "rows .M, K. must be an array of floats with 2 axes"),
        (
            {"matrices": np.zeros((2, 2, 5), np.float32)},
            r"matrices float32.2, 2, 5. do not fit rows float32.4, 3.: matrices .G, K, N. and rows",
        ),
        (
            {"sizes": np.zeros(1, np.int32)},
            "sizes is int32.1., but must be 2 integers, one per matrix",
        ),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(unannotated, changes, message):
    given = {"rows": np.zeros((4, 3), np.float32), "matrices": np.zeros((2, 3, 5), np.float32)}
    with pytest.raises(ValueError, match=message):
        grouped_matmul(**given | {"sizes": np.zeros(2, np.int32)} | changes)


def test_a_kernel_that_cannot_serve_says_why(unannotated):
    given = np.zeros((4, 3)), np.zeros((2, 3, 5)), np.zeros(2, np.int32)
    with pytest.raises(UnsupportedImplementation, match="'cudnn' is unknown"):
        grouped_matmul(*given, implementation="cudnn")
    with jax.enable_x64(True), pytest.raises(UnsupportedImplementation, match="rows of float64"):
        grouped_matmul(*given, implementation="mosaic_tpu")


# Groups whose sizes are known to be multiples of a number ----------------------------------------

ALIGNED = np.array([32, 0, 160, 16, 48], np.int32)


@pytest.mark.parametrize(
    "kind, dtype",
    [
        ("TPU v5", "float32"),
        *later(*(("TPU v5", "bfloat16"), ("TPU v5 lite", "float32"), ("TPU v6 lite", "bfloat16"))),
    ],
)
def test_aligned_groups_are_multiplied_as_they_are(kind, dtype):
    """One or two cores share 16 tiles of 16 rows, and another tile belongs to no group."""
    rng = np.random.default_rng(2)
    draw = lambda *shape: rng.normal(size=shape).astype(dtype)
    rows, matrices, d_products = draw(272, 256), draw(5, 256, 384), draw(272, 384)
    want = plain(rows, matrices, d_products, ALIGNED)
    rows[256:] = d_products[256:] = np.nan
    options = {"alignment": 16, "interpret": True}
    with lowering_for(kind):
        found = given_back(mosaic_tpu, ALIGNED, **options)(rows, matrices, d_products)
    products, d_rows, d_matrices = found
    assert_close((products[:256], d_rows[:256], d_matrices), want, TOLERANCE[dtype])


@pytest.mark.parametrize("sizes", [[0, 0, 0], [0, 16, 0], [48, 0, 0], [16, 16, 16]])
def test_cores_share_few_tiles(sizes):
    """No tile, one, or three tiles, which two cores process."""
    sizes = np.array(sizes, np.int32)
    rng = np.random.default_rng(3)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    rows, matrices, d_products = draw(48, 128), draw(3, 128, 128), draw(48, 128)
    options = {"alignment": 16, "interpret": True}
    with lowering_for("TPU v5"):
        found = given_back(mosaic_tpu, sizes, **options)(rows, matrices, d_products)
    products, d_rows, d_matrices = found
    count = sizes.sum()
    want = plain(rows, matrices, d_products, sizes)
    assert_close((products[:count], d_rows[:count], d_matrices), want, TOLERANCE["float32"])


def test_rows_are_moved_apart_and_together():
    """Each group begins at a multiple of 8, and zeros follow its rows."""
    sizes, rows = jnp.asarray(SIZES), jnp.arange(1.0, M + 1)[:, None]
    apart = spread(M, sizes, 8)
    moved = np.asarray(apart(rows))[:, 0]
    assert apart.sizes.tolist() == [8, 0, 144, 8, 40] and len(moved) == (M + 5 * 7) // 8 * 8
    first = np.r_[1:6, [0] * 3, 6:146, [0] * 4, 146, [0] * 7, 147:184, [0] * 3]
    np.testing.assert_array_equal(moved, np.r_[first, [0] * (len(moved) - len(first))])
    count = SIZES.sum()
    np.testing.assert_array_equal(apart.back(apart(rows))[:count], rows[:count])


@pytest.mark.parametrize(
    "kind, rows, groups, want",
    [
        ("TPU v5 lite", 65536, 32, 128),
        ("TPU v6 lite", 65536, 32, 256),
        ("TPU v6 lite", 4095, 32, 64),
        ("TPU v5", 64, 256, 16),
    ],
)
def test_tiles_have_the_rows_of_a_matrix_unit_or_of_a_group(kind, rows, groups, want):
    with lowering_for(kind):
        assert row_alignment(rows, groups) == want


def test_groups_need_no_alignment_without_a_tpu():
    assert row_alignment(65536, 32) == 1
    with lowering_for("NVIDIA H100 80GB HBM3"):
        assert row_alignment(65536, 32) == 1


def blocks(kind, K, N, dtype, alignment=None):
    """The blocks of a product, of its transpose and of the gradient of the matrices."""
    array = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    rows, d_products, sizes = array(65536, K), array(65536, N), np.zeros(32, np.int32)
    with lowering_for(kind):
        alignment = alignment or row_alignment(65536, 32)
        found = (
            mosaic_tpu._of_product(rows, N, sizes, alignment),
            mosaic_tpu._of_product(d_products, K, sizes, alignment),
            mosaic_tpu._of_matrices(rows, d_products, sizes, alignment),
        )
    return tuple(x and tuple(x) for x in found)


@pytest.mark.parametrize(
    "call, want",
    [
        (
            ("TPU v5 lite", 2304, 2048, "bfloat16"),
            ((128, 2304, 2048), (128, 2048, 2304), (128, 2304, 2048)),
        ),
        (
            ("TPU v5", 2304, 2048, "bfloat16"),
            ((128, 2304, 2048), (128, 2048, 2304), (128, 2304, 1024)),
        ),
        # A smaller tile is taken if a larger one does not fit.
        (
            ("TPU v4", 14336, 4096, "bfloat16"),
            ((64, 14336, 128), (128, 4096, 512), (128, 7168, 128)),
        ),
        (
            ("TPU v4", 2048, 8192, "bfloat16", 512),
            ((512, 2048, 512), (256, 8192, 128), (512, 2048, 256)),
        ),
        # Rows of 8 numbers take as much VMEM as rows of 128.
        (("TPU v4", 16384, 8, "bfloat16"), ((64, 16384, 8), (128, 8, 8192), (128, 8192, 8))),
    ],
)
def test_blocks_fit_vmem(call, want):
    assert blocks(*call) == want


def test_calls_without_a_kernel_say_why():
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
    refused = lambda *given, **options: mosaic_tpu.unsupported("product", *given, sizes, **options)
    with lowering_for("TPU v4"):
        given = shape(4096, 14400), shape(8, 14400, 4100)
        assert refused(*given) == "matrices [14400, 4100] of float32 do not fit in VMEM"
    with lowering_for("TPU v5 lite"):
        assert refused(*given, alignment=16) is not None
        few = refused(shape(70, 1), shape(8, 1, 128))
        assert few == "rows of one number (legal: at least 2)"
        many = refused(shape(2**20, 128), shape(8, 128, 128), alignment=16)
        assert many == "1048576 rows in tiles of 16 (legal: at most 524288)"
        assert refused(shape(2**20, 128), shape(8, 128, 128)) is None


def test_an_alignment_below_1_is_refused(unannotated):
    given = np.zeros((4, 3), np.float32), np.zeros((2, 3, 5), np.float32), np.zeros(2, np.int32)
    with pytest.raises(ValueError, match="alignment is 0, but must be at least 1"):
        grouped_matmul(*given, alignment=0)
