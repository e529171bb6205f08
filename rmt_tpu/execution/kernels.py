"""How a model's ops are computed: which implementations they run, and how exact products are."""

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
    """The dtype of a name; "auto" is float32 on CPU and bfloat16 elsewhere."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


@contextlib.contextmanager
def preferred(config: cfg.ModelConfig) -> Iterator[None]:
    """Within, ops are computed as the config has it.

    Those that are asked for no implementation take `config.kernels`; "auto" changes nothing. Where
    the compute dtype is at least float32, products are of float32 on every device: by themselves
    TPUs round what is multiplied to bfloat16, and GPUs to TF32. A precision that is set already
    (`JAX_DEFAULT_MATMUL_PRECISION`) stays, and bfloat16 models are not concerned.

    A backward pass is traced where the gradient is taken, and takes it where that is within too.
    """
    wide = compute_dtype(config.compute_dtype).itemsize >= 4
    with contextlib.ExitStack() as stack:
        if config.kernels != "auto":
            stack.enter_context(preferring(config.kernels))
        if wide and jax.config.jax_default_matmul_precision is None:
            stack.enter_context(jax.default_matmul_precision("highest"))
        yield


def as_configured(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a decoder and more, all of it within `preferred` of the decoder's config.

    It says in a line that it has no derivatives in forward mode.
    """

    @functools.wraps(function)
    def run(decoder: Any, *args: Any, **options: Any) -> Any:
        with preferred(decoder.config), reverse_mode_alone(type(decoder).__name__):
            return function(_varying(decoder, (args, options)), *args, **options)

    return run


def _varying(decoder: Any, given: Any) -> Any:
    """The decoder, within a `jax.shard_map` that checks it varying over a mesh as what it is given.

    What loops carry, and gradients of one's own, then vary alike; JAX sums up those of parameters.
    """
    varies = varies_in(given)
    if not varies:
        return decoder
    graph, params, others = nnx.split(decoder, nnx.Param, ...)
    return nnx.merge(graph, jax.tree.map(lambda x: varying(x, varies), params), others)


def as_here(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass whose products are as exact as those of where this is called.

    For `jax.custom_vjp`: its backward pass is traced later, where the gradient is taken.
    """
    precision = jax.config.jax_default_matmul_precision

    @functools.wraps(backward)
    def run(*args: Any) -> Any:
        with jax.default_matmul_precision(precision):
            return backward(*args)

    return run
