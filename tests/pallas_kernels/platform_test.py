"""Implementations by the platform lowered for, not by the machine that traces."""

import runpy
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import UnsupportedImplementation
from pallas_kernels import triton as kernel_triton
from pallas_kernels.platform import (
    Implementations,
    choose,
    collecting_calls,
    interpreting,
    preferring,
    taking_plain,
)
from pallas_kernels.target import lowering_for, lowering_only_for
from tests import cuda

KERNELS = {"tpu": "tpu_custom_call", "cuda": "__gpu$xla.gpu.triton"}


def arguments(tokens=128, keys=16, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    draw = lambda dtype, *size: jnp.asarray(rng.normal(size=size), dtype)
    return (
        draw(dtype, 2, tokens, keys, 32),
        draw(jnp.float32, 4, keys),
        draw(dtype, 2, tokens, 4, 32),
        draw(jnp.float32, keys, 32),
        draw(jnp.float32, 12, keys),
    )


def lowered(platform, args, **options):
    def loss(*args):
        X, Z = pallas_kernels.store_norm_retrieve(*args, **options)
        return jnp.sum(X.astype(jnp.float32)) + jnp.sum(Z.astype(jnp.float32))

    gradients = jax.grad(loss, argnums=(0, 1, 2, 3, 4))
    if platform == "cuda":
        return cuda.lowered(gradients, *args)
    return jax.jit(gradients).trace(*args).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("platform", ["tpu", "cuda", "cpu"])
@pytest.mark.parametrize(
    "implementation, kernels_on", [("pallas", {"tpu", "cuda"}), (None, {"tpu"}), ("xla", set())]
)
def test_kernels_are_those_of_the_platform_lowered_for(implementation, kernels_on, platform):
    program = lowered(platform, arguments(), implementation=implementation)
    for other, call in KERNELS.items():
        expected = 2 if platform == other and platform in kernels_on else 0  # forward, backward
        assert program.count(call) == expected, (other, program.count(call))


@pytest.mark.parametrize("kind, served", [("TPU v99", False), ("TPU v4", True), ("TPU v6e", True)])
def test_a_tpu_that_is_not_known_has_plain_xla_with_one_warning(kind, served):
    with lowering_for(kind), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        program = lowered("tpu", arguments())
    assert ("tpu_custom_call" in program) == served
    unknown = {str(w.message) for w in seen if "an unknown kind of TPU" in str(w.message)}
    assert len(unknown) == (0 if served else 1) and all(kind in line for line in unknown)


def test_an_unsupported_shape_falls_back_with_one_warning_on_its_platform_only():
    args = arguments(tokens=8)
    with pytest.warns(UserWarning, match="no tpu kernel .* plain XLA is used: .*8 tokens") as seen:
        program = lowered("tpu", args)
    assert len({str(warning.message) for warning in seen}) == 1
    assert "tpu_custom_call" not in program
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered("cpu", args)


def test_a_named_implementation_that_cannot_serve_is_refused(unannotated):
    with pytest.raises(UnsupportedImplementation, match="'mosaic_tpu' does not .* 8 tokens.*'xla'"):
        lowered("tpu", arguments(tokens=8), implementation="mosaic_tpu")
    with pytest.raises(UnsupportedImplementation, match="'mosaic_tpu' does not .*float64"):
        with jax.enable_x64(True):
            lowered("tpu", arguments(dtype=jnp.float64), implementation="mosaic_tpu")
    with pytest.raises(UnsupportedImplementation, match="'cuda' is unknown; legal: xla, mosaic_t"):
        lowered("cpu", arguments(), implementation="cuda")


@pytest.mark.parametrize(
    "plain, served",
    [((), True), (("key_vector",), False), (("logits",), True)],
)
def test_one_op_may_be_taken_plain_whatever_is_preferred(plain, served):
    with preferring("pallas"), taking_plain(plain), taking_plain(()):
        assert ("tpu_custom_call" in lowered("tpu", arguments())) == served
    # A kernel that is asked for is taken.
    with taking_plain(["key_vector"]):
        assert "tpu_custom_call" in lowered("tpu", arguments(), implementation="mosaic_tpu")


def test_calls_that_kernels_serve_are_collected():
    def loss(data, *args):
        X, *others = args
        pallas_kernels.store_norm_retrieve(*args[:2], data, *others[1:], implementation="xla")
        stored, _ = pallas_kernels.store_norm_retrieve(X, others[0], data, *others[1:])
        return jnp.sum(stored.astype(jnp.float32))

    X, keys, data, *others = arguments()
    with collecting_calls() as calls:
        jax.eval_shape(jax.grad(loss), data, X, keys, *others)
        short = arguments(tokens=8)
        jax.eval_shape(pallas_kernels.store_norm_retrieve, *short)  # no kernel serves it
    assert [(c.name, c.op, c.platforms) for c in calls] == [
        ("key_vector", "forward", ("tpu",)),
        ("key_vector", "backward", ("tpu",)),
    ]
    assert calls[0].args[0].data.shape == data.shape and calls[0].options["norm"] == "layernorm"
    with collecting_calls() as none, taking_plain(["key_vector"]):
        jax.eval_shape(pallas_kernels.store_norm_retrieve, *arguments())
    assert not none


@pytest.mark.parametrize("implementation", [None, "pallas"])
@pytest.mark.parametrize("kind, kernels", [("TPU v5e", 1), ("cpu", 0)])
def test_where_the_devices_are_known_their_implementation_alone_is_traced(
    kind, kernels, implementation
):
    op = lambda *args: pallas_kernels.store_norm_retrieve(*args, implementation=implementation)
    with lowering_only_for(kind), collecting_calls() as calls:
        known = str(jax.make_jaxpr(op)(*arguments()))
    assert (known.count("pallas_call"), len(calls)) == (kernels, kernels)
    assert "platform_index" not in known
    # The question what another device would have is not about the devices of the mesh.
    with lowering_only_for(kind), lowering_for("TPU v5e"):
        every = str(jax.make_jaxpr(op)(*arguments()))
    assert every == str(jax.make_jaxpr(op)(*arguments())) and "platform_index" in every


def test_a_shape_without_a_kernel_is_told_where_the_devices_are_known():
    args = arguments(tokens=8)
    with lowering_only_for("TPU v5e"), pytest.warns(UserWarning, match="no tpu kernel"):
        assert "tpu_custom_call" not in lowered("tpu", args)
    with lowering_only_for("cpu"), warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered("cpu", args)


def test_kernels_are_interpreted_on_devices_that_are_known():
    with lowering_only_for("cpu"), interpreting():
        assert "pallas_call" in str(
            jax.make_jaxpr(pallas_kernels.store_norm_retrieve)(*arguments())
        )


def test_every_op_has_a_name_of_its_own():
    modules = [m for name, m in sys.modules.items() if name.startswith("pallas_kernels.")]
    values = [x for module in modules for x in vars(module).values()]
    ops = {id(x): x.name for x in values if isinstance(x, Implementations)}
    names = [*ops.values()]
    assert len(set(names)) == len(names) >= 11 and "" not in names


def test_choice_runs_batched_and_on_a_mesh():
    double = lambda x: 2 * x
    refuse = {"tpu": "too small"}
    chosen = lambda x: choose({"tpu": double, "cuda": double}, lambda x: 3 * x, x, refused=refuse)
    x = jnp.arange(8.0)
    np.testing.assert_array_equal(jax.vmap(chosen)(x), 3 * x)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")
    spread = jax.shard_map(chosen, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    np.testing.assert_array_equal(jax.jit(spread)(x), 3 * x)


def test_without_a_triton_backend_the_portable_form_serves(monkeypatch):
    """As in a jax that has it no more: the package is imported, and a named kernel refused."""
    with monkeypatch.context() as patch:
        patch.delattr("jax.experimental.pallas.triton")
        patch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
        assert runpy.run_path(kernel_triton.__file__)["plgpu"] is None
    monkeypatch.setattr(kernel_triton, "plgpu", None)
    args = arguments()
    with pytest.raises(UnsupportedImplementation, match="has no Triton backend"):
        pallas_kernels.store_norm_retrieve(*args, implementation="triton")
    sources = jnp.ones((3, 2, 4, 128))
    with pytest.raises(UnsupportedImplementation, match="has no Triton backend"):
        pallas_kernels.depth_attention(sources[0, 0, 0], sources, implementation="triton")
    jax.jit(pallas_kernels.store_norm_retrieve).lower(*args)
