"""Matrix products of tokens with weights, which kernels read from the stack of all layers.

The weights of all layers are stacked in one array. A module that computes products with `times`
lists the names of these weights in its class attribute `MULTIPLIED`. When decoding,
`refer_to_stack` replaces each weight's value by a `StackSlice`, which contains the stack and a
layer's index. A kernel can then read the layer's weights without a copy.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Shaped

import pallas_kernels
import sharding
from pallas_kernels import StackSlice
from pallas_kernels.target import target
from rmt_tpu.layers import choices
from rmt_tpu.layers.stacks import Index, in_rows, isolate


def times(
    x: Float[Array, "*tokens K"],
    *weights: nnx.Param | Array,
    gathered: int,
    isolated: bool = False,
    rows: bool = False,
) -> Float[Array, "*tokens N"]:
    """Return `x @ W`, where W joins all weights along their last axis.

    A policy of rematerialisation can keep the product by its name, "product".

    Args:
      x: the tokens' vectors, in the dtype of the products.
      *weights: matrices [K, N], or arrays of P matrices [P, K, N]. Either all or none of them are
        a `StackSlice`.
      gathered: the axis of a matrix that the mesh axis `fsdp` shards: -2 for K and -1 for N.
      isolated: whether to keep XLA from fusing the slicing of weights into the product.
      rows: whether a product that is kept has its last axis innermost; see `stacks.in_rows`.
    """
    values = [w.get_value() if isinstance(w, nnx.Variable) else w for w in weights]
    if isinstance(values[0], StackSlice):
        rows = x.reshape(-1, x.shape[-1])
        products = [pallas_kernels.product_at(w.index, rows, _as_stacks(w)) for w in values]
        return jnp.concatenate(products, axis=-1).reshape(*x.shape[:-1], -1)
    values = [sharding.gather(w.astype(x.dtype), "fsdp", axis=w.ndim + gathered) for w in values]
    matrices = [m for w in values for m in (w if w.ndim > 2 else [w])]
    joined = jnp.concatenate(matrices, axis=-1) if len(matrices) > 1 else matrices[0]
    product = jnp.dot(x, isolate(joined) if isolated else joined)
    return checkpoint_name(in_rows(product) if rows else product, "product")


def times_each(
    x: Float[Array, "*tokens K"],
    weights: nnx.Param | Array,
    *,
    gathered: int,
    isolated: bool = False,
) -> tuple[Float[Array, "*tokens N"], ...]:
    """Return `x @ W` for each of P matrices W [P, K, N].

    In training, each product is kept as an array of its own, with its last axis innermost. The
    backward pass is that of `times`: the gradient of x is one product, and the gradient of all
    matrices another.

    Args:
      x: the tokens' vectors, in the dtype of the products.
      weights: the array of P matrices, which may be a `StackSlice`.
      gathered: the axis of a matrix that the mesh axis `fsdp` shards: -2 for K and -1 for N.
      isolated: whether to keep XLA from fusing the slicing of weights into the products.
    """
    w = weights.get_value() if isinstance(weights, nnx.Variable) else weights
    if isinstance(w, StackSlice):
        return tuple(jnp.split(times(x, weights, gathered=gathered), w.shape[0], axis=-1))
    w = sharding.gather(w.astype(x.dtype), "fsdp", axis=w.ndim + gathered)
    w = isolate(w) if isolated else w
    return tuple(checkpoint_name(in_rows(product), "product") for product in _each(x, w))


@jax.custom_vjp
def _each(x, w):
    return tuple(jnp.dot(x, matrix) for matrix in w)


def _each_forward(x, w):
    return _each(x, w), (x, w)


def _each_backward(residuals, d_products):
    joined = lambda x, w: jnp.dot(x, jnp.concatenate([*w], axis=-1))
    _, pull_back = jax.vjp(joined, *residuals)
    return pull_back(jnp.concatenate(d_products, axis=-1))


_each.defvjp(_each_forward, _each_backward)


def _as_stacks(weight: StackSlice) -> Float[Array, "L P K N"]:
    return weight.stack if weight.ndim > 2 else weight.stack[:, None]


def refer_to_stack(layer: nnx.Module, stack: nnx.Module, index: Index) -> None:
    """Replace a layer's weights that `times` multiplies by references into the stack.

    Args:
      layer: the layer, which is modified.
      stack: the stacked layers, with the same graph.
      index: the index of the layer in the stack.
    """
    pairs = zip(nnx.iter_modules(layer), nnx.iter_modules(stack), strict=True)
    for (_, module), (_, stacked) in pairs:
        for name in getattr(module, "MULTIPLIED", ()):
            weight = getattr(module, name)
            if weight is not None:
                weight.set_value(StackSlice(getattr(stacked, name).get_value(), index))


def read_in_stacks(x: Shaped[Array, "batch seq *shape"]) -> bool:
    """Return whether kernels should read weights from the stack to decode the tokens `x`."""
    rows = x.shape[0] * x.shape[1] * sharding.axis_size("tensor")
    return choices.weights_in_stacks(target(), rows, sharding.axis_size("fsdp")).value
