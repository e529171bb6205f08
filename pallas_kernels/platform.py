"""Selection of an op's implementation for each platform that the program is lowered for.

The selection depends on the platform that the program is *lowered for*, never on the machine that
traces it. A program that is compiled for a TPU on a machine without TPUs contains the TPU kernels.

If `jax.export` lowers a program for several platforms at once, the result contains the kernels for
each of them. JAX refuses to export GPU kernels unless `disabled_checks` names their custom calls.
With `implementation="xla"` or `taking_plain`, a program contains no kernels.

An op supports first derivatives in reverse mode. Kernels cannot be differentiated, so second
derivatives need plain JAX (`implementation="xla"`).
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

from pallas_kernels.arguments import StackSlice, read_slices
from pallas_kernels.target import only_platform, target

Platform = str  # A platform is "tpu" or "cuda".


class UnsupportedImplementation(ValueError):
    """Raised for a call that the requested implementation does not support.

    The message gives the reason and names implementations that support the call.
    """


def choose(
    kernels: Mapping[Platform, Callable[..., Any]],
    portable: Callable[..., Any],
    *args: Any,
    refused: Mapping[Platform, str | None],
) -> Any:
    """Run `kernels[platform](*args)` on platforms with a kernel, and `portable(*args)` elsewhere.

    Args:
      kernels: maps each platform that has a kernel to a function that calls it.
      portable: the function that is used on all other platforms.
      args: arrays, or trees of arrays.
      refused: maps a platform to the reason why its kernel does not support this call, or to None
        if the kernel supports it. If the call is lowered for a platform with a reason, `portable`
        is used and a warning gives the reason.
    """
    refused = {platform: why for platform, why in refused.items() if why is not None}
    if (only := only_platform()) in kernels and only not in refused:
        return kernels[only](*args)
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


Implementation = Literal["xla", "mosaic_tpu", "triton", "mosaic_gpu", "pallas"]
# Maps the name of each kernel implementation to its platform.
_PLATFORMS: dict[str, Platform] = {
    "mosaic_tpu": "tpu",
    "triton": "cuda",
    "cudnn": "cuda",
    "mosaic_gpu": "cuda",
}


_EPSILONS = {"epsilon", "norm_epsilon"}
_LEAST = float(jnp.finfo(jnp.float32).tiny)

_preferred = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def preferring(implementation: str) -> Iterator[None]:
    """Make `implementation` the default in this context, for every op that has this implementation.

    The default is what `implementation=None` selects. An implementation in
    `Implementations.on_request` is the default only for calls that it supports. For other calls of
    such an op, the default is "pallas".
    """
    with _preferred(implementation):
        yield


_plain = jax.make_user_context(default_value=())


@contextlib.contextmanager
def taking_plain(ops: Iterable[str]) -> Iterator[None]:
    """Make plain JAX ("xla") the default in this context for the given groups of ops.

    Args:
      ops: the names of the groups (`Implementations.name`). The context manager `preferring` has no
        effect on these groups.
    """
    with _plain(tuple(sorted({*_plain.value, *ops}))):
        yield


_kernels = jax.make_user_context(default_value=())


@contextlib.contextmanager
def taking_kernels(ops: Iterable[str]) -> Iterator[None]:
    """Make kernels the default in this context for the given groups of ops.

    Args:
      ops: the names of the groups (`Implementations.name`). The context managers `taking_plain` and
        `preferring` take precedence.
    """
    with _kernels(tuple(sorted({*_kernels.value, *ops}))):
        yield


class TracedCall(NamedTuple):
    """A traced call of an op that at least one kernel supports.

    Attributes:
      name: the name of the group that the op belongs to, as in `taking_plain`.
      op: the op's name within the group.
      platforms: the platforms whose kernels support the call.
      by_default: the platforms on which the group's kernels are the default.
      args: the shapes and dtypes of the arguments, in the arguments' tree structure. A `StackSlice`
        is replaced by the shape of the slice that it selects.
      options: the keyword arguments.
      in_stacks: whether some argument is a `StackSlice`.
    """

    name: str
    op: str
    platforms: tuple[Platform, ...]
    by_default: tuple[Platform, ...]
    args: tuple
    options: Mapping[str, Any]
    in_stacks: bool


_collectors = threading.local()


@contextlib.contextmanager
def collecting_calls() -> Iterator[list[TracedCall]]:
    """Yield a list, and append to it each call that this thread traces and a kernel supports.

    The list grows until the context ends.
    """
    calls: list[TracedCall] = []
    outer = getattr(_collectors, "lists", ())
    _collectors.lists = (*outer, calls)
    try:
        yield calls
    finally:
        _collectors.lists = outer


_interpreted = jax.make_user_context(default_value=False)


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Run TPU kernels in Pallas's interpreter in this context, to test them without a TPU.

    A backward pass is traced when the gradient is computed, so `jax.grad` must be called in the
    context too.
    """
    with _interpreted(True):
        yield


@dataclasses.dataclass(frozen=True)
class Implementations:
    """The implementations of a group of ops: modules, or objects with the same functions.

    Attributes:
      portable: the implementation in plain JAX, which works on every platform.
      kernels: maps names to kernel implementations, at most one per platform. Each has a function
        `unsupported(op, *args, **options)`. It returns None if the kernel supports the call, or
        else a one-line reason. A kernel for a platform that is not in `by_default` also has a
        function `wins(op, *args, **options)`. It returns whether a table or an estimate says that
        the kernel is faster than `portable`.
      by_default: the platforms whose kernels are known to be faster and are used by default.
      name: the name of the group, which is an argument of `taking_plain`.
      on_request: maps names to further kernel implementations. They are used only if they are
        requested by name. Each has a function `unsupported`, like those in `kernels`.
      deciding: the names of the options that `unsupported` and `wins` receive, because they decide
        whether a kernel supports a call. An option that a call does not have is left out.
    """

    portable: Any
    kernels: Mapping[str, Any]
    by_default: tuple[Platform, ...]
    name: str = ""
    on_request: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    deciding: tuple[str, ...] = ()

    @property
    def names(self) -> dict[str, tuple[Platform, ...]]:
        """A dict from each implementation's name to the platforms of its kernels."""
        single = {name: (_PLATFORMS[name],) for name in (*self.kernels, *self.on_request)}
        return {"xla": (), **single, "pallas": tuple(self._on)}

    @property
    def _on(self) -> dict[Platform, Any]:
        """A dict that maps each platform to its kernel implementation."""
        return {_PLATFORMS[name]: kernel for name, kernel in self.kernels.items()}

    def run(self, implementation: str | None, op: str, *args: Any, **options: Any) -> Any:
        """Run `module.op(*args, **options)`, where `module` is the requested implementation.

        If `implementation` is None, the fastest implementation is selected for each platform.

        Raises:
          UnsupportedImplementation: the implementation is unknown, does not support this call, or
            is for a different platform than the program. The last error is raised during lowering.
          TypeError: the result is differentiated, although a kernel may have computed it.
        """
        if implementation in self.on_request:
            return self._with(implementation).run(implementation, op, *args, **options)
        if implementation is None and self.name in _plain.value:
            implementation = "xla"
        elif implementation is None and _preferred.value in self.on_request:
            kernel = self.on_request[_preferred.value]
            refused = _symbolic(args) or kernel.unsupported(op, *args, **self._deciding(options))
            group = self if refused else self._with(_preferred.value)
            return group.run("pallas", op, *args, **options)
        elif implementation is None and _preferred.value in self.names:
            implementation = _preferred.value
        elif implementation is None and self.name in _kernels.value:
            implementation = "pallas"
        if implementation not in (None, *self.names):
            raise UnsupportedImplementation(
                f"implementation={implementation!r} is unknown; legal: "
                f"{', '.join(self.names)}, or None to choose"
            )
        if implementation is None:
            platforms = self._default_platforms(op, args, options)
        elif implementation == "pallas":
            platforms = _possible(self._on)
        else:
            platforms = self.names[implementation]
        # With an epsilon of 0, a norm would divide by zero if all its inputs are zero. The smallest
        # normal float32 is used instead.
        options |= {k: max(x, _LEAST) for k, x in options.items() if k in _EPSILONS}
        run = lambda module: functools.partial(getattr(module, op), **options)
        portable = run(self.portable)
        if not platforms or any(0 in jnp.shape(leaf) for leaf in jax.tree.leaves(args)):
            return portable(*args)
        on, refused = self._on, self._refused(platforms, op, args, options)
        # The portable implementation may take the place of a platform's kernel.
        served = [p for p in platforms if refused[p] is None and on[p] is not self.portable]
        self._collect(op, served, args, options)
        args = jax.tree.map(functools.partial(_not_differentiated, op), args)
        kernel = lambda platform: _traced(run(on[platform]))
        if _interpreted.value and "tpu" in platforms and refused["tpu"] is None:
            return kernel("tpu")(*args, interpret=True)
        if implementation in self.kernels:
            (platform,) = platforms
            if refused[platform] is not None:
                raise UnsupportedImplementation(
                    f"implementation={implementation!r} does not support this call: "
                    f"{refused[platform]}; use 'xla' or None"
                )
            named = functools.partial(only_on, platform, implementation)
            return kernel(platform)(*_with_first(named, args))
        kernels = {p: kernel(p) for p in platforms}
        return choose(kernels, portable, *args, refused=refused)

    def _with(self, name: str) -> "Implementations":
        """Return a copy of this group in which `on_request[name]` is the kernel of its platform."""
        others = {k: x for k, x in self.kernels.items() if _PLATFORMS[k] != _PLATFORMS[name]}
        kernels = others | {name: self.on_request[name]}
        return dataclasses.replace(self, kernels=kernels, on_request={})

    def chosen(self, op: str, *args: Any) -> dict[Platform, tuple[str, str | None]]:
        """Return which implementation `run(None, op, *args)` uses on each platform with a kernel.

        Contexts such as `preferring` are ignored. Nothing is computed.

        Returns:
          For each platform, the name of the implementation, and the reason why the kernel does not
          support the call, or None if it does.
        """
        platforms = self._default_platforms(op, args, {})
        names = {_PLATFORMS[name]: name for name in self.kernels}
        refused = self._refused(names, op, args, {})
        return {
            p: (name if p in platforms and refused[p] is None else "xla", refused[p])
            for p, name in names.items()
        }

    def _refused(
        self, platforms: Iterable[Platform], op: str, args: tuple, options: Mapping[str, Any]
    ) -> dict[Platform, str | None]:
        """Return for each platform the reason why its kernel does not support a call, or None."""
        on, unknown, options = self._on, {"tpu": target().unknown}, self._deciding(options)
        return {
            p: _symbolic(args) or unknown.get(p) or on[p].unsupported(op, *args, **options)
            for p in platforms
        }

    def _deciding(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {name: options[name] for name in self.deciding if name in options}

    def _collect(self, op: str, platforms: list[Platform], args: tuple, options: Mapping) -> None:
        lists = getattr(_collectors, "lists", ())
        if lists and platforms:
            is_slice = lambda x: isinstance(x, StackSlice)
            in_stacks = any(map(is_slice, jax.tree.leaves(args, is_leaf=is_slice)))
            shapes = jax.eval_shape(read_slices, args)
            called = TracedCall(
                self.name, op, tuple(platforms), self.by_default, shapes, options, in_stacks
            )
            for calls in lists:
                calls.append(called)

    def _default_platforms(
        self, op: str, args: tuple, options: Mapping[str, Any]
    ) -> tuple[Platform, ...]:
        """Return the platforms that use a kernel if no implementation is requested.

        These are the platforms in `by_default`, and the platforms whose kernel's `wins` returns
        True.
        """
        by_default = _possible(self.by_default)
        if any(0 in jnp.shape(leaf) for leaf in jax.tree.leaves(args)) or _symbolic(args):
            return by_default
        others = _possible(p for p in self._on if p not in self.by_default)
        options = self._deciding(options)
        return (*by_default, *(p for p in others if self._on[p].wins(op, *args, **options)))


def _possible(platforms: Iterable[Platform]) -> tuple[Platform, ...]:
    """Return the items of `platforms` for which the current trace may be lowered."""
    only = None if _interpreted.value else only_platform()
    return tuple(p for p in platforms if only in (None, p))


def _symbolic(args: tuple) -> str | None:
    """Return the reason to refuse kernels if a shape has symbolic dimensions, or else None.

    Symbolic dimensions come from `jax.export`.
    """
    shapes = (jnp.shape(leaf) for leaf in jax.tree.leaves(args))
    unknown = next((s for s in shapes if not all(isinstance(size, int) for size in s)), None)
    return None if unknown is None else f"an array of symbolic shape {unknown}"


def _traced(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `kernel` so that it is traced with `jax_enable_x64` off.

    Kernels use 32-bit integers. The wrapper also marks the results as varying over the same mesh
    axes as the arguments. Kernels from a library do not do this themselves.
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
    """Return `args` with the function `identity` applied to its first array only."""
    first, *others = jax.tree.leaves(args)
    return jax.tree.unflatten(jax.tree.structure(args), [identity(first), *others])


def _identity(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda x, **_: x)
    batching.defvectorized(primitive)
    mlir.register_lowering(primitive, lambda context, x, **_: [x])
    return primitive


# An identity primitive that emits a warning when it is lowered for a platform whose kernel does not
# support the call.
_fallback_p = _identity("kernel_fallback")


def _warn_on(platform: Platform):
    def lower(context, x, *, refused):
        why = dict(refused).get(platform)
        if why is not None:
            message = f"no {platform} kernel for this call, so plain XLA is used: {why}"
            warnings.warn(message, stacklevel=2)
        return [x]

    mlir.register_lowering(_fallback_p, lower, platform=platform)


_warn_on("tpu")
_warn_on("cuda")

# An identity primitive that can only be lowered for the platform of the requested implementation.
_only_p = _identity("kernel_platform")


def only_on(platform: Platform, implementation: str, x: Any) -> Any:
    """Return `x`; a program that uses the result can be lowered only for `platform`.

    The returned array cannot be differentiated.

    Raises:
      UnsupportedImplementation: the program is lowered for a different platform (raised during
        lowering).
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
        f"implementation={implementation!r} runs on {platform} only, but the program "
        f"is compiled for {', '.join(platforms)}; use 'xla', 'pallas' or None"
    )


mlir.register_lowering(_only_p, _refuse_platform)

# An identity primitive whose differentiation raises a TypeError.
_operand_p = _identity("kernel_operand")


def _not_differentiated(op: str, x: Any) -> Any:
    return _operand_p.bind(x, op=op) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x


def _refuse_derivative(primals, tangents, *, op):
    raise TypeError(
        f"the kernels' results for {op!r} cannot be differentiated; legal: one derivative in "
        "reverse mode (jax.grad, jax.vjp), or implementation='xla' for gradients of gradients"
    )


ad.primitive_jvps[_operand_p] = _refuse_derivative


# A primitive that runs a kernel and is lowered only for the kernel's platform. Without it, a
# program that is lowered for several platforms would lower each platform's branch for all of them.
_kernel_p = Primitive("kernel")
_kernel_p.multiple_results = True
_kernel_p.def_abstract_eval(lambda *_, jaxpr, platform: jaxpr.out_avals)
# From 0.12 on, JAX refuses a primitive with a program that has custom derivatives, unless it says
# how to remove them. This primitive is never differentiated, and lowering traces its program again.
_kernel_p.is_high = lambda *_, jaxpr, platform: False


@_kernel_p.def_impl
def _run_kernel(*args, jaxpr, platform):
    return jax.extend.core.jaxpr_as_fun(jaxpr)(*args)


def _for_one(platform: Platform, kernel: Callable[..., Any], *args: Any) -> Any:
    """Run `kernel(*args)` as a call that is lowered only for `platform`.

    Use it in the branch of `jax.lax.platform_dependent` for that platform.
    """
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
        # JAX caches lowered calls. The cached calls are lowered for all platforms, so this branch
        # needs an empty cache.
        module = module.replace(cached_primitive_lowerings={})
        context = context.replace(module_context=module, platforms=(platform,))
    return mlir.lower_fun(jax.extend.core.jaxpr_as_fun(jaxpr))(context, *args)


batching.primitive_batchers[_kernel_p] = _map_kernel
mlir.register_lowering(_kernel_p, _lower_kernel)


def reverse_mode(op: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an op that uses `jax.custom_vjp`, so that forward mode raises a clear TypeError.

    The wrapper also makes gradients correct in a `jax.shard_map` with `check_vma=True`, by calling
    `vary_alike`.
    """

    @functools.wraps(op)
    def call(*args, **kwargs):
        args, kwargs = vary_alike((args, kwargs))
        with reverse_mode_alone(op.__name__):
            return op(*args, **kwargs)

    return call


@contextlib.contextmanager
def reverse_mode_alone(name: str) -> Iterator[None]:
    """Replace JAX's error about forward mode by one line with the op's name, in this context."""
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(
            f"{name} supports derivatives in reverse mode only; legal: jax.grad, jax.vjp and "
            "jax.jacrev, but not jax.jvp, jax.jacfwd or jax.hessian"
        ) from None


def vary_alike(tree: Any) -> Any:
    """Make all floating-point arrays in a tree vary over the same mesh axes.

    A result of several arrays varies over the axes of all of them, but a custom gradient must
    return cotangents that vary over the same axes as their primals. This function therefore makes
    each array vary over all axes over which any array of the tree varies. JAX sums the gradient of
    an array over the axes that are added.
    """
    varies = varies_in(tree)
    if not varies:
        return tree

    def vary(x: Any) -> Any:
        if not isinstance(x, jax.Array) or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return varying(x, varies)

    return jax.tree.map(vary, tree)


def varying(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Return `x`, marked as varying over the mesh axes `axes` in addition to its own axes."""
    missing = tuple(sorted(axes - varies_in(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def varies_in(tree: Any) -> frozenset[str]:
    """Return the mesh axes over which any array of a tree varies.

    The result is empty outside of a `jax.shard_map` with `check_vma=True`, which tracks these axes.
    """
    of = lambda x: jax.typeof(x).manual_axis_type.varying
    return frozenset().union(*(of(x) for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)))


def checks_varying() -> str | None:
    """Return why this trace cannot use kernels, or None if it can.

    A `jax.shard_map` with `check_vma=True` cannot trace kernels that do not declare over which mesh
    axes their results vary.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if not axes or not varies_in(jax.lax.axis_index(axes[0])):
        return None
    return "a jax.shard_map with check_vma=True (legal: check_vma=False)"
