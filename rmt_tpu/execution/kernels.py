"""The choice of kernels for a model's ops, and of the precision of matrix products."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import sharding
from pallas_kernels.platform import preferring, reverse_mode_alone, varies_in, varying
from pallas_kernels.target import lowering_only_for, platform_of, slug
from rmt_tpu import config as cfg


def compute_dtype(name: cfg.DType) -> jnp.dtype:
    """Return the dtype with this name; "auto" means float32 on CPUs and bfloat16 elsewhere."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


@contextlib.contextmanager
def preferred(config: cfg.ModelConfig) -> Iterator[None]:
    """Make a model's ops use the configured implementations in the body of the `with` statement.

    Ops that are called without an explicit implementation use `config.kernels`; "auto" changes
    nothing. If the compute dtype is at least float32, matrix products use float32 precision on
    every device. By default TPUs would round the factors to bfloat16, and GPUs to TF32. A precision
    that is already set (`JAX_DEFAULT_MATMUL_PRECISION`) is kept, and bfloat16 models are not
    affected.

    The gradient must be computed inside this context, too. Otherwise the backward pass does not use
    the configured implementations.
    """
    wide = compute_dtype(config.compute_dtype).itemsize >= 4
    with contextlib.ExitStack() as stack:
        if config.kernels != "auto":
            stack.enter_context(preferring(config.kernels))
        if wide and jax.config.jax_default_matmul_precision is None:
            stack.enter_context(jax.default_matmul_precision("highest"))
        yield


def per_device(
    function: Callable[..., Any], mesh: jax.sharding.Mesh, *specs: Any, **options: Any
) -> Callable[..., Any]:
    """Return `sharding.per_device(function, mesh, *specs, **options)`, for the mesh's devices only.

    JAX code can be lowered for several platforms, so an op normally traces one implementation per
    platform. This function saves the time for tracing the others: an op in `function` traces only
    its implementation for the mesh's kind of device. The result can be lowered only for such
    devices.
    """
    device = mesh.devices.flat[0]
    if not _runs_known_kernels(device.platform, device.device_kind):
        return sharding.per_device(function, mesh, *specs, **options)

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        with lowering_only_for(device.device_kind):
            return function(*args)

    return sharding.per_device(run, mesh, *specs, **options)


def _runs_known_kernels(platform: str, kind: str) -> bool:
    """Return whether the name of a device's kind determines which kernels the device can run.

    The names of some GPUs, such as "Tesla T4", do not show whether the GPU runs CUDA.
    """
    return platform in ("cpu", "tpu") or platform_of(slug(kind)) is not None


def as_configured(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function whose first argument is a decoder, so that it runs within `preferred`.

    Forward-mode differentiation of the decorated function raises an error with a one-line message.
    """

    @functools.wraps(function)
    def run(decoder: Any, *args: Any, **options: Any) -> Any:
        with preferred(decoder.config), reverse_mode_alone(type(decoder).__name__):
            return function(_varying(decoder, (args, options)), *args, **options)

    return run


def _varying(decoder: Any, inputs: Any) -> Any:
    """Return the decoder with its parameters marked as varying over the inputs' mesh axes.

    `jax.shard_map` checks over which mesh axes arrays vary. With this mark, the carries of loops
    and the gradients of custom backward passes pass the check. JAX then sums the parameters'
    gradients over these axes.
    """
    varies = varies_in(inputs)
    if not varies:
        return decoder
    graph, params, others = nnx.split(decoder, nnx.Param, ...)
    return nnx.merge(graph, jax.tree.map(lambda x: varying(x, varies), params), others)


def at_current_precision(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make `backward` use the matrix product precision that is set now.

    `backward` is the backward pass of a `jax.custom_vjp`. JAX traces it later, when a different
    precision may be set.
    """
    precision = jax.config.jax_default_matmul_precision

    @functools.wraps(backward)
    def run(*args: Any) -> Any:
        with jax.default_matmul_precision(precision):
            return backward(*args)

    return run
