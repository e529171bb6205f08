"""A workaround for JAX's cache of compiled programs (`jax_compilation_cache_dir`) on CPUs."""

import functools

# The module has no public name.
from jax._src import compiler


@functools.cache
def compile_anew_over_cpus() -> None:
    """Keep programs over several CPU devices out of JAX's compilation cache, from now on.

    Such programs are neither read from the cache nor written to it. A program that is read back has
    lost the order of its collectives: XLA gives each its own resource where they had one in common
    (`CreateResourceFromProto` in its CPU backend; jaxlib 0.10 and 0.12). Now and then devices then
    wait for each other in different collectives, until XLA ends the process after 40 s.
    """
    or_cached = compiler.compile_or_get_cached

    @functools.wraps(or_cached)
    def compile(backend, module, devices, options, host_callbacks, executable_devices, *rest):
        given = options, host_callbacks
        if backend.platform == "cpu" and devices.size > 1:
            return compiler.backend_compile_and_load(backend, module, executable_devices, *given)
        return or_cached(backend, module, devices, *given, executable_devices, *rest)

    compiler.compile_or_get_cached = compile
