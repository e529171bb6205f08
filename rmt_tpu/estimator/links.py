"""The links between chips that a collective can use, which may be fewer than a chip has.

The chips of a topology form a grid. A chip has a link to each of its neighbours. Along a dimension
with wraparound, the first and the last chip are neighbours too.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from rmt_tpu.estimator.collectives import Collective
from rmt_tpu.estimator.topology import Target


def seconds_on_links(
    sent: Collective, target: Target, mesh: Mapping[str, int], coordinates: Sequence | None
) -> float:
    """Return how long a collective takes to send its bytes over the links of its mesh axes.

    A ring along a dimension with wraparound uses two links of a chip, and any other line of chips
    one. A permutation sends all bytes to one device, over one link. Where this is unknown, because
    the collective has unknown axes or the device is a GPU, all links count.

    Args:
      sent: the collective.
      target: the device and its topology.
      mesh: maps the name of each mesh axis to its size, from the outermost to the innermost.
      coordinates: the coordinates of each device's chip in mesh order, or None if unknown.
    """
    seconds = sent.bytes / target.network(sent.between_slices)
    if coordinates is None or sent.between_slices or not set(sent.axes) <= set(mesh):
        return seconds
    grid = np.asarray(coordinates).reshape(*mesh.values(), -1)
    group = grid[tuple(slice(None) if axis in sent.axes else 0 for axis in mesh)]
    extents = [len(np.unique(group[..., d])) for d in range(len(target.shape))]
    if math.prod(extents) == 1:
        return seconds  # The cores of one chip need no links.
    wraps = zip(extents, _wraparound(target.shape), target.shape, strict=True)
    links = sum((2 if wrap and n == size > 2 else 1) for n, wrap, size in wraps if n > 1)
    if sent.kind == "collective-permute":
        links = 1
    return seconds * 2 * len(target.shape) / links


def _wraparound(shape: Sequence[int]) -> list[bool]:
    """Return for each dimension of a topology whether its first and last chips have a link.

    A topology with two dimensions wraps around the 16 chips of a whole pod's side. One with three
    dimensions does so if it consists of whole cubes of 4x4x4 chips.
    """
    if len(shape) == 2:
        return [size == 16 for size in shape]
    return [all(size % 4 == 0 for size in shape)] * len(shape)
