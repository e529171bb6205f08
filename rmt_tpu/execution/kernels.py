"""The implementations of a model's ops, and the precision of its products."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.platform import preferring, reverse_mode_alone, varies_in, varying
from rmt_tpu import config as cfg


def compute_dtype(name: cfg.DType) -> jnp.dtype:
    """Return the dtype of a name; "auto" is float32 on CPU and bfloat16 elsewhere."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


@contextlib.contextmanager
def preferred(config: cfg.ModelConfig) -> Iterator[None]:
    """Compute ops as the config says, within this context.

    Ops that are called without an implementation use `config.kernels`; "auto" changes nothing.
    Where the compute dtype is at least float32, products are in float32 on every device: by default
    TPUs round factors to bfloat16, and GPUs to TF32. A precision that is set already
    (`JAX_DEFAULT_MATMUL_PRECISION`) stays, and bfloat16 models are not affected.

    A backward pass is traced where the gradient is taken, so it uses the config's implementations
    only if that place is within this context too.
    """
    wide = compute_dtype(config.compute_dtype).itemsize >= 4
    with contextlib.ExitStack() as stack:
        if config.kernels != "auto":
            stack.enter_context(preferring(config.kernels))
        if wide and jax.config.jax_default_matmul_precision is None:
            stack.enter_context(jax.default_matmul_precision("highest"))
        yield


def as_configured(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function whose first argument is a decoder to run within `preferred`.

    Forward-mode differentiation of the function raises a one-line error.
    """

    @functools.wraps(function)
    def run(decoder: Any, *args: Any, **options: Any) -> Any:
        with preferred(decoder.config), reverse_mode_alone(type(decoder).__name__):
            return function(_varying(decoder, (args, options)), *args, **options)

    return run


def _varying(decoder: Any, given: Any) -> Any:
    """Return the decoder, marked as varying over the same mesh axes as its inputs.

    That matters within a `jax.shard_map` that checks which arrays vary: what loops carry, and
    gradients of custom backward passes, then vary alike. JAX sums up the gradients of parameters.
    """
    varies = varies_in(given)
    if not varies:
        return decoder
    graph, params, others = nnx.split(decoder, nnx.Param, ...)
    return nnx.merge(graph, jax.tree.map(lambda x: varying(x, varies), params), others)


def as_here(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backward pass whose products have the precision in force where this is called.

    It is for `jax.custom_vjp`, whose backward pass is traced later, where the gradient is taken.
    """
    precision = jax.config.jax_default_matmul_precision

    @functools.wraps(backward)
    def run(*args: Any) -> Any:
        with jax.default_matmul_precision(precision):
            return backward(*args)

    return run
