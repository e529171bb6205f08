"""Products of a few rows with one layer's matrices: against float64 NumPy, and compiled."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import UnsupportedImplementation, product_at
from pallas_kernels.stacked_product import mosaic_tpu, reference, xla
from pallas_kernels.target import lowering_for
from tests.closeness import assert_close
from tests.tiers import later
from tests.tpu import place_on

LAYERS, LAYER = 3, 2
# Of the largest value: results of bfloat16 are rounded once, and sums of float32 have 300 terms.
TOLERANCE = {"bfloat16": 2.0**-8, "float32": 2e-6}
# Rows, matrices, K, N, and the dtypes of rows and matrices. One row and blocks of no whole tiles;
# several blocks that divide N; several that do not, of one matrix and of two.
CASES = [
    (1, 2, 72, 60, "float32", "float32"),
    (5, 2, 40, 3 * 128, "bfloat16", "bfloat16"),
    (33, 1, 136, 300, "bfloat16", "float32"),
    (3, 2, 40, 300, "float32", "float32"),
    *later(((256, 3, 300, 256, "bfloat16", "bfloat16"),), ((1, 1, 8, 1, "float32", "bfloat16"),)),
]


def arguments(T, P, K, N, of_rows, of_matrices):
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.normal(size=(T, K)), of_rows)
    matrices = jnp.asarray(rng.normal(size=(LAYERS, P, K, N)), of_matrices)
    # A layer that is not asked for must not matter.
    return rows, matrices.at[LAYER - 1].set(jnp.nan)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_are_those_of_float64(case):
    rows, matrices = arguments(*case)

    @jax.jit
    def run(rows, matrices, layer):
        return {
            "kernel": mosaic_tpu.product(rows, matrices, layer, interpret=True),
            "xla": xla.product(rows, matrices, layer),
            "reference": reference.product(rows, matrices, layer),
            "op": product_at(LAYER, rows, matrices),
        }

    wide = [np.float64(m.astype(rows.dtype)) for m in matrices[LAYER]]
    want = np.concatenate([np.float64(rows) @ m for m in wide], axis=-1)
    for name, found in run(rows, matrices, jnp.int32(LAYER)).items():
        assert found.dtype == rows.dtype, name
        assert_close(found, want, TOLERANCE[case[4]])


def test_bad_arguments_are_told_in_a_line(unannotated):
    rows, matrices = arguments(*CASES[0])
    with pytest.raises(ValueError, match=re.escape("rows [T, K] is [1, 71], and matrices")):
        product_at(0, rows[:, 1:], matrices)
    with pytest.raises(ValueError, match=re.escape("matrices [L, P, K, N] must be an array")):
        product_at(0, rows, matrices[0])
    with pytest.raises(ValueError, match=re.escape("[3, 0, 72, 24]; legal: axes of at least")):
        product_at(0, rows, jnp.zeros((3, 0, 72, 24)))
    many = jnp.zeros((257, 72))
    for told, given in {"257 rows": many, "neither bfloat16": many[:1].astype("float16")}.items():
        with pytest.raises(UnsupportedImplementation, match=told):
            product_at(0, given, matrices, implementation="mosaic_tpu")


@pytest.mark.parametrize(
    "kind, P, K, N, columns",
    [
        ("TPU v5 lite", 2, 1024, 2816, 11 * 128),  # 22 tiles
        ("TPU v5 lite", 1, 1024, 2816, 2 * 128),  # at least 4 steps: at most 5 tiles
        ("TPU v5 lite", 1, 4096, 1024, 2 * 128),
        ("TPU v5 lite", 3, 1264, 1088, 6 * 128),  # 8.5 tiles
        ("TPU v5 lite", 1, 28672, 8192, 128),
        ("TPU v4", 1, 28672, 8192, None),
        ("TPU v4", 1, 8192, 28672, 128),
    ],
)
def test_blocks_divide_columns_and_fit(kind, P, K, N, columns):
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    given = array(64, K), array(2, P, K, N)
    with lowering_for(kind):
        refused = mosaic_tpu.unsupported("product", *given, None)
    assert mosaic_tpu._columns(given[1]) == columns or (refused and "VMEM" in refused)
    assert (refused is None) == (columns is not None)


@pytest.mark.compile
@pytest.mark.parametrize(
    "topology, case",
    [
        ("v4:2x2x1", (256, 2, 1024, 2816, "bfloat16", "bfloat16")),
        ("v5e:2x2", (1, 3, 1088, 1088, "bfloat16", "bfloat16")),
        ("v5p:2x2x1", (1, 2, 1024, 2816, "bfloat16", "bfloat16")),
        ("v6e:2x2", (256, 1, 5040, 1264, "bfloat16", "float32")),
        ("tpu7x:2x2x1", (33, 2, 1088, 1088, "float32", "float32")),
    ],
)
def test_compiles_and_copies_no_weights(topology, case):
    """A loop over layers copies neither a layer's weights nor the whole stack to VMEM."""
    T, P, K, N, of_rows, of_matrices = case
    place = place_on(topology)
    given = place(of_rows, T, K), place(of_matrices, LAYERS, P, K, N)

    @jax.jit
    def layers(rows, matrices):
        def body(rows, layer):
            products = product_at(layer, rows, matrices)
            return rows + jnp.mean(products, axis=-1, keepdims=True), None

        return jax.lax.scan(body, rows, jnp.arange(LAYERS))[0]

    text = layers.lower(*given).compile().as_text()
    assert len(re.findall(r"custom-call.*/stacked_product/", text)) == 1
    assert not re.search(rf"\[{LAYERS},{P},{K},{N}\]\{{[^}}]*S\(1\)", text)
    size = P * K * N
    shapes = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|transpose|dynamic-slice|fusion)\(", text)
    assert all(np.prod([int(n) for n in shape.split(",")]) < size for shape in shapes)
