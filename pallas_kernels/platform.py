"""One traced program, and for each platform it may be lowered for the implementation that fits.

What is chosen depends on the platform being *lowered for*, never on the machine that traces: a step
compiled for a TPU on a machine without one has the TPU's kernels.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
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


Implementation = Literal["xla", "mosaic_tpu", "triton", "pallas"]
_PLATFORMS: dict[str, tuple[Platform, ...]] = {
    "xla": (),
    "mosaic_tpu": ("tpu",),
    "triton": ("cuda",),
    "pallas": ("tpu", "cuda"),
}


@dataclasses.dataclass(frozen=True)
class Implementations:
    """The modules of an op's implementations.

    Attributes:
      portable: for any platform.
      kernels: by platform; each has `unsupported(op, *args) -> why, in a line, or None`.
      by_default: platforms whose kernels are shown to be faster, and so taken unasked.
      elsewhere: implementations that the op serves by itself; here only to be named.
    """

    portable: ModuleType
    kernels: Mapping[Platform, ModuleType]
    by_default: tuple[Platform, ...]
    elsewhere: tuple[str, ...] = ()

    @property
    def names(self) -> dict[str, tuple[Platform, ...]]:
        """What can be asked for, and the platforms whose kernels each takes."""
        return {
            name: tuple(p for p in platforms if p in self.kernels)
            for name, platforms in _PLATFORMS.items()
            if not platforms or set(platforms) & set(self.kernels)
        }

    def run(
        self,
        implementation: str | None,
        op: str,
        run: Callable[..., Any],
        args: tuple,
        **options: Any,
    ) -> Any:
        """`run(module, *args)` with the module of the implementation that is asked for.

        `options` are what else `unsupported` is to know of the call.

        Raises:
          UnsupportedImplementation: it is unknown, or cannot serve this call.
        """
        if implementation not in (None, *self.names):
            raise UnsupportedImplementation(
                f"implementation={implementation!r} is unknown; legal: "
                f"{', '.join((*self.names, *self.elsewhere))}, or None to choose"
            )
        platforms = self.by_default if implementation is None else self.names[implementation]
        portable = functools.partial(run, self.portable)
        if not platforms or any(0 in jnp.shape(leaf) for leaf in jax.tree.leaves(args)):
            return portable(*args)
        refused = {p: self.kernels[p].unsupported(op, *args, **options) for p in platforms}
        if implementation in ("mosaic_tpu", "triton"):
            (platform,) = platforms
            if refused[platform] is not None:
                raise UnsupportedImplementation(
                    f"implementation={implementation!r} cannot serve this call: "
                    f"{refused[platform]}; use 'xla' or None"
                )
            return run(self.kernels[platform], *args)
        kernels = {p: functools.partial(run, self.kernels[p]) for p in platforms}
        return choose(kernels, portable, *args, refused=refused)


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
