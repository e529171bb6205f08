"""Keys as the TPU kernels take them, their gradients as kernels leave them, and how tiles go."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels import operand
from pallas_kernels.call import LANES
from pallas_kernels.key_vector.mosaic_tpu_kernels import Call, Tail


class Walk(NamedTuple):
    """The tiles of tokens [B, N] of a backward pass: for two cores, where these divide.

    Each core sums the parameters' gradients on its own.
    """

    cores: int
    batches: int
    tiles_each: int
    by_batch: bool

    @classmethod
    def over(cls, B: int, tiles: int) -> "Walk":
        if B % 2 == 0:
            return cls(2, B // 2, tiles, True)
        return cls(2, B, tiles // 2, False) if tiles % 2 == 0 else cls(1, B, tiles, False)

    def tile(self, c, i, j):
        """The sequence and the tile in it."""
        if self.by_batch:
            return c * self.batches + i, j
        return i, c * self.tiles_each + j

    def tail(self, N: int, tokens: int) -> Tail | None:
        """None if every tile of so many tokens is full."""
        if N % tokens == 0:
            return None
        last_core = None if self.by_batch or self.cores == 1 else self.cores - 1
        return Tail(N % tokens, last_core, self.tiles_each - 1)


def read_operands(
    call: Call, gain, read_keys, slab: Callable[..., Any], *, sums: bool
) -> dict[str, Any]:
    """Of a read; `slab` gives the slab of v of a grid step. Sums are for a mean to be taken off."""
    of_v = folded(call, gain, read_keys)
    keys = block_diagonal(of_v, call.blocks.read_group)
    operands = {"read_keys": _by_slab(call, keys, slab)}
    if sums:
        sums = jnp.sum(of_v.astype(jnp.float32), axis=2).reshape(-1, keys.shape[1], 1)
        sums = jnp.broadcast_to(sums, (*sums.shape[:2], LANES))
        operands["read_key_sums"] = operand.constant(sums)
    return operands


def read_columns(call: Call, gain, read_keys, slab: Callable[..., Any]):
    """The read keys of a backward pass."""
    keys = block_diagonal(folded(call, gain, read_keys), call.blocks.read_group)
    return _by_slab(call, jnp.swapaxes(keys, 1, 2), slab)


def read_sums(call: Call, cores: int):
    """What a backward pass gives for the read keys and the gain, of each core; see below."""
    s, group = call.sizes, call.blocks.read_group
    shape = (cores, s.V // group, group * s.P_padded, group * s.K)
    block = (1, call.blocks.slab // group, *shape[2:])
    spec = pl.BlockSpec(block, lambda c, v, i, j, *_: (c, v, 0, 0))
    return jax.ShapeDtypeStruct(shape, jnp.float32), spec


def read_gradients(call: Call, sums, gain, read_keys):
    """Those of the gain and of the read keys, of `read_sums`."""
    s = call.sizes
    d_folded = jnp.sum(diagonal(sums, call.blocks.read_group), axis=0)
    d_folded = d_folded.reshape(s.V, s.P_padded, s.K)[:, : s.P] * call.unit
    gain, read_keys = gain.astype(jnp.float32), read_keys.astype(jnp.float32)
    d_gain = jnp.einsum("vpk,pk->kv", d_folded, read_keys, precision="highest")
    return d_gain, jnp.einsum("vpk,kv->pk", d_folded, gain, precision="highest")


def store_keys_of(call: Call, store_keys):
    """`w^T` for each v of a group: [group * K, group * R]; times the steps of a fixed-point X."""
    keys = jnp.swapaxes(padded_store_keys(call, store_keys), 0, 1) / call.unit
    return block_diagonal(keys[None], call.blocks.store_group, repeat=True)[0]


def padded_store_keys(call: Call, store_keys):
    keys = store_keys.astype(call.sizes.data_dtype)
    return jnp.pad(keys, ((0, call.sizes.R_padded - call.sizes.R), (0, 0)))


def folded(call: Call, gain, read_keys):
    """`G[v] = r * gain[:, v]`, rounded once, in rows of whole tiles: [V, P, K]"""
    keys = read_keys.astype(jnp.float32) * gain.T.astype(jnp.float32)[:, None]
    rows = call.sizes.padded(keys.shape[1]) - keys.shape[1]
    return jnp.pad(keys, ((0, 0), (0, rows), (0, 0))).astype(call.sizes.data_dtype)


def block_diagonal(blocks, group: int, repeat: bool = False):
    """[n, rows, columns] to [n / group, group * rows, group * columns]; or each one repeated."""
    n, rows, columns = blocks.shape
    if group == 1:
        return blocks
    blocks = blocks[:, None] if repeat else blocks.reshape(n // group, group, rows, columns)
    # A product for what is only moved, exactly: XLA would take an instruction for each copy.
    wide = jnp.dot(blocks, _side_by_side(group, columns, blocks.dtype), precision="highest")
    out = jnp.where(_own(group, columns), wide, 0)
    return out.reshape(out.shape[0], group * rows, group * columns)


def diagonal(x, group: int):
    """The blocks on the diagonal: [.., n, group * rows, group * columns] to [.., n, group, ..]."""
    *lead, rows, columns = x.shape
    x = x.reshape(*lead, group, rows // group, columns)
    if group == 1:
        return x
    columns //= group
    own = jnp.where(_own(group, columns), x, 0)
    return jnp.dot(own, _side_by_side(group, columns, x.dtype).T, precision="highest")


def _own(group: int, columns: int) -> np.ndarray:
    """Which columns of `group` blocks side by side are those of each block's own."""
    return np.arange(group)[:, None, None] == np.arange(group * columns) // columns


def _side_by_side(group: int, columns: int, dtype) -> np.ndarray:
    """The matrix that repeats columns."""
    return np.tile(np.eye(columns, dtype=dtype), group)


def _by_slab(call: Call, keys, slab):
    """The read keys by slabs of v; all of them, once, where that is one."""
    if call.slabs == 1:
        return operand.constant(keys)
    groups = call.blocks.slab // call.blocks.read_group
    return keys, pl.BlockSpec((groups, *keys.shape[1:]), lambda *ids: (slab(*ids), 0, 0))
