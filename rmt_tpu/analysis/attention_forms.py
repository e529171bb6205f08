"""Reports of which attention implementations a model uses on a device, and why."""

import dataclasses
from types import ModuleType

import jax
import jax.numpy as jnp

from pallas_kernels.causal_attention import cudnn, mosaic_tpu
from pallas_kernels.causal_attention.interface import AttentionOperands, Cap, Window
from pallas_kernels.target import lowering_for
from rmt_tpu import config as cfg
from rmt_tpu.estimator import Target

_KERNELS = {"tpu": ("mosaic_tpu", mosaic_tpu), "cuda": ("cudnn", cudnn)}


@dataclasses.dataclass(frozen=True)
class AttentionForm:
    """The implementation of attention for one kind of attention layer in a model.

    Attributes:
      core: the name of the attention core in the config, such as "attention" or "mla".
      size: the head size of queries and keys.
      form: the implementation: "mosaic_tpu", "cudnn" or "xla". "xla" is plain JAX, which uses an
        online softmax if there are many logits.
      why: the reason why the device's kernel is not used, in one line, or None if it is used.
    """

    core: str
    size: int
    form: str
    why: str | None


def attention_forms(
    model: cfg.ModelConfig, target: Target, length: int
) -> tuple[AttentionForm, ...]:
    """Return the implementation of each kind of softmax attention in a model, in order of depth.

    Attention gets segment ids, which separate the documents of a sequence, or mark unused cache
    entries.

    Args:
      model: the model; its compute dtype "auto" counts as bfloat16, as on an accelerator.
      target: the device.
      length: the number of tokens per sequence, or, for a prompt, the number of keys.
    """
    name, kernel = _KERNELS[target.platform]
    found = []
    for core in model.cores:
        arguments = _attention_arguments(model, core, length)
        if arguments is None:
            continue
        if model.kernels == "xla":
            why = "model.kernels=xla"
        else:
            why = _refusal(kernel, target, arguments)
        form = AttentionForm(core.kind, arguments.qkv.shape[3], "xla" if why else name, why)
        if form not in found:
            found.append(form)
    return tuple(found)


def _refusal(kernel: ModuleType, target: Target, arguments: AttentionOperands) -> str | None:
    """Return why an attention kernel does not support these arguments, or None if it does."""
    reasons = []

    def ask(arguments):
        reasons.append(kernel.unsupported("attention_forward", arguments))
        return arguments

    with lowering_for(target.kind):
        jax.eval_shape(ask, arguments)
    return reasons[0]


def _attention_arguments(
    model: cfg.ModelConfig, core: cfg.Core, length: int
) -> AttentionOperands | None:
    """Return the shapes and dtypes of attention's arguments, or None if the core has no softmax."""
    dtype = jnp.dtype("bfloat16" if model.compute_dtype == "auto" else model.compute_dtype)
    array = lambda heads, size: jax.ShapeDtypeStruct((1, length, heads, size), dtype)
    if (softmax := core.softmax) is None:
        return None
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    slopes = jax.ShapeDtypeStruct((softmax.heads,), jnp.float32) if softmax.alibi else None
    kv = (array(softmax.kv_heads, size) for size in (softmax.size, softmax.value_size))
    shown = None if softmax.window is None else Window(softmax.window)
    q = array(softmax.heads, softmax.size)
    cap = None if softmax.cap is None else Cap(softmax.cap)
    return AttentionOperands(q, 1.0, slopes, ids, tuple(kv), window=shown, cap=cap)
