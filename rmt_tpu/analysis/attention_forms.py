"""The form that a model's attention takes on a device, and why it is not the device's kernel."""

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
    """The form of attention for one kind of heads.

    Attributes:
      core: the kind of the core.
      size: the size of queries and keys.
      form: "mosaic_tpu", "cudnn" or "xla"; "xla" is plain JAX, with an online softmax where there
        are many logits.
      why: why the kernel is not used, in a line; None where it is.
    """

    core: str
    size: int
    form: str
    why: str | None


def attention_forms(
    model: cfg.ModelConfig, target: Target, length: int, segments: bool = True
) -> tuple[Attends, ...]:
    """Return the forms of a model's different softmax attentions, in the order of depth.

    Args:
      model: the model; its compute dtype "auto" counts as bfloat16, as on an accelerator.
      target: the device.
      length: tokens of a row, or keys of a prompt.
      segments: whether attention has segment ids, for documents in a row or for unused cache
        entries.
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
    """Return why the kernel does not take these arrays, or None if it does."""
    told = []

    def ask(given):
        told.append(kernel.unsupported("attention_forward", given))
        return given

    with lowering_for(target.kind):
        jax.eval_shape(ask, given)
    return told[0]


def _given(model: cfg.ModelConfig, core: cfg.Core, length: int, segments: bool) -> Attention | None:
    """Return the arguments of attention for one row; None for a core without softmax attention."""
    dtype = jnp.dtype("bfloat16" if model.compute_dtype == "auto" else model.compute_dtype)
    array = lambda heads, size: jax.ShapeDtypeStruct((1, length, heads, size), dtype)
    if (softmax := core.softmax) is None:
        return None
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32) if segments else None
    slopes = jax.ShapeDtypeStruct((softmax.heads,), jnp.float32) if softmax.alibi else None
    kv = (array(softmax.kv_heads, size) for size in (softmax.size, softmax.value_size))
    return Attention(array(softmax.heads, softmax.size), 1.0, slopes, ids, tuple(kv))
