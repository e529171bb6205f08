"""One traced program, and for each platform it may be lowered for the implementation that fits.

What is chosen depends on the platform being *lowered for*, never on the machine that traces: a step
compiled for a TPU on a machine without one has the TPU's kernels.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

Platform = str  # "tpu" or "cuda"


class UnsupportedImplementation(ValueError):
    """A named implementation cannot serve this call; the message says why and what can."""


def choose(
    kernels: Mapping[Platform, Callable[..., Any]],
    portable: Callable[..., Any],
    *args: Any,
    refused: Mapping[Platform, str | None],
) -> Any:
    """`kernels[platform](*args)` where there is one, and `portable(*args)` elsewhere.

    Args:
      kernels: by platform.
      portable: for every platform without a kernel.
      args: arrays, or trees of them.
      refused: by platform, why its kernel cannot serve this call; said once in a warning when the
        call is lowered for that platform, and `portable` takes its place.
    """
    refused = {platform: why for platform, why in refused.items() if why is not None}
    branches = {platform: f for platform, f in kernels.items() if platform not in refused}
    if refused:
        first, *others = jax.tree.leaves(args)
        first = _fallback_p.bind(first, refused=tuple(refused.items()))
        args = jax.tree.unflatten(jax.tree.structure(args), [first, *others])
    if not branches:
        return portable(*args)
    return jax.lax.platform_dependent(*args, **branches, default=portable)


# An identity whose only effect is a warning when it is lowered for a platform that lost its kernel.
_fallback_p = Primitive("kernel_fallback")
_fallback_p.def_impl(lambda x, *, refused: x)
_fallback_p.def_abstract_eval(lambda x, *, refused: x)
batching.defvectorized(_fallback_p)
mlir.register_lowering(_fallback_p, lambda context, x, *, refused: [x])


def _warn_on(platform: Platform):
    def lower(context, x, *, refused):
        why = dict(refused).get(platform)
        if why is not None:
            message = f"no {platform} kernel for this call, plain XLA instead: {why}"
            warnings.warn(message, stacklevel=2)
        return [x]

    mlir.register_lowering(_fallback_p, lower, platform=platform)


_warn_on("tpu")
_warn_on("cuda")
