"""Policies of rematerialisation say what the forward pass keeps for the backward pass.

They choose values by their names, which `jax.ad_checkpoint.checkpoint_name` gives. What is not kept
is computed again.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from pallas_kernels.target import target

# Maps a policy of rematerialisation to the names of the values that are kept in the device's memory
# and in the host's memory. These values are the results of attention, the residual of a vector
# store after each write, queries, keys and values as attention reads them, and products with
# weights. A value is not kept if the backward pass does not need it, or can compute it from another
# kept value without a product.
_FULL, _PRODUCTS = ("attention", "residual"), ("heads", "product")
_KEPT = {
    "full": (_FULL, ()),
    "dots": ((*_FULL, *_PRODUCTS), ()),
    "offload": (_FULL, _PRODUCTS),
    "reversible": ((), ()),
    "reversible_dots": (("attention", *_PRODUCTS), ()),
}


class Kept(NamedTuple):
    """The names of the values that a policy keeps for the backward pass.

    Attributes:
      saved: the names of those that stay in the device's memory.
      offloaded: the names of those that the host's memory holds until the backward pass.
    """

    saved: Sequence[str] = ()
    offloaded: Sequence[str] = ()

    @property
    def products(self) -> bool:
        """Whether products with weights are among them."""
        return bool({*self.saved, *self.offloaded}.intersection(_PRODUCTS))


NOTHING = Kept()


def kept_by(policy: str) -> Kept | None:
    """Return the names of what a policy keeps, or None if it does not choose values by name.

    Only TPUs offload anything. Elsewhere these values stay in the device's memory.
    """
    if policy not in _KEPT:
        return None
    saved, offloaded = _KEPT[policy]
    return Kept(saved, offloaded) if target().on_tpu else Kept((*saved, *offloaded))


def without_arguments(pull_back: Any) -> Any:
    """Return what `jax.vjp` returned, without the arguments of its function.

    `with_arguments` puts the arguments back. They are then not kept a second time for each layer.
    """
    return dataclasses.replace(pull_back, args_res=None)


def with_arguments(pull_back: Any, arguments: list[Any]) -> Any:
    """Return the result of `without_arguments` with the arguments of the function put back."""
    return dataclasses.replace(pull_back, args_res=arguments)


def recomputed(run: Callable, kept: Kept) -> Callable:
    """Return `run` such that its backward pass recomputes all values but those that are kept.

    `run` is one iteration of a loop, or a part of one. Loops need no barriers against merging,
    because XLA does not merge operations of different iterations.
    """
    policy = jax.checkpoint_policies.save_only_these_names(*kept.saved)
    if kept.offloaded:
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=kept.saved,
            names_which_can_be_offloaded=kept.offloaded,
            offload_src="device",
            offload_dst="pinned_host",
        )
    return jax.checkpoint(run, policy=policy, prevent_cse=False)
