"""Selection of attention's default implementation on NVIDIA GPUs: see docs/gpu_attention.md."""

from typing import Literal, NamedTuple

from pallas_kernels.causal_attention import cudnn


class Form(NamedTuple):
    """An implementation of attention on a GPU, and the reason if it is not cuDNN.

    Attributes:
      name: "cudnn", or "online" for plain JAX, which uses an online softmax if there are many
        logits.
      why: the reason in one line; None for "cudnn".
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
    cap: float | None = None,
) -> Form:
    """Return the implementation that attention uses by default, forward and backward.

    Args:
      capability: ten times the device's compute capability: 80 is sm_80.
      size: the size of queries and keys.
      value_size: the size of values.
      segments: whether the documents of a row are separate segments, as in training.
      alibi: whether ALiBi is used.
      length: the number of tokens per row.
      dtype: the dtype of queries.
      cap: the soft cap on logits, or None.
    """
    of_masks = {"segments": segments, "alibi": alibi, "length": length}
    why = cudnn.refused(capability, size, value_size, **of_masks, dtype=dtype, cap=cap)
    return Form("cudnn" if why is None else "online", why)
