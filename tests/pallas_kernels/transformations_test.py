"""Every public op under transformations of JAX's."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import pallas_kernels
from pallas_kernels.platform import interpreting
from tests.closeness import assert_close
from tests.pallas_kernels.public_ops import CALLS
from tests.tiers import later
from tests.tpu import place_on


def wide(x):
    """In float32 for bfloat16, which not every CPU multiplies."""
    return jnp.asarray(x, jnp.float32 if x.dtype == jnp.bfloat16 else x.dtype)


def test_every_public_op_is_tested():
    ops = {x for x in pallas_kernels.__all__ if inspect.isfunction(getattr(pallas_kernels, x))}
    assert ops - {"row_alignment", "write_slice", "read_slices"} == CALLS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("op", CALLS)
def test_kernels_where_64_bits_are_the_default(op):
    call = CALLS[op]
    long = lambda x: x.astype(np.int64) if x.dtype == np.int32 else x
    with jax.enable_x64(True):
        traced = jax.jit(lambda given: call.run("pallas", given)).trace(
            {name: long(x) for name, x in call.given.items()}
        )
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
        assert text.count("tpu_custom_call") == call.kernels


def fast_first(first, ops):
    """One op with every commit, which is another one in each test."""
    return [first, *later(*(op for op in ops if op != first))]


@pytest.mark.parametrize("op", fast_first("causal_attention", CALLS))
def test_where_a_shard_map_checks_what_varies(op):
    call = CALLS[op]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    divided, whole = PartitionSpec("data"), PartitionSpec()
    specs = {name: divided if name in call.data else whole for name in call.given}
    floats = [n for n, x in call.given.items() if jnp.issubdtype(x.dtype, jnp.floating)]

    def of_a_device(given):
        if not call.gradients:
            return call.op(None, **given)
        of_all = lambda own: jax.lax.psum(call.loss(None, given | own), "data")
        return jax.grad(of_all)({name: given[name] for name in floats})

    results = {name: specs[name] for name in floats} if call.gradients else divided
    run = jax.shard_map(of_a_device, mesh=mesh, in_specs=(specs,), out_specs=results)
    jax.eval_shape(run, call.given)
    given = jax.tree.map(wide, call.given)
    wanted = jax.jit(lambda given: call.run(None, given))(given)
    jax.tree.map(lambda x, y: assert_close(x, y, 1e-5), jax.jit(run)(given), wanted)


# JAX has no vmap of a ragged product with matrices that are not mapped.
MAPPED_OPS = sorted(CALLS.keys() - {"grouped_matmul"})


def over_one_more_axis(call, given):
    """The same twice with rows in another order; both in one, and the axes to map."""
    turned = {n: x[::-1] if n in call.data else x for n, x in given.items()}
    both = {n: jnp.stack([x, turned[n]]) if n in call.data else x for n, x in given.items()}
    return turned, both, {n: 0 if n in call.data else None for n in given}


WITH_GRADIENTS = sorted(op for op, call in CALLS.items() if call.gradients)


@pytest.mark.parametrize("op", fast_first("store_norm_retrieve", WITH_GRADIENTS))
def test_gradients_of_a_scan_of_checkpoints(op):
    """Gradients equal those of each call alone; gradients of shared arguments are added up."""
    call = CALLS[op]
    given = {name: wide(x) for name, x in call.given.items()}
    turned, both, _ = over_one_more_axis(call, given)
    floats = {n: x for n, x in both.items() if jnp.issubdtype(x.dtype, jnp.floating)}

    def in_turn(floats):
        arrays = both | floats
        data, whole = ({n: arrays[n] for n in names} for names in (call.data, call.whole))
        one = lambda total, data: (total + call.loss(None, data | whole), None)
        return jax.lax.scan(jax.checkpoint(one), 0.0, data)[0]

    alone = jax.jit(lambda given: call.run(None, given))
    first, second = alone(given), alone(turned)
    wanted = {
        n: jnp.stack([x, second[n]]) if n in call.data else x + second[n] for n, x in first.items()
    }
    jax.tree.map(lambda x, y: assert_close(x, y, 1e-5), jax.jit(jax.grad(in_turn))(floats), wanted)


@pytest.mark.parametrize("op", fast_first("depth_attention", MAPPED_OPS))
def test_plain_jax_over_one_more_axis(op):
    """Results, or gradients: each alone is what all together are."""
    call = CALLS[op]
    given = {name: wide(x) for name, x in call.given.items()}
    turned, both, axes = over_one_more_axis(call, given)
    run = lambda given: call.run(None, given)
    if op == "delta_attention":  # jax 0.10.2 crashes on a CPU in gradients over one more axis
        run = lambda given: call.op(None, **given)
    alone = jax.jit(run)
    apart = jax.tree.map(lambda *x: jnp.stack(x), alone(given), alone(turned))
    together = jax.jit(jax.vmap(run, in_axes=(axes,)))(both)
    jax.tree.map(lambda x, y: assert_close(x, y, 1e-5), together, apart)


WITH_KERNELS = sorted(op for op in MAPPED_OPS if CALLS[op].kernels)


@pytest.mark.slow
@pytest.mark.parametrize("op", WITH_KERNELS)
def test_kernels_over_one_more_axis(op):
    """Results, or gradients, of interpreted kernels: each alone is what all together are."""
    call = CALLS[op]
    turned, both, axes = over_one_more_axis(call, call.given)
    run = lambda given: call.run("pallas", given)
    with interpreting():
        alone = jax.jit(run)
        apart = jax.tree.map(lambda *x: jnp.stack(x), alone(call.given), alone(turned))
        with jax.enable_x64(True):
            together = jax.jit(jax.vmap(jax.jit(run), in_axes=(axes,)))(both)
    jax.tree.map(lambda x, y: assert_close(x, y, 1e-5), together, apart)


@pytest.mark.compile
@pytest.mark.parametrize("op", WITH_KERNELS)
def test_kernels_over_two_more_axes_compile_for_a_tpu(op):
    call = CALLS[op]
    place = place_on("v5e:2x2")
    given = {
        n: place(x.dtype, *((2, 3) if n in call.data else ()), *x.shape)
        for n, x in call.given.items()
    }
    axes = {n: 0 if n in call.data else None for n in given}
    one = lambda given: call.run("pallas", given)
    run = jax.vmap(jax.vmap(one, in_axes=(axes,)), in_axes=(axes,))
    text = jax.jit(run).lower(given).compile().as_text()
    assert text.count("tpu_custom_call") >= call.kernels


# Kernels of JAX's library, or products that are not those of `pallas_kernels.products`.
OF_LIBRARIES = ("grouped_matmul", "logits_with_sums", "sums_of_rows")
OTHERS = sorted(op for op in CALLS if CALLS[op].kernels and op not in OF_LIBRARIES)


@pytest.mark.parametrize("op", [*OF_LIBRARIES, *later(*OTHERS)])
def test_a_precision_that_is_set_does_not_reach_kernels_in_bfloat16(op):
    """Mosaic would refuse "high"."""
    call = CALLS[op]
    wide = {"log_sums", "numbers"}  # sums over keys and statistics, which are float32 always
    narrow = lambda name, x: x if name in wide or x.dtype != np.float32 else x.astype(jnp.bfloat16)
    given = {name: narrow(name, x) for name, x in call.given.items()}
    with jax.default_matmul_precision("high"):
        traced = jax.jit(lambda given: call.run("pallas", given)).trace(given)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") >= call.kernels


def exported(op, *sizes):
    """An op whose data's first sizes are these, which may be known only where it is called."""
    call = CALLS[op]
    shapes = {
        name: (*sizes, *x.shape[len(sizes) :]) if name in call.data else x.shape
        for name, x in call.given.items()
    }
    given = {name: jax.ShapeDtypeStruct(shapes[name], x.dtype) for name, x in call.given.items()}
    return jax.export.export(jax.jit(lambda given: call.op(None, **given)))(given)


# Their calls go through the rows of the batch one by one.
BY_ROW = {"grouped_matmul", "rows_of_tokens", "sums_of_rows"}


@pytest.mark.parametrize("op", sorted(CALLS.keys() - BY_ROW))
def test_exported_for_any_number_of_rows(op):
    (rows,) = jax.export.symbolic_shape("b")
    assert exported(op, rows).out_avals[0].shape[0] == rows


def test_exported_for_any_number_of_tokens():
    sizes = jax.export.symbolic_shape("b, n")
    for op in ("store_norm_retrieve", "norm_retrieve", "store", "to_fixed_point"):
        assert exported(op, *sizes).out_avals[0].shape[:2] == sizes
    for op in ("causal_attention", "attention_forward", "delta_attention"):
        with pytest.raises(ValueError, match="has a symbolic number of tokens per row, n; legal"):
            exported(op, *sizes)


# JAX exports no call of cuDNN or of Triton, which these have on a GPU.
ON_GPUS = {"attention_after", "attention_backward", "attention_forward", "attention_to"}
ON_GPUS |= {"causal_attention", "grouped_matmul"}
# Plain JAX on a TPU for so few tokens.
PLAIN = {"logits_with_sums", "rows_of_tokens", "sums_of_rows"}


@pytest.mark.slow
@pytest.mark.parametrize("op", [*WITH_KERNELS, "grouped_matmul"])
def test_exported_for_several_platforms_at_once(op):
    call = CALLS[op]
    given = {name: wide(x) for name, x in call.given.items()}
    run = jax.jit(lambda given: call.run(None, given))
    platforms = ("cpu", "tpu") if op in ON_GPUS else ("cpu", "tpu", "cuda")
    exported = jax.export.export(run, platforms=platforms)(given)
    assert ("tpu_custom_call" in exported.mlir_module()) == (op not in PLAIN)
    jax.tree.map(lambda x, y: assert_close(x, y, 1e-6), exported.call(given), run(given))
