"""Which form of attention serves on an NVIDIA GPU, by the sizes of heads: docs/gpu_attention.md."""

from typing import Literal, NamedTuple

from pallas_kernels.causal_attention import cudnn


class Form(NamedTuple):
    """What serves, and why cuDNN does not.

    Attributes:
      name: "cudnn", or "online": plain JAX, by an online softmax where logits are many.
      why: in a line; None where cuDNN serves.
    """

    name: Literal["cudnn", "online"]
    why: str | None


def form(
    capability: int,
    size: int,
    value_size: int,
    segments: bool,
    alibi: bool,
    *,
    length: int = 2048,
    dtype: str = "bfloat16",
) -> Form:
    """The form that attention takes by default, forward and backward.

    Args:
      capability: the device's compute capability, ten times over: 80 is sm_80.
      size: of queries and keys.
      value_size: of values.
      segments: whether documents of a row are told apart, as in training.
      alibi: whether there is ALiBi.
      length: tokens of a row.
      dtype: of queries.
    """
    why = cudnn.refused(
        capability, size, value_size, segments=segments, alibi=alibi, length=length, dtype=dtype
    )
    return Form("cudnn" if why is None else "online", why)
