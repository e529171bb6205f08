"""Bodies of the depth-attention TPU kernels for vectors; see `mosaic_tpu` for the algorithm.

Each grid step processes one tile of tokens in VMEM. The kernels copy the sources from HBM with
their own DMAs, and skip empty rows of the bank (the array of all N sources). The DMAs of a tile run
while the previous tile is computed.

A matrix product processes one *group* of GROUP tokens for one *chunk* of up to CHUNK sources. The
sources are an operand [sources * GROUP, D], with one row for each source and token. The lanes of
the result have the same order. In a matrix with one row for each site and token, only entries whose
row and lane belong to the same token are used: the diagonal of each GROUP x GROUP square. The
weights are stored in this form, with 0 off the diagonals. One product then mixes all sources of a
chunk.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.arguments import Norm
from pallas_kernels.call import LANES, round_up, widen
from pallas_kernels.depth_attention.mosaic_tpu_tiles import (
    GROUP,
    BlockSizes,
    Tile,
    TiledCall,
    clear,
    copy_rows,
    each_group,
    fold_lanes,
    group_rows,
)
from pallas_kernels.products import dot

# Maximum number of sources per matrix product. CHUNK * GROUP = 256 rows fill two matrix units of
# 128 rows, or one of 256.
CHUNK = 16


@dataclasses.dataclass(frozen=True)
class VectorsCall(TiledCall):
    """The static parameters of a depth-attention kernel for vectors, constant during tracing.

    Attributes:
      N, S: the number of rows in the bank of sources, and the number of sites.
      tokens: the number of tokens.
      size: D, the number of entries of a source.
      width: D padded to a multiple of 128, the number of lanes.
      dtype: the sources' dtype.
      epsilon: the epsilon of the keys' norm.
      blocks: the block sizes.
      interpret: whether the kernel is interpreted.
      norm, norm_epsilon: the output's norm, for merges, and its epsilon.
    """

    N: int
    S: int
    tokens: int
    size: int
    width: int
    dtype: str
    epsilon: int | float
    blocks: BlockSizes
    interpret: bool
    norm: Norm | None = "layernorm"
    norm_epsilon: int | float = 0.0

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """The chunks of sources, each a pair (index of its first source, number of its sources)."""
        return [(i, min(CHUNK, self.N - i)) for i in range(0, self.N, CHUNK)]

    def mixed_by_product(self, sources: int) -> int:
        """Return how many of a chunk's `sources` the matrix unit adds to the weighted sum.

        If `sources` is one or two more than a multiple of 8, the vector unit adds the last one or
        two. The matrix unit would take as long for them as for 8 sources.
        """
        return sources - sources % 8 if sources % 8 in (1, 2) else sources

    @property
    def narrow(self) -> bool:
        """Whether the sources are bfloat16 and matrix operands are split into bfloat16 pieces."""
        return self.dtype == "bfloat16"

    @property
    def weight_pieces(self) -> int:
        """The number of bfloat16 pieces per weight; 1 if the sources are not bfloat16."""
        return self.blocks.weight_pieces if self.narrow else 1

    @property
    def query_rows(self) -> int:
        """The number of rows of the matrix operand that contains the queries' pieces."""
        return round_up(self.S * (3 if self.narrow else 1), GROUP)

    @property
    def left_rows(self) -> int:
        """The contracted size of the matrix product that computes the sources' gradients.

        See `_weigh_backward`.
        """
        weights = self.S * GROUP * self.weight_pieces
        return weights + round_up((3 * self.S + 3) if self.narrow else self.S + 1, GROUP)


def pieces(x, count: int = 3):
    """Split x into `count` bfloat16 arrays ("pieces") that sum to x.

    The sum is exact if `count` is 3. The low bits are masked off, because a compiler may remove a
    pair of conversions to bfloat16 and back.
    """
    out = []
    for _ in range(count):
        bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
        piece = jax.lax.bitcast_convert_type(bits & -(2**16), jnp.float32)
        out.append(piece.astype(jnp.bfloat16))
        x = x - piece
    return out


# Forward pass ---------------------------------------------------------------------------------


def partial(inputs, outputs, scratch, *, call: VectorsCall):
    """Compute the mixes (weighted sums of sources) and log-sum-exps of one tile of tokens."""
    count = inputs["count"][0]
    tile = Tile(call)
    bank = scratch["sources"]
    read = functools.partial(copy_rows, call, inputs["sources"], bank, scratch["read"], count)

    @pl.when(tile.first)
    def _():
        clear(call, bank, count)
        read(tile.at(0), 0, "start")

    @pl.when(~tile.last)
    def _():
        read(tile.at(1), 1 - tile.slot, "start")

    read(tile.at(0), tile.slot, "wait")
    bank = bank.at[tile.slot]
    outputs["log_sums"][...] = jnp.zeros_like(outputs["log_sums"])
    _score(call, count, bank, inputs, outputs, scratch)
    prior, mixed = inputs.get("prior"), outputs["mixed"]

    def write(group, lanes, s, h):
        if prior is not None:
            values = prior[s, group_rows(group), lanes].astype(jnp.float32)
            h = h + widen(scratch["prior_weights"][group, s], h.shape[1]) * values
        mixed[s, group_rows(group), lanes] = h.astype(mixed.dtype)

    def copy(group):
        for s in range(call.S):
            mixed[s, group_rows(group)] = bank[0, group_rows(group)]

    mix = functools.partial(_mix, call, count, bank, scratch, write)
    if prior is None:
        # Copy a single source to the mixes, because its computed weight may not be exactly 1.
        pl.when(count == 1)(lambda: each_group(call, copy))
        pl.when(count != 1)(mix)
    else:
        mix()


def _score(call, count, bank, inputs, outputs, scratch):
    """Compute the softmax weights of the sources for one tile of tokens."""
    queries = inputs["queries"]
    for c, (first, sources) in enumerate(call.chunks):

        def score(group, c=c, first=first, sources=sources):
            lhs = lambda lanes: queries[:, lanes]
            products, rstd = _products(call, bank, first, sources, group, lhs)
            scratch["logits"][c][group] = _sum_pieces(call, products) * rstd

        _when_any(call, c, count, functools.partial(each_group, call, score))
    each_group(call, lambda group: _weigh(call, count, group, inputs, outputs, scratch))


def _weigh(call, count, group, inputs, outputs, scratch):
    """Compute the softmax over sources for one group of tokens.

    Weights for matrix products are written to the scratch buffer `weights`, and weights for the
    vector unit to `columns`.
    """
    for s in range(call.S):
        logits = [
            jnp.where(
                _diagonal(sources) & _active(call, first, sources, count),
                scratch["logits"][c][group, s : s + 1],
                -jnp.inf,
            )
            for c, (first, sources) in enumerate(call.chunks)
        ]
        largest = [jnp.max(x, axis=1, keepdims=True) for x in logits]
        if "prior" in inputs:
            prior = column_of(inputs["prior_log_sums"][0, s : s + 1], group)
            largest.append(prior)
        m = functools.reduce(jnp.maximum, largest)
        shift = jnp.where(m == -jnp.inf, 0, m)
        logits = [jnp.exp(x - shift) for x in logits]
        total = sum(jnp.sum(x, axis=1, keepdims=True) for x in logits)
        if "prior" in inputs:
            prior = jnp.exp(prior - shift)
            total = total + prior
        scale = 1 / jnp.where(total == 0, 1, total)
        if "prior" in inputs:
            shape = (GROUP, LANES)
            scratch["prior_weights"][group, s] = jnp.broadcast_to(prior * scale, shape)
        log_sum = m + jnp.log(jnp.where(total == 0, 1, total))
        outputs["log_sums"][0, s : s + 1] += row_of(log_sum, group, call.blocks.tokens)
        for c, (_, sources) in enumerate(call.chunks):
            weights, products = logits[c] * scale, call.mixed_by_product(sources)
            rows = _operand_pieces(call, weights[:, : products * GROUP]) if products else []
            for k, piece in enumerate(rows):
                start = (s * len(rows) + k) * GROUP
                scratch["weights"][c][group, start : start + GROUP] = piece
            for i in range(products, sources):
                weight = weights[:, i * GROUP : (i + 1) * GROUP]
                weight = jnp.sum(weight, axis=1, keepdims=True)
                shape = (GROUP, LANES)
                scratch["columns"][c][group, i - products, s] = jnp.broadcast_to(weight, shape)


def _mix(call, count, bank, scratch, write):
    """Compute the weighted sums of all sites; pass each part to `write(group, lanes, s, h)`.

    The scratch buffer `sums` adds up the sums of several chunks.
    """
    sums = scratch.get("sums")

    def products(group, c, lanes):
        """Return the weighted sums [S, GROUP, lanes] of the sources of chunk c."""
        first, sources = call.chunks[c]
        by_product = call.mixed_by_product(sources)
        mixed = 0
        if by_product:
            values = _values(bank, first, by_product, group, lanes)
            product = _dot(call, scratch["weights"][c][group], values)
            product = product.reshape(call.S, -1, GROUP, product.shape[1])
            mixed = sum(product[:, k] for k in range(call.weight_pieces))
        for i in range(by_product, sources):
            values = bank[first + i, group_rows(group), lanes].astype(jnp.float32)
            columns = scratch["columns"][c][group, i - by_product]
            mixed = mixed + widen(columns, values.shape[1]) * values
        return mixed

    def write_all(group, lanes, mixed):
        for s in range(call.S):
            write(group, lanes, s, mixed[s])

    if sums is None:

        def mix(group):
            for lanes in call.lane_blocks:
                write_all(group, lanes, products(group, 0, lanes))

        each_group(call, mix)
        return
    for c in range(len(call.chunks)):

        def add(group, c=c):
            for lanes in call.lane_blocks:
                product = products(group, c, lanes)
                place = sums.at[group, :, :, lanes]
                place[...] = product if c == 0 else place[...] + product

        _when_any(call, c, count, functools.partial(each_group, call, add))

    def finish(group):
        for lanes in call.lane_blocks:
            write_all(group, lanes, sums[group, :, :, lanes])

    each_group(call, finish)


# Backward pass --------------------------------------------------------------------------------


def partial_backward(inputs, outputs, scratch, *, call: VectorsCall):
    """Compute the sources' gradients for one tile of tokens, and add to the queries' gradients.

    For bfloat16 sources, queries are split into pieces. The output `d_queries` then has the same
    rows as the input `queries`, one per query and piece, and the caller sums over pieces.
    """
    count = inputs["count"][0]
    tile = Tile(call)
    adds = "accumulate" in inputs
    bank, d_bank = scratch["sources"], scratch["d_sources"]
    copy = functools.partial(copy_rows, call)
    read = functools.partial(copy, inputs["sources"], bank, scratch["read"], count)
    written = count if adds else call.N
    write = functools.partial(
        copy, outputs["d_sources"], d_bank, scratch["written"], written, out=True
    )

    def read_added(*args):
        if adds:
            copy(inputs["accumulate"], d_bank, scratch["read_added"], count, *args)

    @pl.when(tile.first)
    def _():
        clear(call, bank, count)
        clear(call, d_bank, count)
        outputs["d_queries"][...] = jnp.zeros_like(outputs["d_queries"])
        read(tile.at(0), 0, "start")
        read_added(tile.at(0), 0, "start")

    @pl.when(~tile.last)
    def _():
        read(tile.at(1), 1 - tile.slot, "start")

    read(tile.at(0), tile.slot, "wait")
    values, d_values = bank.at[tile.slot], d_bank.at[tile.slot]
    d_mixed = inputs["d_mixed"]
    for c, (first, sources) in enumerate(call.chunks):

        def score(group, c=c, first=first, sources=sources):
            def lhs(lanes):
                g = d_mixed[:, group_rows(group), lanes].reshape(call.S * GROUP, -1)
                return jnp.concatenate([inputs["queries"][:, lanes], g], axis=0)

            products, rstd = _products(call, values, first, sources, group, lhs)
            scratch["logits"][c][group] = _sum_pieces(call, products) * rstd
            scratch["rstd"][c][group] = rstd
            scratch["g"][c][group] = products[call.query_rows :]

        _when_any(call, c, count, functools.partial(each_group, call, score))
    weigh = functools.partial(_weigh_backward, call, count, tile, inputs, scratch)
    each_group(call, weigh)

    @pl.when(~tile.first)
    def _():
        write(tile.at(-1), 1 - tile.slot, "wait")

    @pl.when(~tile.last)
    def _():
        read_added(tile.at(1), 1 - tile.slot, "start")

    read_added(tile.at(0), tile.slot, "wait")
    for c in range(len(call.chunks)):
        differentiate = functools.partial(
            _differentiate, call, inputs, outputs, scratch, values, d_values, c
        )
        _when_any(call, c, count, functools.partial(each_group, call, differentiate))
    write(tile.at(0), tile.slot, "start")

    @pl.when(tile.last)
    def _():
        write(tile.at(0), tile.slot, "wait")


def _differentiate(call, inputs, outputs, scratch, values, d_values, c, group):
    """Compute the gradients of one chunk's sources for a group of tokens; add to `d_queries`."""
    first, sources = call.chunks[c]
    left = scratch["left"][c][group]
    shrink = _dot(call, left, inputs["shrink_rows"][...])
    for lanes in call.lane_blocks:
        v = _values(values, first, sources, group, lanes)
        d_products = scratch["d_products"][c][group]
        outputs["d_queries"][0, :, lanes] += _dot(call, d_products, v)
        g = inputs["d_mixed"][:, group_rows(group), lanes].reshape(call.S * GROUP, -1)
        right = [g] * call.weight_pieces
        right = jnp.concatenate([*right, inputs["queries_again"][:, lanes]], axis=0)
        width = lanes.stop - lanes.start
        d = _dot(call, left, right) + widen(shrink, width) * v.astype(jnp.float32)
        d = d.reshape(sources, GROUP, width)
        place = d_values.at[first : first + sources, group_rows(group), lanes]
        if "accumulate" in inputs:
            d = d + place[...].astype(jnp.float32)
        place[...] = d.astype(d_values.dtype)


def _weigh_backward(call, count, tile, inputs, scratch, group):
    """Compute the matrix operands for the gradients of one group of tokens.

    Let W be the softmax weights, a = d_logit * rstd, and c = -rstd^2 / D * sum_s d_logit * logit.
    The gradients of the sources v are then `W d_mixed + a queries + c v`. The scratch buffer `left`
    receives the transpose of [W, a, c], and `d_products` receives a. If operands are bfloat16, W, a
    and the queries are split into pieces. W has `weight_pieces` pieces. The relative error of the
    product of a and the queries is 2^-16.
    """
    weights, d_logits = {}, {}
    # Beyond the last token, d_mixed may contain arbitrary values; weights and d_logits are 0 there.
    exist = (tile.at(0) * call.groups + group) * GROUP < call.tokens

    def meant(first, sources):
        return _diagonal(sources) & _active(call, first, sources, jnp.where(exist, count, 0))

    for s in range(call.S):
        log_sum = column_of(inputs["log_sums"][0, s : s + 1], group)
        total = column_of(inputs["delta"][0, s : s + 1], group) if "delta" in inputs else 0
        square = slice(s * GROUP, (s + 1) * GROUP)
        for c, (first, sources) in enumerate(call.chunks):
            where = meant(first, sources)
            logits = scratch["logits"][c][group, s : s + 1]
            weights[c, s] = jnp.where(where, jnp.exp(logits - log_sum), 0)
            g = jnp.where(where, scratch["g"][c][group, square], 0)
            total = total + jnp.sum(weights[c, s] * g, axis=1, keepdims=True)
        for c, (first, sources) in enumerate(call.chunks):
            g = scratch["g"][c][group, square]
            d = jnp.where(meant(first, sources), weights[c, s] * (g - total), 0)
            d_logits[c, s] = jnp.sum(d, axis=0, keepdims=True)
    for c, (first, sources) in enumerate(call.chunks):
        # Use 0 for empty rows of the bank, because the scratch buffers may contain arbitrary values
        # there.
        active = _active(call, first, sources, count)
        rstd = jnp.where(active, scratch["rstd"][c][group], 0)
        shrink = jnp.zeros_like(rstd)
        a = []
        for s in range(call.S):
            logits = jnp.where(active, scratch["logits"][c][group, s : s + 1], 0)
            shrink = shrink - d_logits[c, s] * logits
            a.append(d_logits[c, s] * rstd)
        shrink = shrink * (rstd * rstd / call.size)
        rows = [_operand_pieces(call, weights[c, s]) for s in range(call.S)]
        left = [row[k] for k in range(len(rows[0])) for row in rows]
        a = jnp.concatenate(a, axis=0)
        if call.narrow:
            a1, a2, a3 = (piece.astype(jnp.float32) for piece in pieces(a))
            c1, c2, c3 = (piece.astype(jnp.float32) for piece in pieces(shrink))
            last = [a1, a1, a2, c1, c2, c3]
            d_products = _padded([a1, a2, a3], call.query_rows)
        else:
            last = [a, shrink]
            d_products = _padded([a], call.query_rows)
        narrow = jnp.bfloat16 if call.narrow else jnp.float32
        padded = _padded(last, call.left_rows - len(left) * GROUP)
        left = [x.astype(jnp.float32) for x in left]
        transposed = jnp.concatenate([*left, padded], axis=0).T
        scratch["left"][c][group] = transposed.astype(narrow)
        scratch["d_products"][c][group] = d_products.astype(narrow)


# Functions that several kernels use -----------------------------------------------------------


def _when_any(call, c, count, body):
    """Run `body` if chunk c contains an active source, that is, one with an index below `count`.

    For the first chunk, `body` always runs, because its results are always read.
    """
    if c == 0:
        body()
    else:
        pl.when(count > call.chunks[c][0])(body)


def _products(call, bank, first, sources, group, lhs):
    """Multiply `lhs` by the sources of one chunk for one group of tokens.

    Returns:
      The products [.., sources * GROUP], and the rstd [1, sources * GROUP] of the sources.
    """
    products, squares = None, jnp.zeros((sources * GROUP, LANES), jnp.float32)
    for lanes in call.lane_blocks:
        v = _values(bank, first, sources, group, lanes)
        product = _dot_transposed(call, lhs(lanes), v)
        products = product if products is None else products + product
        for d in range(0, v.shape[1], LANES):
            x = v[:, d : d + LANES].astype(jnp.float32)
            squares = squares + x * x
    mean = jnp.sum(squares.T, axis=0, keepdims=True) / call.size
    return products, jax.lax.rsqrt(mean + call.epsilon)


def _sum_pieces(call, products):
    """Sum products over the pieces of each query, and return [S, ..]."""
    S = call.S
    if not call.narrow:
        return products[:S]
    return (products[2 * S : 3 * S] + products[S : 2 * S]) + products[:S]


def _values(bank, first, sources, group, lanes):
    """Return the rows (source, token) of a chunk for one group: [sources * GROUP, lanes]."""
    values = bank[first : first + sources, group_rows(group), lanes]
    return values.reshape(sources * GROUP, -1)


def _operand_pieces(call, x):
    """Return softmax weights as matrix operands: two pieces, or one array in the sources' dtype."""
    return pieces(x, 2) if call.weight_pieces == 2 else [x.astype(call.dtype)]


def _padded(rows, total):
    """Concatenate the arrays `rows` along axis 0, and append zeros up to `total` rows."""
    rows = jnp.concatenate(rows, axis=0)
    missing = total - rows.shape[0]
    if not missing:
        return rows
    return jnp.concatenate([rows, jnp.zeros((missing, rows.shape[1]), rows.dtype)], axis=0)


def _diagonal(sources):
    shape = (GROUP, sources * GROUP)
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return (lane & (GROUP - 1)) == row


def _active(call, first, sources, count):
    """Return a mask [1, sources * GROUP] that is True at lanes of sources before `count`."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, sources * GROUP), 1)
    return lane < (count - first) * GROUP


def _own_lane(group, tokens):
    """Return a mask [GROUP, tokens] that is True where row and lane belong to the same token."""
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, (GROUP, tokens), axis) for axis in (0, 1))
    return lane == row + group * GROUP


def column_of(row, group):
    """Return one group's values from a tile's row [1, tokens], as a column [GROUP, 1]."""
    own = _own_lane(group, row.shape[1])
    return jnp.sum(jnp.where(own, row, 0), axis=1, keepdims=True)


def row_of(column, group, tokens):
    """Convert one group's column [GROUP, 1] to a tile's row [1, tokens], with 0 at other tokens."""
    return jnp.sum(jnp.where(_own_lane(group, tokens), column, 0), axis=0, keepdims=True)


def centre(call, h):
    """Subtract the mean from h [GROUP, D] in place for layernorm, and return the rstd of h."""
    zero = jnp.zeros((GROUP, LANES), jnp.float32)
    squares = zero
    if call.norm == "layernorm":
        mean = sum((fold_lanes(h[:, lanes]) for lanes in call.lane_blocks), zero)
        mean = total(mean) / call.size
        for lanes in call.lane_blocks:
            x = h[:, lanes] - mean
            if lanes.stop > call.size:
                lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) + lanes.start
                x = jnp.where(lane < call.size, x, 0)
            h[:, lanes] = x
            squares = squares + fold_lanes(x * x)
    else:
        for lanes in call.lane_blocks:
            squares = squares + fold_lanes(h[:, lanes] * h[:, lanes])
    return jax.lax.rsqrt(total(squares) / call.size + call.norm_epsilon)


def fold_rows(x):
    """Sum x [rows, lanes] over groups of 8 rows, and return [8, lanes]."""
    return sum(x[r : r + 8] for r in range(0, x.shape[0], 8))


def total(x):
    """Sum x [rows, lanes] over all lanes, and return [rows, 1]."""
    return jnp.sum(x, axis=1, keepdims=True)


def _dot(call, a, b):
    return contract(call, a, b, 0)


def _dot_transposed(call, a, b):
    return contract(call, a, b, 1)


def contract(call, a, b, axis):
    """Multiply a by b: contract axis 1 of a with `axis` of b, accumulating in float32."""
    if call.interpret:  # On a CPU, some products of bfloat16 matrices are not supported.
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return dot(a, b, (1, axis))
