"""A workaround for JAX's cache of compiled programs (`jax_compilation_cache_dir`) on CPUs."""

import functools

# JAX's cache of compiled programs has no public interface that could be changed.
from jax._src import compiler


@functools.cache
def bypass_for_cpu_meshes() -> None:
    """Exclude programs for several CPU devices from JAX's compilation cache from now on.

    Such programs are neither read from the cache nor written to it. A program read from the cache
    has lost the order of its collectives. XLA gives each collective its own resource, but the
    original program had one resource for all (`CreateResourceFromProto` in XLA's CPU backend;
    jaxlib 0.10 and 0.12). Two devices may then wait for each other in different collectives, until
    XLA aborts the process after 40 s.
    """
    compile_or_read = compiler.compile_or_get_cached

    @functools.wraps(compile_or_read)
    def compile(backend, module, devices, options, host_callbacks, executable_devices, *rest):
        if backend.platform == "cpu" and devices.size > 1:
            return compiler.backend_compile_and_load(
                backend, module, executable_devices, options, host_callbacks
            )
        return compile_or_read(
            backend, module, devices, options, host_callbacks, executable_devices, *rest
        )

    compiler.compile_or_get_cached = compile
