"""Bodies of the depth-attention TPU kernels for residual matrices.

Each grid step processes one tile of tokens. The tokens are in the lanes, and their number is a
multiple of 128. A source is [D, lanes] in a tile, and each number per token, such as a weight, is
in a row [1, lanes]. Logits are matrix products of the queries and a source. The queries' gradients
are matrix products that contract over tokens. All other computation is elementwise and processes
STEP rows at a time.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels.call import LANES, largest_divisor, round_up
from pallas_kernels.depth_attention.mosaic_tpu_kernels import contract, pieces

# Number of rows of a source per elementwise step. The sums of all sites then fit in registers.
STEP = 32
# Maximum number of chunks or steps that are unrolled into one loop iteration.
UNROLL = 4


@dataclasses.dataclass(frozen=True)
class MatricesCall:
    """The static parameters of a depth-attention kernel for matrices, constant during tracing.

    Attributes:
      N, S: the number of rows in the bank of sources, and the number of sites.
      batch, tokens: the number of sequences and the length of a sequence.
      size: D, the number of entries of a source.
      dtype: the sources' dtype.
      epsilon: the epsilon of the keys' norm.
      interpret: whether the kernel is interpreted.
      lanes: the number of tokens per tile.
    """

    N: int
    S: int
    batch: int
    tokens: int
    size: int
    dtype: str
    epsilon: int | float
    interpret: bool
    lanes: int = LANES

    @property
    def narrow(self) -> bool:
        """Whether the sources are bfloat16 and matrix operands are split into bfloat16 pieces."""
        return self.dtype == "bfloat16"

    @property
    def tiles(self) -> int:
        """The number of tiles per sequence."""
        return -(-self.tokens // self.lanes)

    @property
    def cores(self) -> int:
        """The number of grid slices that cores process in parallel.

        It is 2, or 1 if the total number of tiles is odd. Each slice has its own sum of the
        queries' gradients.
        """
        return 2 if self.batch * self.tiles % 2 == 0 else 1

    @property
    def tiles_each(self) -> int:
        """The number of tiles per grid slice, over all sequences; see `cores`."""
        return self.batch * self.tiles // self.cores

    @property
    def rows(self) -> int:
        """The number of rows in a chunk, the part of a source that one matrix product processes."""
        return math.gcd(self.size, 256)

    @property
    def chunks(self) -> int:
        """The number of chunks of a source; each chunk has `rows` rows."""
        return self.size // self.rows

    @property
    def query_rows(self) -> int:
        """The number of rows of the matrix operand that contains the queries' pieces."""
        return round_up(self.S * (3 if self.narrow else 1), 16)

    def tile(self, core, j):
        """Return the indices of the sequence and of its tile that a core processes in step j."""
        place, tiles = core * self.tiles_each + j, np.int32(self.tiles)
        return jax.lax.div(place, tiles), jax.lax.rem(place, tiles)


# Forward pass ---------------------------------------------------------------------------------


def partial(inputs, outputs, scratch, *, call: MatricesCall):
    """Compute the mixes (weighted sums of sources) and log-sum-exps of one tile of tokens."""
    count, N, S = inputs["count"][0], call.N, call.S
    sources = [inputs[f"source_{i:02}"].at[0, 0] for i in range(N)]
    logits, weights = scratch["logits"], scratch["weights"]
    for i, values in enumerate(sources):

        @pl.when(i < count)
        def _(i=i, values=values):
            products, rstd = _score(call, inputs["queries"], values)
            logits[i] = products * rstd

        @pl.when(i >= count)
        def _(i=i):
            logits[i] = jnp.full((S, LANES), -jnp.inf, jnp.float32)

    parts = [logits[i] for i in range(N)]
    if "prior" in inputs:
        parts.append(inputs["prior_log_sums"][0])
    most = functools.reduce(jnp.maximum, parts)
    most = jnp.where(most == -jnp.inf, 0, most)
    log_sums = most + jnp.log(sum(jnp.exp(part - most) for part in parts))
    outputs["log_sums"][0] = log_sums
    for i, part in enumerate(parts):
        weights[i] = jnp.where(part == -jnp.inf, 0, jnp.exp(part - log_sums))

    def mix(rows):
        sums = [None] * S
        if "prior" in inputs:
            priors = [inputs["prior"][s, 0, rows].astype(jnp.float32) for s in range(S)]
            sums = [weights[N, s : s + 1] * prior for s, prior in enumerate(priors)]
        for i, values in enumerate(sources):
            # Replace the values of empty rows by 0, because they may be NaN.
            x = jnp.where(i < count, values[rows].astype(jnp.float32), 0)
            for s in range(S):
                part = weights[i, s : s + 1] * x
                sums[s] = part if sums[s] is None else sums[s] + part
        for s in range(S):
            outputs["mixed"][s, 0, rows] = sums[s].astype(outputs["mixed"].dtype)

    each_step(call, mix)


def merge(inputs, outputs, scratch, *, call: MatricesCall):
    """Compute one site's mix h for a tile, from its row of `mixed` and the running sum."""

    def write(i, h):
        outputs["h"][0, _step_rows(i, STEP)] = h.astype(outputs["h"].dtype)

    mix(call, inputs, write)


def mix(call: MatricesCall, inputs, write, step: int = STEP):
    """Compute the mix `h = mixed + p (current - mixed)` of one tile in steps of `step` rows.

    `write(i, h)` receives the rows of step i.

    Returns:
      The result of `share`: the weight p, the logit and the rstd of the running sum.
    """
    current, mixed = inputs["current"].at[0], inputs["mixed"].at[0]
    p, logit, rstd = share(call, inputs)

    def add(i):
        rows = _step_rows(i, step)
        x, m = current[rows].astype(jnp.float32), mixed[rows].astype(jnp.float32)
        write(i, m + p * (x - m))

    _loop(call, call.size // step, UNROLL, add, None)
    return p, logit, rstd


# Backward pass --------------------------------------------------------------------------------


def measure(inputs, outputs, scratch, *, call: MatricesCall):
    """Compute the logits, rstd and <d_mixed, v> of each source v for one tile of tokens.

    The sources' gradients are computed from these numbers. For an empty row of the bank, nothing is
    written.
    """
    d_mixed, zeros = inputs["d_mixed"], (jnp.zeros((8, LANES), jnp.float32),) * call.S
    for i in range(call.N):
        values = inputs[f"source_{i:02}"].at[0, 0]

        def along(rows, sums, values=values):
            x = values[rows].astype(jnp.float32)
            ds = [d_mixed[s, 0, rows].astype(jnp.float32) for s in range(call.S)]
            return tuple(total + _fold(d * x) for total, d in zip(sums, ds, strict=True))

        @pl.when(i < inputs["count"][0])
        def _(i=i, values=values, along=along):
            products, rstd = _score(call, inputs["queries"], values)
            outputs["logits"][0, i], outputs["rstd"][0, i] = products * rstd, rstd
            for s, x in enumerate(each_step(call, along, zeros)):
                outputs["g"][0, i, s : s + 1] = jnp.sum(x, axis=0, keepdims=True)


def partial_backward(inputs, outputs, scratch, *, call: MatricesCall):
    """Compute one source's gradient for one tile of tokens.

    The gradients of the queries are accumulated over tiles and sources.
    """
    count, n = inputs["count"][0], pl.program_id(2)
    values, d_mixed = inputs["sources"].at[0, 0], inputs["d_mixed"]
    d_values = outputs["d_sources"].at[0, 0]
    adds, exists = "accumulate" in inputs, existing(call)

    @pl.when((pl.program_id(1) == 0) & (n == 0))
    def _():
        outputs["d_queries"][...] = jnp.zeros_like(outputs["d_queries"])

    @pl.when(n < count)
    def _():
        weights, shrink = inputs["weights"].at[0, 0], inputs["shrink"][0, 0]
        d_queries, d_products = outputs["d_queries"], inputs["d_products"][0, 0]
        write = _query_gradients(call, inputs, exists, d_queries, values, d_products)

        def differentiate(chunk):
            of_score = write(chunk)
            for first in range(0, call.rows, STEP):
                rows = pl.ds(chunk * call.rows + first, STEP)
                d = of_score[first : first + STEP] - shrink * values[rows].astype(jnp.float32)
                for s in range(call.S):
                    d = d + weights[s : s + 1] * d_mixed[s, 0, rows].astype(jnp.float32)
                if adds:
                    d = d + inputs["accumulate"][0, 0, rows].astype(jnp.float32)
                d_values[rows] = d.astype(d_values.dtype)

        _each_chunk(call, differentiate)

    # The gradient of an empty row (a row of the bank without a source) is zero. If gradients are
    # accumulated, an empty row has the output block of the last active row, which is already
    # written. If no row is active, the block is row 0, which must be copied from the accumulator.
    @pl.when((n >= count) & ((n == 0) if adds else True))
    def _():
        zeros = jnp.zeros(d_values.shape, d_values.dtype)
        d_values[...] = inputs["accumulate"][0, 0] if adds else zeros


def merge_backward(inputs, outputs, scratch, *, call: MatricesCall):
    """Compute the cotangents of `merge` for one tile, and add to the query's cotangent."""

    @pl.when(pl.program_id(1) == 0)
    def _():
        outputs["d_query"][...] = jnp.zeros_like(outputs["d_query"])

    differentiate_merge(
        call, inputs, outputs, inputs["d_h"].at[0], share(call, inputs), existing(call)
    )


def differentiate_merge(call: MatricesCall, inputs, outputs, d_h, shared, exists):
    """Compute the backward pass of `h = mixed + p (current - mixed)` for one tile.

    The gradient of `mixed` is (1 - p) d_h. Let d_logit = p (1 - p) <d_h, current - mixed>. The
    gradient of `current` is p d_h + d_logit (rstd query - rstd^2 / D logit current). It is added to
    the cotangent of `current`.

    Args:
      call, inputs, outputs: the static parameters and the refs of the kernel.
      d_h: the cotangent of h.
      shared: the weight p, the logit and the rstd of the running sum, from `share`.
      exists: a mask of the tokens that exist, because the last tile may be only partly filled; or
        None if all exist.
    """
    current, mixed, added = (inputs[k].at[0] for k in ("current", "mixed", "d_current_in"))
    d_mixed, d_current = (outputs[k].at[0] for k in ("d_mixed", "d_current"))
    p, logit, rstd = shared

    def along(rows, total):
        x, m, d = (y[rows].astype(jnp.float32) for y in (current, mixed, d_h))
        return total + _fold(d * (x - m))

    total = each_step(call, along, jnp.zeros((8, call.lanes), jnp.float32))
    d_logit = p * (1 - p) * jnp.sum(total, axis=0, keepdims=True)
    outputs["d_log_sums"][0] = -d_logit
    d_product = d_logit * rstd
    shrink = d_product * rstd * logit / call.size
    write = _query_gradients(call, inputs, exists, outputs["d_query"], current, d_product)

    def differentiate(chunk):
        of_score = write(chunk)
        for first in range(0, call.rows, STEP):
            rows = pl.ds(chunk * call.rows + first, STEP)
            x, d = current[rows].astype(jnp.float32), d_h[rows].astype(jnp.float32)
            to_current = p * d
            d_mixed[rows] = (d - to_current).astype(d_mixed.dtype)
            to_current = to_current + (of_score[first : first + STEP] - shrink * x)
            to_current = to_current + added[rows].astype(jnp.float32)
            d_current[rows] = to_current.astype(d_current.dtype)

    _each_chunk(call, differentiate)


# Functions that several kernels use -----------------------------------------------------------


def share(call, inputs):
    """Return the weight p, the logit and the rstd of the running sum, each [1, lanes]."""
    products, rstd = _score(call, inputs["queries"], inputs["current"].at[0])
    logit = products * rstd
    p = jax.nn.sigmoid(logit - inputs["log_sums"][0])
    return jnp.where(inputs["active"][0] != 0, p, 0), logit, rstd


def _score(call, queries, values):
    """Return `<query, v>` [S, lanes] for all sites, and rstd(v) [1, lanes], for one source v."""

    def add(chunk, sums):
        x = values[_chunk_rows(call, chunk)]
        wide = x.astype(jnp.float32)
        return sums[0] + contract(call, queries[chunk], x, 0), sums[1] + _fold(wide * wide)

    zero = [jnp.zeros((rows, call.lanes), jnp.float32) for rows in (call.query_rows, 8)]
    products, squares = _each_chunk(call, add, tuple(zero))
    S = call.S
    if call.narrow:
        products = (products[2 * S : 3 * S] + products[S : 2 * S]) + products[:S]
    mean = jnp.sum(squares, axis=0, keepdims=True) / call.size
    return products[:S], jax.lax.rsqrt(mean + call.epsilon)


def _query_gradients(call, inputs, exists, d_queries, values, d_products):
    """Return a function that computes two products of the backward pass for a chunk of a source v.

    The function takes the chunk's index. It adds `sum_tokens d_product v` to `d_queries`. It
    returns `sum_s d_product_s query_s`, a term of the gradient of v. If operands are bfloat16, they
    are split into pieces. The relative error of the returned product is then 2^-16.
    """
    if exists is not None:
        d_products = jnp.where(exists, d_products, 0)
    if call.narrow:
        a1, a2, a3 = (piece.astype(jnp.float32) for piece in pieces(d_products))
        right, left = [a1, a1, a2], [a1, a2, a3]
    else:
        right = left = [d_products]
    right, left = (_padded(call, rows) for rows in (right, left))

    def write(chunk):
        x = values[_chunk_rows(call, chunk)]
        if exists is not None:
            x = jnp.where(exists, x.astype(jnp.float32), 0).astype(x.dtype)
        d_queries[chunk] += contract(call, left, x, 1)
        return contract(call, inputs["query_columns"][chunk], right, 0)

    return write


def existing(call):
    """Return a mask of the tokens that exist in this step's tile; None if all tiles are full.

    Memory beyond the last token may contain arbitrary values.
    """
    _, tile = call.tile(pl.program_id(0), pl.program_id(1))
    return existing_of(call, tile)


def existing_of(call, tile):
    """Return the mask of the tokens that exist in tile `tile` of a sequence; None if all exist."""
    if call.tokens % call.lanes == 0:
        return None
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, call.lanes), 1)
    return lane < call.tokens - tile * call.lanes


def _padded(call, rows):
    rows = jnp.concatenate(rows)
    missing = call.query_rows - rows.shape[0]
    rows = (
        jnp.concatenate([rows, jnp.zeros((missing, call.lanes), jnp.float32)]) if missing else rows
    )
    return rows.astype(call.dtype)


def _chunk_rows(call, chunk):
    return pl.ds(pl.multiple_of(chunk * call.rows, call.rows), call.rows)


def _each_chunk(call, body, carry=None):
    """Run `body(chunk)`, or `carry = body(chunk, carry)`, for all chunks of rows of a source."""
    return _loop(call, call.chunks, UNROLL, body, carry)


def each_step(call, body, carry=None):
    """Run `body(rows)`, or `carry = body(rows, carry)`, for every STEP rows of a source."""
    step = lambda i, *carry: body(_step_rows(i, STEP), *carry)
    return _loop(call, call.size // STEP, UNROLL, step, carry)


def _step_rows(i, step):
    return pl.ds(pl.multiple_of(i * step, step), step)


def _loop(call, count, unroll, body, carry):
    def run(i, carry):
        out = body(i) if carry is None else body(i, carry)
        return out if carry is not None else None

    unroll = 1 if call.interpret else largest_divisor(count, unroll)
    return jax.lax.fori_loop(0, count, run, carry, unroll=unroll)


def _fold(x):
    """Sum the rows to 8 partial sums, without moving data across sublanes."""
    return jnp.sum(x.reshape(-1, 8, x.shape[1]), axis=0)
