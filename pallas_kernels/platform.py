"""One traced program, and for each platform it may be lowered for the implementation that fits.

What is chosen depends on the platform being *lowered for*, never on the machine that traces: a step
compiled for a TPU on a machine without one has the TPU's kernels.

A program that `jax.export` lowers for several platforms at once has the kernels of each. JAX
exports none for a GPU unless `disabled_checks` name its calls; `implementation="xla"` and
`taking_plain` do without.

An op has a gradient in reverse mode, once. Kernels have no derivatives of their own, so what an
implementation computes is not differentiated further where a kernel may be it; plain JAX
(`implementation="xla"`) can be.
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
    """`kernels[platform](*args)` where there is one, and `portable(*args)` elsewhere.

    Args:
      kernels: by platform.
      portable: for every platform without a kernel.
      args: arrays, or trees of them.
      refused: by platform, why its kernel cannot serve this call; said once in a warning when the
        call is lowered for that platform, and `portable` takes its place.
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
# Of kernels, by their names.
_PLATFORMS: dict[str, Platform] = {"mosaic_tpu": "tpu", "triton": "cuda", "cudnn": "cuda"}


_EPSILONS = {"epsilon", "norm_epsilon"}
_LEAST = float(jnp.finfo(jnp.float32).tiny)

_preferred = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def preferring(implementation: str) -> Iterator[None]:
    """Within, None is this implementation, of the ops that have it."""
    with _preferred(implementation):
        yield


_plain = jax.make_user_context(default_value=())


@contextlib.contextmanager
def taking_plain(ops: Iterable[str]) -> Iterator[None]:
    """Within, None is "xla" of the ops of these names (`Implementations.name`), before all else."""
    with _plain(tuple(sorted({*_plain.value, *ops}))):
        yield


class Called(NamedTuple):
    """A call that a kernel serves.

    Attributes:
      name: of the ops that are taken together, as `taking_plain` has it.
      op: of these, which.
      platforms: whose kernels serve it.
      args: shapes and dtypes, in trees; of a stack's slot that of the array in it.
      options: by name.
    """

    name: str
    op: str
    platforms: tuple[Platform, ...]
    args: tuple
    options: Mapping[str, Any]


_collectors = threading.local()


@contextlib.contextmanager
def collecting_calls() -> Iterator[list[Called]]:
    """What this thread traces within that a kernel serves, on one platform or another."""
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
    """Within, where a TPU would run a kernel, this machine interprets it: to check it without one.

    A backward pass is traced where the gradient is taken, and has to be within too.
    """
    with _interpreted(True):
        yield


@dataclasses.dataclass(frozen=True)
class Implementations:
    """The implementations of an op: modules, or objects with their functions.

    Attributes:
      portable: for any platform.
      kernels: by name, one for a platform; each has `unsupported(op, *args) -> why, in a line, or
        None`, and where it is not taken by default `wins(op, *args)`, whether a table says that it
        is faster.
      by_default: platforms whose kernels are shown to be faster, and so taken unasked.
      name: of the ops together, for `taking_plain`.
    """

    portable: Any
    kernels: Mapping[str, Any]
    by_default: tuple[Platform, ...]
    name: str = ""

    @property
    def names(self) -> dict[str, tuple[Platform, ...]]:
        """What can be asked for, and the platforms whose kernels each takes."""
        alone = {name: (_PLATFORMS[name],) for name in self.kernels}
        return {"xla": (), **alone, "pallas": tuple(self._on)}

    @property
    def _on(self) -> dict[Platform, Any]:
        """The kernels by platform."""
        return {_PLATFORMS[name]: kernel for name, kernel in self.kernels.items()}

    def run(self, implementation: str | None, op: str, *args: Any, **options: Any) -> Any:
        """`module.op(*args, **options)` with the module of the implementation that is asked for.

        Raises:
          UnsupportedImplementation: it is unknown, or cannot serve this call, or (when the program
            is lowered) is not for the platform lowered for.
          TypeError: what it computes is differentiated, and may be a kernel.
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
        # Where all is zero, a norm with an epsilon of 0 would divide by it.
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
        """Those by default, and those of which a table says that the kernel wins."""
        if any(0 in jnp.shape(leaf) for leaf in jax.tree.leaves(args)) or _symbolic(args):
            return self.by_default
        others = {p: kernel for p, kernel in self._on.items() if p not in self.by_default}
        won = [p for p, kernel in others.items() if kernel.wins(op, *args)]
        return (*self.by_default, *won)


def _symbolic(args: tuple) -> str | None:
    """Why kernels cannot serve shapes of `jax.export` that have names for sizes, or None."""
    shapes = (jnp.shape(leaf) for leaf in jax.tree.leaves(args))
    unknown = next((s for s in shapes if not all(isinstance(size, int) for size in s)), None)
    return None if unknown is None else f"an array of the symbolic shape {unknown}"


def _traced(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel traced as without `jax_enable_x64`, for it counts and shifts in 32 bits.

    Results vary over a mesh as its arguments do: those of a library's kernel do not say that.
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
    """`args` with `identity` applied to the first array."""
    first, *others = jax.tree.leaves(args)
    return jax.tree.unflatten(jax.tree.structure(args), [identity(first), *others])


def _identity(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda x, **_: x)
    batching.defvectorized(primitive)
    mlir.register_lowering(primitive, lambda context, x, **_: [x])
    return primitive


# An identity whose only effect is a warning when it is lowered for a platform that lost its kernel.
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

# An identity that can be lowered for the platform of the implementation that was named, alone.
_only_p = _identity("kernel_platform")


def only_on(platform: Platform, implementation: str, x: Any) -> Any:
    """x, in programs that are lowered for this platform alone; it is not to be differentiated.

    Raises:
      UnsupportedImplementation: (when the program is lowered) it is for another one.
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


# A kernel, which is lowered for its platform alone in a program for several at once: JAX lowers a
# branch that is for one of them as if it were for all.
_kernel_p = Primitive("kernel")
_kernel_p.multiple_results = True
_kernel_p.def_abstract_eval(lambda *_, jaxpr, platform: jaxpr.out_avals)


@_kernel_p.def_impl
def _run_kernel(*args, jaxpr, platform):
    return jax.extend.core.jaxpr_as_fun(jaxpr)(*args)


def _for_one(platform: Platform, kernel: Callable[..., Any], *args: Any) -> Any:
    """`kernel(*args)`, in a branch that is taken on this platform."""
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
        # What is kept of it for the same calls elsewhere is for all platforms.
        module = module.replace(cached_primitive_lowerings={})
        context = context.replace(module_context=module, platforms=(platform,))
    return mlir.lower_fun(jax.extend.core.jaxpr_as_fun(jaxpr))(context, *args)


batching.primitive_batchers[_kernel_p] = _map_kernel
mlir.register_lowering(_kernel_p, _lower_kernel)


def reverse_mode(op: Callable[..., Any]) -> Callable[..., Any]:
    """A function with a `jax.custom_vjp` inside that says in a line that it has no forward mode.

    Its gradients are right in a `jax.shard_map` that checks what varies, too: see `vary_alike`.
    """

    @functools.wraps(op)
    def call(*args, **kwargs):
        args, kwargs = vary_alike((args, kwargs))
        with reverse_mode_alone(op.__name__):
            return op(*args, **kwargs)

    return call


@contextlib.contextmanager
def reverse_mode_alone(name: str) -> Iterator[None]:
    """Within, JAX's error about forward mode is one line about the function of this name."""
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
    """A tree with each array of floats varying over all mesh axes that one of its arrays varies in.

    What is derived from some of these varies in all of their axes, and a gradient of one's own must
    vary as its primal does. JAX sums up the gradient of what is made to vary.
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
    """The array, varying over these mesh axes too."""
    missing = tuple(sorted(axes - varies_in(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def varies_in(given: Any) -> frozenset[str]:
    """The mesh axes that an array of a tree varies in, where `jax.shard_map` checks it."""
    of = lambda x: jax.typeof(x).manual_axis_type.varying
    return frozenset().union(*(of(x) for x in jax.tree.leaves(given) if isinstance(x, jax.Array)))


def checks_varying() -> str | None:
    """Why a kernel that does not say how its results vary cannot be traced here, or None."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if not axes or not varies_in(jax.lax.axis_index(axes[0])):
        return None
    return "a jax.shard_map that checks what varies (one with check_vma=False)"
