"""Parameter shardings on a mesh that generates text."""

import math
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding

import sharding
from rmt_tpu.config import ModelConfig
from rmt_tpu.decoder import Decoder
from rmt_tpu.layers.parameters import metadata


def parameter_shardings(decoder: Decoder, mesh: jax.sharding.Mesh) -> Any:
    """Return the sharding of each parameter, as a tree like that of `nnx.to_pure_dict`.

    The decoder's parameters may be abstract shapes.

    Raises:
      MeshError: the mesh cannot divide the model or its caches.
    """
    _check(decoder.config, mesh)
    shapes = nnx.to_pure_dict(nnx.state(decoder, nnx.Param))
    axes = metadata(decoder, "axes")
    for s, stack in enumerate(decoder.config.stacks):
        for k, core in enumerate(stack.cores):
            # A site (a place before a sublayer) may have no parameters.
            site = axes["stacks"][s][k].get("site", {})
            if "read_fewer" in site and getattr(core, "kv_heads", 0) % mesh.shape["tensor"]:
                # There are too few key heads to shard, so replicate their weight over the mesh axis
                # `tensor`. The module `key_heads` then repeats the heads, so that they can be
                # sharded.
                site["read_fewer"] = (*site["read_fewer"][:-1], "shared")
    specs = sharding.parameter_specs(mesh, axes, shapes)
    return jax.tree.map(lambda spec: NamedSharding(mesh, sharding.used_axes(mesh, spec)), specs)


def _check(model: ModelConfig, mesh: jax.sharding.Mesh) -> None:
    if mesh.shape["stage"] > 1:
        raise sharding.MeshError(
            f"--mesh: stage={mesh.shape['stage']} divides layers, which only training supports; "
            "legal: stage=1"
        )
    sharding.check_keys(mesh, model.store.has_keys, model.mixer.undivided)
    sharding.check_experts(mesh, bool(model.cores_of_kind("experts")))
    axes = [axis for axis in sharding.CACHE_RULES["tokens"] if mesh.shape[axis] > 1]
    devices = math.prod(mesh.shape[axis] for axis in axes)
    for core in model.cores:
        for name, heads in core.divided_heads.items():
            # There may be fewer key heads than devices, because `key_heads` repeats key heads.
            if heads % devices and name != "num_kv_heads":
                raise sharding.MeshError(
                    f"--mesh: {' x '.join(f'{axis}={mesh.shape[axis]}' for axis in axes)} does not "
                    f"divide the {heads} heads of a cache (model.{core.kind}.{name}); legal "
                    f"products: {sharding.divisors(heads)}"
                )
