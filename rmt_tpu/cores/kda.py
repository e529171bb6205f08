"""Kimi Delta Attention (Kimi Team 2025, "Kimi Linear"), whose state is one matrix per head.

Let x be a token's concatenated data vectors, and q, k and v the query, key and value of a head, all
read from the residual:

    q, k, v = silu(conv(q)), silu(conv(k)), silu(conv(v));   q, k = q / |q|, k / |k|
    z = W_gb W_ga x + b       g = -exp(A) softplus(z),  or  lower sigmoid(exp(A) z)
    beta = sigmoid(w_beta x)
    S_t = Diag(e^g) S_(t-1) + beta k (v - k^T Diag(e^g) S_(t-1))^T      o = S_t^T q / sqrt(D_h)
    y = gain norm(o) sigmoid(W_ob W_oa x)

These equations apply to every head. All heads share one gain of size D_h. There are three options.
Each head may have a single decay, `z = w_a x + b`. Several heads may share their queries and keys.
Gates may be read from the residual, like values. With all three, and silu in place of the sigmoid,
this is Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024). The convolutions run over the last few
tokens, for each channel separately. Position embeddings are unnecessary, because convolutions and
decays already depend on the order of the tokens.
"""

import itertools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

import pallas_kernels
import sharding
from rmt_tpu import config as cfg
from rmt_tpu.cores.core import (
    Context,
    Core,
    Index,
    flatten_rows,
    gated,
    other_axes,
    to_tokens,
    unflatten_rows,
)
from rmt_tpu.layers import short_convolution, stacks
from rmt_tpu.layers.data_vectors import HeadsLayout, Read, concatenate
from rmt_tpu.layers.norm import normalize
from rmt_tpu.layers.parameters import Seed, gain, parameter
from rmt_tpu.layers.products import times

# Added to the squared length of a query or a key before the vector is divided by its length.
_EPSILON = 1e-6
# Each channel's decay has an initial step size, softplus(b). It is drawn log-uniformly from the
# range _STEPS and raised to at least _MIN_STEP. Without a lower bound on log decays, the initial
# rates exp(A) are drawn uniformly from 1 to _MAX_RATE.
_STEPS, _MIN_STEP = (1e-3, 1e-1), 1e-4
_MAX_RATE = 16.0


class Cache(NamedTuple):
    """The data kept between decode steps. Its size does not depend on the number of tokens.

    Attributes:
      states: the states S of this device's heads.
      tails: the last few tokens' inputs to the convolutions, one array for each array of
        convolution weights (taps).
    """

    states: Float[Array, "repeat batch heads head_dim head_dim"]
    tails: tuple[Float[Array, "repeat batch taps_less_1 groups heads_dim"], ...]


class Kda(Core):
    """Kimi Delta Attention, as described by a `config.Kda`.

    Attributes:
      taps: the convolution weights for queries, keys and values, [conv_size, 3, H D_h]. If there
        are only K < H query and key heads, `taps` has the weights for queries and keys,
        [conv_size, 2, K D_h].
      value_taps: the convolution weights for values, [conv_size, 1, H D_h], if K < H, or else None.
      w_decay_down, w_decay_up: W_ga [D, gate_rank], W_gb [gate_rank, H D_h]; None with one decay
        per head.
      w_decay: w_a [D, H] with one decay per head, or else None.
      decay_bias: b, [H D_h] or [H].
      log_rate: A, [H].
      w_beta: w_beta, [D, H].
      w_gate_down, w_gate_up: W_oa [D, gate_rank], W_ob [gate_rank, H D_h]; None with full gates.
      gain: the gain of the norm of the heads' reads o, [D_h].
    """

    name: ClassVar[str] = "kda"

    def __init__(self, config: cfg.ModelConfig, core: cfg.Kda, seed: Seed, layout: HeadsLayout):
        self.core, self.layout, self.epsilon = core, layout, config.norm_epsilon
        width, heads, size = config.width, core.num_heads, core.num_heads * core.head_dim

        def weights(name: str, *shape: int, axes: tuple) -> nnx.Param:
            std = config.init_std * shape[0] ** -0.5
            return parameter(seed / name, shape, std=std, role="hidden", axes=axes)

        # The taps (convolution weights) are of order 1, because a convolution sums over only a few
        # tokens. Like gains, they therefore have no weight decay.
        def taps(name: str, groups: int, count: int) -> nnx.Param:
            shape, axes = (core.conv_size, groups, count), ("taps", "projection", "heads")
            std = core.conv_size**-0.5
            return parameter(seed / name, shape, std=std, role="gain", axes=axes)

        alike = core.key_heads == heads
        self.taps = taps("taps", 3 if alike else 2, core.key_heads * core.head_dim)
        self.value_taps = None if alike else taps("value_taps", 1, size)
        down, up = ("embed", "rank"), ("embed", "heads")
        of_channels, low_rank = core.decays == "channels", core.gates == "low_rank"
        draw = lambda name, *shape, axes, has: weights(name, *shape, axes=axes) if has else None
        self.w_decay_down = draw("w_decay_down", width, core.rank, axes=down, has=of_channels)
        self.w_decay_up = draw("w_decay_up", core.rank, size, axes=up, has=of_channels)
        self.w_decay = draw("w_decay", width, heads, axes=up, has=not of_channels)
        lowest, highest = map(jnp.log, _STEPS)
        key = (seed / "decay_bias").key()
        count = size if of_channels else heads
        steps = jax.random.uniform(key, (count,), minval=lowest, maxval=highest)
        steps = jnp.maximum(jnp.exp(steps), _MIN_STEP)
        bounded = core.lower_bound is not None
        # The inverse of softplus, so that softplus(decay_bias) equals the drawn step size.
        self.decay_bias = nnx.Param(
            steps + jnp.log(-jnp.expm1(-steps)), role="gain", axes=("heads",)
        )
        key = (seed / "log_rate").key()
        rates = jax.random.uniform(key, (heads,), minval=1.0, maxval=_MAX_RATE)
        log_rate = jnp.zeros(heads) if bounded else jnp.log(rates)
        self.log_rate = nnx.Param(log_rate, role="gain", axes=("heads",))
        self.w_beta = weights("w_beta", width, heads, axes=("embed", "heads"))
        self.w_gate_down = draw("w_gate_down", width, core.rank, axes=down, has=low_rank)
        self.w_gate_up = draw("w_gate_up", core.rank, size, axes=up, has=low_rank)
        self.gain = gain((core.head_dim,), axes=("head_dim",))

    def __call__(
        self, z: Read, context: Context, index: Index
    ) -> Float[Array, "batch seq_or_gathered heads head_dim"]:
        """Return one data vector per head, in z's dtype; gates and states are at least float32."""
        return self._run(z, context, None, None)[0]

    def empty_cache(self, repeat: int, batch: int, capacity: int, dtype: jnp.dtype) -> Cache:
        """Return an empty cache with the states of this device's heads."""
        devices = sharding.axis_size(sharding.token_axes())
        heads, size = self.core.num_heads // devices, self.core.head_dim
        states = (repeat, batch, heads, size, size)
        groups = ((3, heads),)
        if self.value_taps is not None:
            groups = (2, self.core.key_heads // devices), (1, heads)
        shape = (repeat, batch, self.core.conv_size - 1)
        tails = tuple(jnp.zeros((*shape, n, count * size), dtype) for n, count in groups)
        state_dtype = jnp.promote_types(dtype, jnp.float32)
        return Cache(jnp.zeros(states, state_dtype), tails)

    def cache_specs(self) -> Cache:
        """Return the partition specs that shard a cache by batch rows and by heads."""
        rows, heads = (sharding.CACHE_RULES[axis] for axis in ("batch", "tokens"))
        tails = PartitionSpec(None, rows, None, None, heads)
        return Cache(PartitionSpec(None, rows, heads), (tails,) * len(self._all_taps))

    def step(
        self, z: Read, context: Context, index: Index, cache: Cache, layer: Index
    ) -> tuple[Float[Array, "batch seq heads head_dim"], Cache]:
        """Run the core on new tokens, starting from the states in the cache."""
        state, tail = stacks.slice_at(cache, layer)
        if context.start is None:
            state, tail = jax.tree.map(jnp.zeros_like, (state, tail))
        else:  # a row that starts a new sequence must not use its previous sequence's state
            begun = context.start > 0
            fresh = lambda x: jnp.where(begun[:, None, None, None], x, 0)
            state, tail = jax.tree.map(fresh, (state, tail))
        y, *new = self._run(z, context, state, tail)
        return y, stacks.update_at(cache, Cache(*new), layer)

    def _run(self, z, context, state, tail):
        """Return the heads' outputs, the final state, and the last tokens' convolution inputs."""
        x = sharding.gather(concatenate(z.residual), "tensor", axis=1)
        runs = [unflatten_rows(run, context) for run in self._own_heads(z.heads)]
        gates = None
        if self.core.gates == "full":
            gates, runs[-1] = runs[-1][:, :, -1], runs[-1][:, :, :-1]
        (q, k, v), tail = self._convolve(runs, context, tail)
        log_decay, beta = (
            unflatten_rows(part, context) for part in (self._decays(x), self._betas(x))
        )
        if gates is None:
            gates = self._project(x, self.w_gate_down, self.w_gate_up)
            gates = unflatten_rows(gates, context)
        if context.lengths is not None:  # padding tokens must not change their row's state
            valid = jnp.arange(q.shape[1]) < context.lengths[:, None]
            log_decay = jnp.where(valid[..., None, None], log_decay, 0)
            beta = jnp.where(valid[..., None], beta, 0)
        scale = self.core.head_dim**-0.5
        q, k = (self._of_values(_unit(x)) for x in (q, k))
        log_decay = jnp.broadcast_to(log_decay, (*v.shape[:3], k.shape[3]))
        args = (q, k, v, log_decay, beta)
        if q.shape[1] == 1 and state is not None:
            result = pallas_kernels.delta_step(*(a[:, 0] for a in args), state, scale=scale)
            read, state = result[0][:, None], result[1]
        else:
            ids = context.segment_ids
            read, state = pallas_kernels.delta_attention(*args, state, scale=scale, segment_ids=ids)
        norm = {"norm": "rmsnorm", "epsilon": self.epsilon, "dtype": x.dtype}
        y = gated(normalize(read, self.gain[...], **norm), gates, self.core.gate_activation)
        return to_tokens(flatten_rows(y, context), self.layout, other_axes()), state, tail

    @property
    def _all_taps(self):
        """The arrays of convolution weights, in the order queries, keys, values."""
        return [taps for taps in (self.taps, self.value_taps) if taps is not None]

    def _convolve(self, runs, context, tails):
        """Return the convolved queries, keys and values, and the last inputs for the next step."""
        found, new = [], []
        for n, (run, all_taps) in enumerate(zip(runs, self._all_taps, strict=True)):
            batch, seq, groups = run.shape[:3]
            channels = run.reshape(batch, seq, groups, -1)
            earlier = (batch, self.core.conv_size - 1, *channels.shape[2:])
            tail = jnp.zeros(earlier, channels.dtype) if tails is None else tails[n]
            taps = self._own_part(all_taps, axis=2).astype(channels.dtype)
            mixed = short_convolution.convolve(channels, taps, tail, context.segment_ids)
            mixed = jax.nn.silu(mixed).reshape(run.shape)
            found += [mixed[:, :, group] for group in range(groups)]
            new.append(short_convolution.tail(channels, tail, context.lengths))
        return found, tuple(new)

    def _of_values(self, x):
        """Repeat the heads of x (queries or keys) so that each value head has its own copy."""
        each = self.core.num_heads // self.core.key_heads
        return jnp.repeat(x, each, axis=2) if each > 1 else x

    def _decays(self, x):
        """Compute the log decays g of every head, [batch, seq, heads, head_dim or 1].

        The addition of the bias, and all operations after it, are computed in at least float32.
        """
        dtype = jnp.result_type(x, jnp.float32)
        if self.w_decay is None:
            z = self._project(x, self.w_decay_down, self.w_decay_up).astype(dtype)
        else:
            z = times(x, self.w_decay, gathered=-2).astype(dtype)
            z = sharding.swap(z, other_axes(), split=2, join=1)[..., None]
        z = z + self._own_part(self.decay_bias).reshape(z.shape[2:])
        rate = jnp.exp(self._own_part(self.log_rate))[:, None]
        if self.core.lower_bound is not None:
            return self.core.lower_bound * jax.nn.sigmoid(rate * z)
        return -rate * jax.nn.softplus(z)

    def _betas(self, x):
        """Compute the write strength beta of every head, in at least float32."""
        logits = times(x, self.w_beta, gathered=-2)
        dtype = jnp.result_type(x, jnp.float32)
        logits = sharding.swap(logits, other_axes(), split=2, join=1)
        return jax.nn.sigmoid(logits.astype(dtype))

    def _project(self, x, down, up):
        """Compute the low-rank projection `up down x` for this device's heads and all tokens."""
        y = times(times(x, down, gathered=-2), up, gathered=-2)
        y = y.reshape(*y.shape[:2], -1, self.core.head_dim)
        return sharding.swap(y, other_axes(), split=2, join=1)

    def _own_part(self, x, axis=0):
        """Return the part of a parameter x for this device's heads; x is sharded over `tensor`."""
        return sharding.own_part(x[...], other_axes(), axis=axis)

    def _own_heads(self, heads):
        """Return this device's heads, [batch, all_seq, groups, heads, head_dim].

        If queries and keys have as many heads as values, the result is one array. Otherwise it is
        two arrays: one for queries and keys, and one for values and full gates. Devices exchange
        heads for tokens along all mesh axes that shard tokens, beginning with `tensor`.
        """
        devices = 1 if not self.layout.projected else sharding.axis_size("tensor")
        counts, runs, start = self.core.reads.heads, [], 0
        for count, run in itertools.groupby(counts):
            groups, own = len(list(run)), count // devices
            part = heads[:, :, start : start + groups * own]
            part = part.reshape(*part.shape[:2], groups, own, part.shape[-1])
            if not self.layout.projected:
                part = sharding.swap(part, "tensor", split=3, join=1)
            runs.append(sharding.swap(part, other_axes(), split=3, join=1))
            start += groups * own
        return runs


def _unit(x):
    """Divide vectors by their length, computed in at least float32; keep their dtype."""
    wide = x.astype(jnp.result_type(x, jnp.float32))
    length = jnp.sum(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(length + _EPSILON)).astype(x.dtype)
