"""Choice of the implementation that fits each platform a traced program is lowered for.

The choice depends on the platform that the program is *lowered for*, never on the machine that
traces it: a step compiled for a TPU on a machine without one has the TPU's kernels.

A program that `jax.export` lowers for several platforms at once contains the kernels of each. JAX
does not export GPU kernels unless `disabled_checks` names their custom calls; with
`implementation="xla"` or `taking_plain` a program has no kernels.

An op has one derivative, in reverse mode. Kernels have no derivatives of their own, so the result
of an implementation that may be a kernel cannot be differentiated further; the result of plain JAX
(`implementation="xla"`) can.
"""

import contextlib
import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pallas_kernels.arguments import taken
from pallas_kernels.target import target

Platform = str  # "tpu" or "cuda"


class UnsupportedImplementation(ValueError):
    """A named implementation cannot serve this call; the message says why and what can."""


def choose(
    kernels: Mapping[Platform, Callable[..., Any]],
    portable: Callable[..., Any],
    *args: Any,
    refused: Mapping[Platform, str | None],
) -> Any:
    """Run `kernels[platform](*args)` on platforms with a kernel, and `portable(*args)` elsewhere.

    Args:
      kernels: the kernels by platform.
      portable: the function for every platform without a kernel.
      args: arrays, or trees of arrays.
      refused: for each platform the reason why its kernel cannot serve this call, or None. When the
        call is lowered for a platform with a reason, `portable` is used and one warning gives the
        reason.
    """
    refused = {platform: why for platform, why in refused.items() if why is not None}
    branches = {
        platform: functools.partial(_for_one, platform, f)
        for platform, f in kernels.items()
        if platform not in refused
    }
    if refused:
        args = _with_first(
            functools.partial(_fallback_p.bind, refused=tuple(refused.items())), args
        )
    if not branches:
        return portable(*args)
    return jax.lax.platform_dependent(*args, **branches, default=portable)


Implementation = Literal["xla", "mosaic_tpu", "triton", "pallas"]
# The platform of each kernel implementation.
_PLATFORMS: dict[str, Platform] = {"mosaic_tpu": "tpu", "triton": "cuda", "cudnn": "cuda"}


_EPSILONS = {"epsilon", "norm_epsilon"}
_LEAST = float(jnp.finfo(jnp.float32).tiny)

_preferred = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def preferring(implementation: str) -> Iterator[None]:
    """Make implementation=None mean this implementation in the context, for ops that have it."""
    with _preferred(implementation):
        yield


_plain = jax.make_user_context(default_value=())


@contextlib.contextmanager
def taking_plain(ops: Iterable[str]) -> Iterator[None]:
    """Make None mean "xla" for ops with these `Implementations.name`s; takes precedence."""
    with _plain(tuple(sorted({*_plain.value, *ops}))):
        yield


class Called(NamedTuple):
    """A call that a kernel serves.

    Attributes:
      name: the name of the group of ops, as in `taking_plain`.
      op: the op of that group.
      platforms: the platforms whose kernels serve the call.
      args: shapes and dtypes, in trees; a slot is described by the slice that it selects.
      options: the keyword arguments.
    """

    name: str
    op: str
    platforms: tuple[Platform, ...]
    args: tuple
    options: Mapping[str, Any]


_collectors = threading.local()


@contextlib.contextmanager
def collecting_calls() -> Iterator[list[Called]]:
    """Collect all calls that this thread traces in the context and that a kernel serves."""
    calls: list[Called] = []
    before = getattr(_collectors, "lists", ())
    _collectors.lists = (*before, calls)
    try:
        yield calls
    finally:
        _collectors.lists = before


_interpreted = jax.make_user_context(default_value=False)


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Interpret kernels on this machine in the context where a TPU would run them, to check them.

    A backward pass is traced where the gradient is taken, so that has to be in the context too.
    """
    with _interpreted(True):
        yield


@dataclasses.dataclass(frozen=True)
class Implementations:
    """The implementations of an op: modules, or objects with the same functions.

    Attributes:
      portable: the implementation for any platform.
      kernels: the kernel implementations by name, one for a platform. Each has `unsupported(op,
        *args)`, which returns the reason in one line or None. If it is not used by default it also
        has `wins(op, *args)`, which says whether it is faster, by a table or by estimates.
      by_default: the platforms whose kernels are known to be faster and are used by default.
      name: the name of the group of ops, for `taking_plain`.
    """

    portable: Any
    kernels: Mapping[str, Any]
    by_default: tuple[Platform, ...]
    name: str = ""

    @property
    def names(self) -> dict[str, tuple[Platform, ...]]:
        """The implementation names that can be requested, and the platforms of their kernels."""
        alone = {name: (_PLATFORMS[name],) for name in self.kernels}
        return {"xla": (), **alone, "pallas": tuple(self._on)}

    @property
    def _on(self) -> dict[Platform, Any]:
        """The kernels by platform."""
        return {_PLATFORMS[name]: kernel for name, kernel in self.kernels.items()}

    def run(self, implementation: str | None, op: str, *args: Any, **options: Any) -> Any:
        """Run `module.op(*args, **options)` with the module of the requested implementation.

        Raises:
          UnsupportedImplementation: the implementation is unknown, or cannot serve this call, or
            (when the program is lowered) is not for the platform lowered for.
          TypeError: the result is differentiated, although it may come from a kernel.
        """
        if implementation is None and self.name in _plain.value:
            implementation = "xla"
        elif implementation is None and _preferred.value in self.names:
            implementation = _preferred.value
        if implementation not in (None, *self.names):
            raise UnsupportedImplementation(
                f"implementation={implementation!r} is unknown; legal: "
                f"{', '.join(self.names)}, or None to choose"
            )
        platforms = (
            self._unasked(op, args) if implementation is None else self.names[implementation]
        )
        # A norm with an epsilon of 0 would divide by zero where all entries are zero.
        options |= {k: max(x, _LEAST) for k, x in options.items() if k in _EPSILONS}
        run = lambda module: functools.partial(getattr(module, op), **options)
        portable = run(self.portable)
        if not platforms or any(0 in jnp.shape(leaf) for leaf in jax.tree.leaves(args)):
            return portable(*args)
        on = self._on
        unknown = {"tpu": target().unknown}
        refused = {
            p: _symbolic(args) or unknown.get(p) or on[p].unsupported(op, *args) for p in platforms
        }
        self._collect(op, [p for p in platforms if refused[p] is None], args, options)
        args = jax.tree.map(functools.partial(_not_differentiated, op), args)
        kernel = lambda platform: _traced(run(on[platform]))
        if _interpreted.value and "tpu" in platforms and refused["tpu"] is None:
            return kernel("tpu")(*args, interpret=True)
        if implementation in self.kernels:
            (platform,) = platforms
            if refused[platform] is not None:
                raise UnsupportedImplementation(
                    f"implementation={implementation!r} cannot serve this call: "
                    f"{refused[platform]}; use 'xla' or None"
                )
            named = functools.partial(only_on, platform, implementation)
            return kernel(platform)(*_with_first(named, args))
        kernels = {p: kernel(p) for p in platforms}
        return choose(kernels, portable, *args, refused=refused)

    def _collect(self, op: str, platforms: list[Platform], args: tuple, options: Mapping) -> None:
        lists = getattr(_collectors, "lists", ())
        if lists and platforms:
            called = Called(self.name, op, tuple(platforms), jax.eval_shape(taken, args), options)
            for calls in lists:
                calls.append(called)

    def _unasked(self, op: str, args: tuple) -> tuple[Platform, ...]:
        """Return the default platforms, and the platforms whose kernel `wins`."""
        if any(0 in jnp.shape(leaf) for leaf in jax.tree.leaves(args)) or _symbolic(args):
            return self.by_default
        others = {p: kernel for p, kernel in self._on.items() if p not in self.by_default}
        won = [p for p, kernel in others.items() if kernel.wins(op, *args)]
        return (*self.by_default, *won)


def _symbolic(args: tuple) -> str | None:
    """Return why kernels cannot serve symbolic shapes of `jax.export`; None if none is symbolic."""
    shapes = (jnp.shape(leaf) for leaf in jax.tree.leaves(args))
    unknown = next((s for s in shapes if not all(isinstance(size, int) for size in s)), None)
    return None if unknown is None else f"an array of the symbolic shape {unknown}"


def _traced(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel traced with `jax_enable_x64` off, because it counts and shifts in 32 bits.

    The results are marked as varying over the mesh axes of the arguments, which a library's kernel
    does not do itself.
    """

    def narrow(x: Any) -> Any:
        wide = jnp.issubdtype(jnp.result_type(x), jnp.integer) and jnp.result_type(x).itemsize > 4
        return jnp.asarray(x, jnp.int32) if wide else x

    def call(*args: Any, **options: Any) -> Any:
        args = jax.tree.map(narrow, args)
        with jax.enable_x64(False):
            results = kernel(*args, **options)
        varies = varies_in(args)
        return jax.tree.map(lambda x: varying(x, varies), results) if varies else results

    return call


def _with_first(identity: Callable[[Any], Any], args: tuple) -> tuple:
    """Return `args` with `identity` applied to the first array."""
    first, *others = jax.tree.leaves(args)
    return jax.tree.unflatten(jax.tree.structure(args), [identity(first), *others])


def _identity(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda x, **_: x)
    batching.defvectorized(primitive)
    mlir.register_lowering(primitive, lambda context, x, **_: [x])
    return primitive


# An identity that warns when it is lowered for a platform whose kernel cannot serve the call.
_fallback_p = _identity("kernel_fallback")


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

# An identity that can only be lowered for the platform of the implementation that was named.
_only_p = _identity("kernel_platform")


def only_on(platform: Platform, implementation: str, x: Any) -> Any:
    """Return x in a program that may be lowered for this platform only, and not differentiated.

    Raises:
      UnsupportedImplementation: (when the program is lowered) it is for another platform.
    """
    return _only_p.bind(x, platform=platform, implementation=implementation)


@functools.cache
def _lowered_at_once(**params):
    return jax.jit(functools.partial(_only_p.bind, **params))


_only_p.def_impl(lambda x, **params: _lowered_at_once(**params)(x))


def _refuse_platform(context, x, *, platform, implementation):
    platforms = context.module_context.platforms
    if tuple(platforms) == (platform,):
        return [x]
    raise UnsupportedImplementation(
        f"implementation={implementation!r} is for {platform}, and this is lowered for "
        f"{', '.join(platforms)}; use 'xla', 'pallas' or None"
    )


mlir.register_lowering(_only_p, _refuse_platform)

# An identity that has no derivative.
_operand_p = _identity("kernel_operand")


def _not_differentiated(op: str, x: Any) -> Any:
    return _operand_p.bind(x, op=op) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x


def _refuse_derivative(primals, tangents, *, op):
    raise TypeError(
        f"what kernels compute for {op!r} has no derivative: an op has a gradient in reverse mode, "
        "once (jax.grad, jax.vjp); with implementation='xla' that can be differentiated again"
    )


ad.primitive_jvps[_operand_p] = _refuse_derivative


# A kernel call that is lowered only for its own platform in a program for several platforms. JAX
# would lower a branch that belongs to one of them as if it were for all.
_kernel_p = Primitive("kernel")
_kernel_p.multiple_results = True
_kernel_p.def_abstract_eval(lambda *_, jaxpr, platform: jaxpr.out_avals)


@_kernel_p.def_impl
def _run_kernel(*args, jaxpr, platform):
    return jax.extend.core.jaxpr_as_fun(jaxpr)(*args)


def _for_one(platform: Platform, kernel: Callable[..., Any], *args: Any) -> Any:
    """Run `kernel(*args)` in a branch that is taken on this platform."""
    leaves, tree = jax.tree.flatten(args)
    flat = lambda *leaves: kernel(*tree.unflatten(leaves))
    jaxpr, results = jax.make_jaxpr(flat, return_shape=True)(*leaves)
    found = _kernel_p.bind(*leaves, jaxpr=jaxpr, platform=platform)
    return jax.tree.structure(results).unflatten(found)


def _map_kernel(args, axes, *, jaxpr, platform):
    mapped = jax.vmap(jax.extend.core.jaxpr_as_fun(jaxpr), in_axes=axes)
    jaxpr = jax.make_jaxpr(mapped)(*args)
    return _kernel_p.bind(*args, jaxpr=jaxpr, platform=platform), [0] * len(jaxpr.out_avals)


def _lower_kernel(context, *args, jaxpr, platform):
    module = context.module_context
    if len(module.platforms) > 1:
        # The cached lowerings of equal calls elsewhere are for all platforms.
        module = module.replace(cached_primitive_lowerings={})
        context = context.replace(module_context=module, platforms=(platform,))
    return mlir.lower_fun(jax.extend.core.jaxpr_as_fun(jaxpr))(context, *args)


batching.primitive_batchers[_kernel_p] = _map_kernel
mlir.register_lowering(_kernel_p, _lower_kernel)


def reverse_mode(op: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function with a `jax.custom_vjp` inside, so that forward mode fails with a clear line.

    The gradients are also right in a `jax.shard_map` that checks what varies: see `vary_alike`.
    """

    @functools.wraps(op)
    def call(*args, **kwargs):
        args, kwargs = vary_alike((args, kwargs))
        with reverse_mode_alone(op.__name__):
            return op(*args, **kwargs)

    return call


@contextlib.contextmanager
def reverse_mode_alone(name: str) -> Iterator[None]:
    """Replace JAX's error about forward mode by one line that names this function."""
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(
            f"{name} has derivatives in reverse mode only: jax.grad, jax.vjp and "
            "jax.jacrev serve; jax.jvp, jax.jacfwd and jax.hessian do not"
        ) from None


def vary_alike(given: Any) -> Any:
    """Make each array of floats in a tree vary over all mesh axes in which any array varies.

    A result computed from several arrays varies in all of their axes, and the cotangent of a
    custom gradient must vary as its primal does. JAX sums the gradient of an array that was made
    to vary.
    """
    varies = varies_in(given)
    if not varies:
        return given

    def vary(x: Any) -> Any:
        if not isinstance(x, jax.Array) or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return varying(x, varies)

    return jax.tree.map(vary, given)


def varying(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Return the array, varying over these mesh axes too."""
    missing = tuple(sorted(axes - varies_in(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def varies_in(given: Any) -> frozenset[str]:
    """Return the mesh axes in which any array of a tree varies, if `jax.shard_map` checks it."""
    of = lambda x: jax.typeof(x).manual_axis_type.varying
    return frozenset().union(*(of(x) for x in jax.tree.leaves(given) if isinstance(x, jax.Array)))


def checks_varying() -> str | None:
    """Return why a kernel that does not declare how its results vary cannot be traced, or None."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if not axes or not varies_in(jax.lax.axis_index(axes[0])):
        return None
    return "a jax.shard_map that checks what varies (one with check_vma=False)"
