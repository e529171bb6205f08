"""An op for residual matrices that computes phase two of depth attention and reads from its mix.

The op combines `depth_attention_merge` (without a norm) and `norm_retrieve`. On a TPU, a single
kernel computes both, so that the mix stays in VMEM.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from pallas_kernels.arguments import Norm, check_array, check_epsilon, check_norm
from pallas_kernels.depth_attention import mosaic_tpu_merge_read
from pallas_kernels.depth_attention.checks import check_mixed
from pallas_kernels.depth_attention.interface import Merge, MergeCotangents, MergeRead, wide
from pallas_kernels.depth_attention.merge_read_in_two import MOSAIC_GPU, XLA
from pallas_kernels.key_vector.calls import check_dtype
from pallas_kernels.platform import Implementation, Implementations, reverse_mode


@reverse_mode
def depth_attention_merge_read(
    mixed: Float[Array, "S B T K V"],
    log_sums: Float[Array, "B T"],
    site: int | Int[Array, ""],
    current: Float[Array, "B T K V"],
    query: Float[Array, "K V"],
    norm_gain: Float[Array, "K V"],
    read_keys: Float[Array, "P K"],
    *,
    active: bool | Bool[Array, ""] = True,
    norm: Norm = "layernorm",
    epsilon: int | float = 1e-6,
    norm_epsilon: int | float = 1e-6,
    dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "S B T K V"], Float[Array, "B T K V"], Float[Array, "B T P V"]]:
    """Compute the mix h of one site, and read `z_p = r_p . (norm_gain * norm(h))` from it.

    A site is a place in the network that attends over the outputs of earlier sublayers. h, the
    result of `depth_attention_merge` without a norm, is the weighted sum of those outputs and of
    the running sum `current`. r are the read keys.

    Args:
      mixed, log_sums, site, current, active: as in `depth_attention_merge`.
      query: the query of the site, multiplied by the gain of the keys' norm.
      norm_gain, read_keys, norm: the gain, the keys and the norm of the read, as in
        `norm_retrieve`.
      epsilon, norm_epsilon: the epsilons of the keys' norm and of the read's norm.
      dtype: the dtype of z; None for the dtype of `current`.
      implementation: None selects the fastest one for the platform that the program is lowered for.

    Returns:
      `mixed`, `current` and z. As in `depth_attention_merge`, the caller must use the returned
      `mixed` and `current` in place of the arguments. h is rounded to the dtype of `current` before
      it is read.

    Raises:
      UnsupportedImplementation: the requested implementation does not support this call.
      ValueError: shapes or dtypes do not fit, the norm is unknown, an epsilon is negative, or
        `dtype` is not a float dtype of 16 bits or more.
      TypeError: the op is differentiated in forward mode, or differentiated twice when a kernel may
        compute it.
    """
    check_norm(norm)
    check_epsilon("epsilon", epsilon)
    check_epsilon("norm_epsilon", norm_epsilon)
    check_array("current", current, "B T K V")
    check_array("read_keys", read_keys, "P K")
    for name, x in {"query": query, "norm_gain": norm_gain}.items():
        check_array(name, x, "K V")
        if x.shape != current.shape[2:]:
            raise ValueError(
                f"shapes do not fit: current [B, T, K, V] has shape {current.shape}, but {name} "
                f"[K, V] has shape {x.shape}"
            )
    check_mixed(mixed, log_sums, current, "B T", 2)
    if read_keys.shape[1] != current.shape[2]:
        raise ValueError(
            f"shapes do not fit: current [B, T, K, V] has shape {current.shape}, but read_keys "
            f"[P, K] have shape {read_keys.shape}"
        )
    dtype = check_dtype(dtype or current.dtype)
    call = _MergeReadCall(norm, epsilon, norm_epsilon, dtype, implementation)
    site, active = jnp.asarray(site, jnp.int32), jnp.asarray(active)
    query = query.astype(jnp.result_type(jnp.float32, current))
    of_merge = Merge(query, mixed, wide(log_sums), site, current, active)
    return _merge_read(call, MergeRead(of_merge, norm_gain, read_keys))


class _MergeReadCall(NamedTuple):
    """The static parameters of a call of `depth_attention_merge_read`, constant during tracing."""

    norm: Norm
    epsilon: int | float
    norm_epsilon: int | float
    dtype: jnp.dtype
    implementation: str | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _merge_read(call, operands):
    return _forward(call, operands)[0]


def _forward(call, operands):
    options = {"norm": call.norm, "epsilon": call.epsilon, "dtype": call.dtype}
    options["norm_epsilon"] = call.norm_epsilon
    run = functools.partial(_IMPLEMENTATIONS.run, call.implementation, "merge_read")
    z, statistics = run(operands, **options)
    return (operands.merge.mixed, operands.merge.current, z), (operands, statistics)


def _backward(call, saved, cotangents):
    d_mixed, d_current, d_z = cotangents
    # JAX may return saved constants as NumPy arrays, which are converted to JAX arrays.
    operands, statistics = jax.tree.map(jnp.asarray, saved)
    run = functools.partial(_IMPLEMENTATIONS.run, call.implementation, "merge_read_backward")
    args = (operands, statistics, MergeCotangents(d_z, d_mixed, d_current))
    g, d_read_keys = run(*args, norm=call.norm, epsilon=call.epsilon)
    of_merge = Merge(g.query, g.mixed, g.log_sums, None, g.current, None)
    of_read = (
        g.norm_gain.astype(operands.norm_gain.dtype),
        d_read_keys.astype(operands.read_keys.dtype),
    )
    return (MergeRead(of_merge, *of_read),)


_merge_read.defvjp(_forward, _backward)

# No GPU kernel computes both the merge and the read. "mosaic_gpu" uses a kernel for each, and
# "triton" uses plain JAX.
_IMPLEMENTATIONS = Implementations(
    XLA,
    {"mosaic_tpu": mosaic_tpu_merge_read, "triton": XLA},
    ("tpu",),
    name="merge_read",
    on_request={"mosaic_gpu": MOSAIC_GPU},
    deciding=("dtype",),
)
