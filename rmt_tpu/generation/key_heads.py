"""Replication of key and value heads, for meshes with more devices than key heads.

On a mesh, the cache of keys and values is sharded by heads. A model with grouped queries may have
fewer key heads than there are devices. It is replaced by an equivalent model, which has a copy of a
key head for each device that reads it. Every device then stores complete heads.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

import sharding
from rmt_tpu import config as cfg
from rmt_tpu.decoder import Decoder
from rmt_tpu.generation.placement import parameter_shardings


def repeated_model(model: cfg.ModelConfig, mesh: jax.sharding.Mesh) -> cfg.ModelConfig:
    """Return an equivalent model whose key and value heads are divisible over the mesh.

    The number of query heads must already be divisible over the mesh: see
    `placement.parameter_shardings`.
    """
    devices = math.prod(mesh.shape[axis] for axis in sharding.CACHE_RULES["tokens"])
    divisible = lambda stack: tuple(core.sharing_heads(devices) for core in stack.cores)
    stacks = (dataclasses.replace(stack, cores=divisible(stack)) for stack in model.stacks)
    return _with_stacks(model, tuple(stacks))


def _with_stacks(model: cfg.ModelConfig, stacks: tuple[cfg.Stack, ...]) -> cfg.ModelConfig:
    """Return the model with other numbers of key heads, and with the same base model for muP.

    The sizes in `parametrization.base` replace sizes of the model. The base would therefore get the
    new numbers of key heads, which its query heads need not be divisible by.
    """
    scheme = model.parametrization
    if not getattr(scheme, "base", ()):
        return model.replace(stacks=stacks)
    short, kept = "stacks" not in model.short_form(), []
    for s, (old, new, base) in enumerate(
        zip(model.stacks, stacks, model.base_model.stacks, strict=True)
    ):
        for k, cores in enumerate(zip(old.cores, new.cores, base.cores, strict=True)):
            if cores[0] != cores[1]:
                path = cores[0].kind if short else f"stacks.{s}.cores.{k}"
                kept.append(f"{path}.num_kv_heads={cores[2].kv_heads}")
    scheme = dataclasses.replace(scheme, base=(*scheme.base, *kept))
    return model.replace(stacks=stacks, parametrization=scheme)


def repeat_key_heads(decoder: Decoder, mesh: jax.sharding.Mesh) -> Decoder:
    """Return an equivalent decoder whose key and value heads are divisible over the mesh.

    Its config is the result of `repeated_model`. If all heads are divisible already, `decoder` is
    returned.

    Args:
      decoder: a decoder whose parameters are sharded over the mesh.
      mesh: the mesh.
    """
    model = repeated_model(decoder.config, mesh)
    if model == decoder.config:
        return decoder
    abstract = nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0)))
    shardings = parameter_shardings(abstract, mesh)
    params = nnx.to_pure_dict(nnx.state(decoder, nnx.Param))
    for s, (old_stack, new_stack) in enumerate(
        zip(decoder.config.stacks, model.stacks, strict=True)
    ):
        for k, (old, new) in enumerate(zip(old_stack.cores, new_stack.cores, strict=True)):
            if old != new:
                params["stacks"][s][k] = _repeat(
                    params["stacks"][s][k], old, new, shardings["stacks"][s][k]
                )
    return nnx.merge(nnx.graphdef(abstract), params)


def _repeat(
    sublayer: dict[str, Any], old: cfg.Attention, new: cfg.Attention, shardings: dict[str, Any]
) -> dict[str, Any]:
    """Return a sublayer's parameters (stacked over layers) with repeated key and value heads."""
    heads, groups, times = old.num_heads, old.kv_heads, new.kv_heads // old.kv_heads
    gates = old.output_gate * heads
    site, core = dict(sublayer["site"]), dict(sublayer.get("core", {}))

    def repeat_rows(x: Array, first: int = heads) -> Array:
        """Repeat the rows of keys and values, which follow `first` other rows on axis 1 of x."""
        q, kv, others = jnp.split(x, [first, first + 2 * groups], axis=1)
        return jnp.concatenate([q, jnp.repeat(kv, times, axis=1), others], axis=1)

    def repeat_columns(x: Array) -> Array:
        """Repeat the columns of the key and value weights [layers, 2, D, G * D_h]."""
        x = jnp.repeat(x.reshape(*x.shape[:3], groups, -1), times, axis=3)
        return x.reshape(*x.shape[:3], -1)

    if "read_keys" in site:
        out_sharding = shardings["site"]["read_keys"]
        repeat = functools.partial(repeat_rows, first=gates + heads)
        site["read_keys"] = jax.jit(repeat, out_shardings=out_sharding)(site["read_keys"])
    elif new.kv_heads < heads:
        out_sharding = shardings["site"]["read_fewer"]
        site["read_fewer"] = jax.jit(repeat_columns, out_shardings=out_sharding)(site["read_fewer"])
    else:
        join = lambda q, kv: jnp.concatenate([q, repeat_columns(kv)], axis=1)
        out_sharding = shardings["site"]["read"]
        site["read"] = jax.jit(join, out_shardings=out_sharding)(
            site["read"], site.pop("read_fewer")
        )
    if old.query_key_norm and old.query_key_norm_over == "heads":
        repeat = functools.partial(jnp.repeat, repeats=times, axis=1)
        out_sharding = shardings["core"]["key_gain"]
        core["key_gain"] = jax.jit(repeat, out_shardings=out_sharding)(core["key_gain"])
    if old.bias:
        out_sharding = shardings["core"]["bias"]
        core["bias"] = jax.jit(repeat_rows, out_shardings=out_sharding)(core["bias"])
    # Attention without biases and norms has no parameters of its own.
    return sublayer | {"site": site} | ({"core": core} if core else {})
