"""A prompt that is read in parts is the prompt."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rmt_tpu import config as cfg
from rmt_tpu.cores import mla
from rmt_tpu.cores.core import put_tokens
from rmt_tpu.cores.mla import Cache
from rmt_tpu.decoder import Decoder
from rmt_tpu.generation import Sampling
from rmt_tpu.generation.engine import Engine, Request
from tests import models
from tests.closeness import assert_close
from tests.tiers import later

LENGTHS, PART = np.array([11, 7], np.int32), 4
GROUPED = cfg.Attention(4, 6, cfg.Rope(), False, num_kv_heads=2)
LATENT = cfg.Mla(num_heads=3, head_dim=6, kv_rank=4, rope_dim=2)


def make(store, mixer, positions):
    core = positions if positions in (GROUPED, LATENT) else None
    config = models.model(store, mixer=mixer, **({} if core else {"positions": positions}))
    if core:
        config = config.replace(stacks=(cfg.Stack((core, cfg.FeedForward(10)), repeat=2),))
    params = jax.tree.map(np.float32, models.random_parameters(config))
    graphdef, _ = models.split(config)
    return nnx.merge(graphdef, params)


@pytest.mark.parametrize(
    "store, mixer, positions",
    [
        ("matrix", cfg.BlockAttention(num_blocks=2), cfg.Alibi()),
        *later(
            ("vector", cfg.Sum(), GROUPED),
            ("vector", cfg.Sum(), LATENT),
            ("vector", cfg.FullAttention(), cfg.Learned(32)),
            ("matrix", cfg.Sum(), cfg.Rope()),
            ("vector", cfg.MhcLite(streams=2), cfg.NoPositions()),
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else x.kind,
)
def test_parts_are_the_whole(store, mixer, positions):
    """Of rows of different lengths, the parts too: one has nothing where the other goes on."""
    decoder = make(store, mixer, positions)
    tokens = np.array(models.tokens(batch=2))
    wanted, cache = jax.jit(Decoder.prefill)(decoder, tokens, LENGTHS, decoder.empty_cache(2, 16))
    parts, extend = decoder.empty_cache(2, 16), jax.jit(Decoder.extend)
    for lengths in ((4, 3), (4, 3), (3, 1)):
        starts = np.asarray(parts.length)
        rows = np.stack([np.resize(row[n:], PART) for row, n in zip(tokens, starts, strict=True)])
        logits, parts = extend(decoder, rows, np.array(lengths, np.int32), parts)
    np.testing.assert_array_equal(parts.length, LENGTHS)
    assert_close(logits, wanted, 1e-5)
    for got, want in zip(jax.tree.leaves(parts.cores), jax.tree.leaves(cache.cores), strict=True):
        for row, length in enumerate(LENGTHS):
            assert_close(got[:, row, :length], want[:, row, :length], 1e-5)


@pytest.mark.slow
def test_latent_heads_expand_no_more_than_a_part():
    """As with W_kvb absorbed, values and gradients; the last part reaches beyond the capacity."""
    rng, (batch, new, heads, capacity) = np.random.default_rng(0), (2, 4, 3, 22)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    kept = Cache(draw(2, batch, capacity, 5), draw(2, batch, capacity, 2))
    start, layer = jnp.array([9, 21]), jnp.int32(1)
    real = (start[:, None] + jnp.arange(new) < capacity)[:, :, None, None]
    added = draw(batch, new, 5), draw(batch, new, 2)
    cache = Cache(*(put_tokens(x, y, layer, start) for x, y in zip(kept, added, strict=True)))
    given = mla.Step(draw(batch, new, heads, 8), *added, cache, draw(2, 5, heads, 6), layer, start)

    def with_gradients(attend):
        def total(q, w_up):
            y = attend(0.3, given._replace(q=q, w_up=w_up)) * real
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.grad(total, (0, 1), has_aux=True))(given.q, given.w_up)

    wanted = with_gradients(mla._attend_absorbed)
    assert_close(with_gradients(mla._attend_in_parts), wanted, 1e-5)
    arrays = re.findall(
        r"\[([\d,]+)\]", str(jax.make_jaxpr(lambda: mla._attend_in_parts(0.3, given))())
    )
    assert {x for x in arrays if f"{capacity}" in x.split(",")} <= {"2,2,22,5", "2,2,22,2"}


@pytest.mark.slow
def test_an_engine_says_the_same():
    """Also where the last part reaches beyond the positions that there are."""
    decoder = make("matrix", cfg.Sum(), cfg.Learned(32))
    how = Sampling(seed=3, max_tokens=3, repetition_penalty=1.3)
    texts = [np.array(models.tokens(batch=1, seq=n))[0] for n in (29, 5, 12)]
    said = []
    for part in (64, 12):
        engine = Engine(decoder, stop=models.VOCAB + 7, slots=2, steps=2, part=part)
        tokens = {n: [] for n in range(3)}
        for one in engine.run(Request(text, how) for text in texts):
            tokens[one.number] += one.tokens
        said.append(tokens)
    assert said[0] == said[1] and all(len(text) == 3 for text in said[0].values())
