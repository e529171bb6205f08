"""JAX's folder of compiled programs (`jax_compilation_cache_dir`), and CPUs."""

import functools

# It has no public name.
from jax._src import compiler


@functools.cache
def compile_anew_over_cpus() -> None:
    """From now on a program over several CPU devices is neither read from that folder nor kept.

    Read back, its collectives have lost their order: XLA gives each an own resource where they had
    one in common (`CreateResourceFromProto` in its CPU backend; jaxlib 0.10 and 0.12). Devices then
    wait for each other in different ones, now and then, until XLA ends the process after 40 s.
    """
    or_cached = compiler.compile_or_get_cached

    @functools.wraps(or_cached)
    def compile(backend, module, devices, options, host_callbacks, executable_devices, *rest):
        given = options, host_callbacks
        if backend.platform == "cpu" and devices.size > 1:
            return compiler.backend_compile_and_load(backend, module, executable_devices, *given)
        return or_cached(backend, module, devices, *given, executable_devices, *rest)

    compiler.compile_or_get_cached = compile
