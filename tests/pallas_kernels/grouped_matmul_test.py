"""Products of rows with their groups' matrices, and what a group is given back."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import UnsupportedImplementation, grouped_matmul
from pallas_kernels.grouped_matmul import mosaic_tpu, reference, triton_gpu, xla
from pallas_kernels.token_rows import mosaic_tpu as token_rows
from rmt_tpu.estimator.tuning import ptxas_usage
from tests import cuda
from tests.closeness import assert_close
from tests.tiers import later
from tests.tpu import place_on

# Of a group: none, one row, more than a tile of the kernel; and rows that are of none.
SIZES = np.array([5, 0, 140, 1, 37], np.int32)
M, K, N = 200, 24, 136
# Of the largest value: sums of up to 140 numbers, rounded at the end.
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}


def arguments(dtype):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(dtype)
    return draw(M, K), draw(len(SIZES), K, N), draw(M, N)


def plain(rows, matrices, d_products):
    """Products of the rows of some group, and the gradients of rows and matrices."""
    rows, matrices, d_products = (np.float64(x) for x in (rows, matrices, d_products))
    ends = np.cumsum(SIZES)
    products, d_rows, d_matrices = [], [], []
    for matrix, end, size in zip(matrices, ends, SIZES, strict=True):
        own = slice(end - size, end)
        products.append(rows[own] @ matrix)
        d_rows.append(d_products[own] @ matrix.T)
        d_matrices.append(rows[own].T @ d_products[own])
    return np.concatenate(products), np.concatenate(d_rows), np.stack(d_matrices)


def given_back(module, **options):
    """A compiled function of rows, matrices and d_products that has all of an implementation."""
    sizes = jnp.asarray(SIZES)

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


@pytest.mark.compile
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_the_gradient_on_a_tpu_costs_what_rows_cost(topology):
    """Twice the product's FLOPs, and not as many again for each of 64 matrices."""
    array = place_on(topology)
    rows, columns, inner, groups = 4096, 512, 768, 64

    def run(rows, matrices, d_products, sizes):
        products, pull_back = jax.vjp(lambda *given: grouped_matmul(*given, sizes), rows, matrices)
        return products, *pull_back(d_products)

    given = (
        array("bfloat16", rows, inner),
        array("bfloat16", groups, inner, columns),
        array("bfloat16", rows, columns),
        array("int32", groups),
    )
    cost = jax.jit(run).lower(*given).compile().cost_analysis()
    assert 0.9 < cost["flops"] / (6 * rows * columns * inner) < 1.2


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


@pytest.mark.parametrize("dtype, want", [("bfloat16", [1024, 1024]), ("float32", [512, 512])])
def test_tiles_fit_the_vmem_that_kernels_have_unasked(dtype, want):
    rows, item = mosaic_tpu._ROWS, jnp.dtype(dtype).itemsize
    K, N = mosaic_tpu._of_matrix(jnp.dtype(dtype), 2304, 2048)
    assert [K, N] == want
    of_product = 2 * item * (rows * K + K * N + rows * N) + 4 * rows * N
    of_matrices = 2 * item * (rows * K + K * N + rows * N) + 4 * K * N
    assert max(of_product, of_matrices) <= 14 * 2**20


@pytest.mark.compile
def test_wide_experts_in_float32_compile():
    place = place_on("v5e:2x2")
    given = place(jnp.float32, 1024, 2304), place(jnp.float32, 2, 2304, 2048)
    loss = lambda *x: jnp.sum(grouped_matmul(*x, implementation="mosaic_tpu"))
    program = jax.jit(jax.grad(loss, (0, 1))).lower(*given, place(jnp.int32, 2)).compile()
    assert program.as_text().count("tpu_custom_call") == 2


def test_more_tiles_than_the_library_counts_are_refused():
    """JAX's kernels count tiles by a histogram, whose edges in float32 are wrong at 8192 bins."""
    shape = lambda rows: jax.ShapeDtypeStruct((rows, 128), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((1024,), jnp.int32)
    for op, rows in (("product", 4096 * 512), ("of_matrices", 2**20)):
        assert mosaic_tpu.unsupported(op, shape(rows), None, sizes) is None
    refused = mosaic_tpu.unsupported("product", shape(4096 * 512 + 1), None, sizes)
    assert refused == "2097153 rows (legal: at most 2097152)"
    choices = jax.ShapeDtypeStruct((2**22,), jnp.int32)
    refused = token_rows.unsupported("sums", shape(4096 * 256 + 1), choices, choices)
    assert refused == "1048577 rows (legal: at most 1048576)"
