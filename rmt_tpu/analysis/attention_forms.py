"""Which form the attention of a model takes on a device, and why it is not the device's kernel."""

import dataclasses
from types import ModuleType

import jax
import jax.numpy as jnp

from pallas_kernels.causal_attention import cudnn, mosaic_tpu
from pallas_kernels.causal_attention.interface import Attention
from pallas_kernels.target import lowering_for
from rmt_tpu import config as cfg
from rmt_tpu.estimator import Target

_KERNELS = {"tpu": ("mosaic_tpu", mosaic_tpu), "cuda": ("cudnn", cudnn)}


@dataclasses.dataclass(frozen=True)
class Attends:
    """How one kind of heads is attended with.

    Attributes:
      core: its kind.
      size: of queries and keys.
      form: "mosaic_tpu" or "cudnn", or "xla": plain JAX, by an online softmax where logits are
        many.
      why: the kernel does not serve, in a line; None where it does.
    """

    core: str
    size: int
    form: str
    why: str | None


def attention_forms(
    model: cfg.ModelConfig, target: Target, length: int, segments: bool = True
) -> tuple[Attends, ...]:
    """Those of the different softmax attentions of a model, in the order of depth.

    Args:
      model: whose compute dtype "auto" is taken for bfloat16, as on an accelerator.
      target: the device.
      length: tokens of a row, or keys of a prompt.
      segments: whether documents of a row, or what a cache has and has not, are told apart.
    """
    name, kernel = _KERNELS[target.platform]
    found = []
    for core in model.cores:
        given = _given(model, core, length, segments)
        if given is None:
            continue
        if model.kernels == "xla":
            why = "model.kernels=xla"
        else:
            why = _refusal(kernel, target, given)
        attends = Attends(core.kind, given.qkv.shape[3], "xla" if why else name, why)
        if attends not in found:
            found.append(attends)
    return tuple(found)


def _refusal(kernel: ModuleType, target: Target, given: Attention) -> str | None:
    """Why the kernel does not serve what is traced with such arrays; None if it does."""
    told = []

    def ask(given):
        told.append(kernel.unsupported("attention_forward", given))
        return given

    with lowering_for(target.kind):
        jax.eval_shape(ask, given)
    return told[0]


def _given(model: cfg.ModelConfig, core: cfg.Core, length: int, segments: bool) -> Attention | None:
    """What attention would be given, of one row; None of another kind of core."""
    dtype = jnp.dtype("bfloat16" if model.compute_dtype == "auto" else model.compute_dtype)
    array = lambda heads, size: jax.ShapeDtypeStruct((1, length, heads, size), dtype)
    if (softmax := core.softmax) is None:
        return None
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32) if segments else None
    slopes = jax.ShapeDtypeStruct((softmax.heads,), jnp.float32) if softmax.alibi else None
    kv = (array(softmax.kv_heads, size) for size in (softmax.size, softmax.value_size))
    return Attention(array(softmax.heads, softmax.size), 1.0, slopes, ids, tuple(kv))
