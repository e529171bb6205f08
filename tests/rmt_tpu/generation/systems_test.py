"""Texts of every system are those of no cache: each store, mixer and kind of positions."""

import jax
import numpy as np
import pytest

from rmt_tpu import config as cfg
from rmt_tpu.generation import Engine, programs
from tests import generated, models
from tests.generated import EXPERTS, GROUPED, LATENT, NEW, plain

MIXERS = models.MIXERS | {
    "odd blocks": cfg.BlockAttention(sublayers_per_block=3),
    "delta, null": cfg.DeltaAttention(sublayers_per_block=1, null_source=0.0),
    "full, passes of one layer": cfg.FullAttention(phase_layers=1),
    "scores without norm": cfg.FullAttention(weights="sigmoid", key_norm=False),
}
ON_MATRICES = ("sum", "blocks", "odd blocks", "full", "full, passes of one layer")
ON_MATRICES += ("scores without norm", "dense", "mudd", "delta", "delta, null", "wide", "scalars")
STORES = {"vector": tuple(MIXERS), "matrix": ON_MATRICES}
POSITIONS = {"learned": cfg.Learned(40), "alibi": cfg.Alibi(), "rope": cfg.Rope()}
CORES = {
    "grouped": GROUPED,
    "latent": LATENT,
    "kda": cfg.Kda(num_heads=4, head_dim=6),
    "experts": EXPERTS,
    "no positions": plain(cfg.NoPositions()),
} | {name: plain(positions) for name, positions in POSITIONS.items()}
# In four layers: groups of three leave one over.
VARIANTS = {
    "full, passes that do not divide": cfg.FullAttention(phase_layers=3),
    "blocks of 3": cfg.BlockAttention(sublayers_per_block=3, output_site="sum"),
    "blocks with an input query": cfg.BlockAttention(num_blocks=2, query="input"),
    "mean": cfg.BlockAttention(layers_per_block=1, query="none"),
    "open": cfg.BlockAttention(
        num_blocks=2, newest_bias=3.0, cumulative=True, output_site="newest"
    ),
    "marin": cfg.BlockAttention(
        num_blocks=2, key_gain=False, normed_embedding=True, output_site="sum"
    ),
    "scalar query": cfg.FullAttention(query="scalars"),
    "heads": cfg.FullAttention(num_heads=2, key_norm=False),
    "delta of blocks of 3": cfg.DeltaAttention(sublayers_per_block=3, null_source=0.0),
    "hc, static": cfg.HyperConnections(streams=2, dynamic=False),
    "highway, gated": cfg.Highway(form="gated"),
    "hierarchical, every layer": cfg.Hierarchical(hidden_dim=10, every=1),
}
# Of these the cache keeps values that the mixer has changed.
OF_VALUES = ("mudd", "scalars")
SYSTEMS = [
    (store, mixer, core)
    for store, mixers in STORES.items()
    for mixer in mixers
    for core in (CORES if mixer in ("sum", "blocks") else POSITIONS)
]
SYSTEMS += [(store, mixer, "grouped") for store in STORES for mixer in OF_VALUES]
SYSTEMS += [
    (store, name, "learned")
    for store in STORES
    for name, mixer in VARIANTS.items()
    if store == "vector" or mixer.on_matrix
]
# The second is read in parts, and ends first; more of them than slots.
LENGTHS, PART = (5, 21, 12), 8


@pytest.mark.slow
@pytest.mark.parametrize("store, mixer, core", SYSTEMS)
def test_text_is_that_of_no_cache(store, mixer, core):
    layers = 4 if mixer in VARIANTS else 2
    model = generated.config(store, (MIXERS | VARIANTS)[mixer], CORES[core], layers)
    decoder, prompts = generated.decoder(model), generated.prompts(LENGTHS)
    engine = Engine(decoder, stop=models.VOCAB + 7, slots=2, steps=3, part=PART)
    tokens, logs = generated.said(engine, prompts, temperature=0.0)
    forward = jax.jit(lambda decoder, tokens: jax.nn.log_softmax(decoder(tokens)))
    rows = np.zeros((len(LENGTHS), 40), np.int32)
    for n, prompt in enumerate(prompts):
        rows[n, : len(prompt) + NEW] = [*prompt, *tokens[n]]
    for n, (length, log) in enumerate(zip(LENGTHS, forward(decoder, rows), strict=True)):
        wanted = np.asarray(log)[length - 1 :][:NEW]
        assert tokens[n] == np.argmax(wanted, -1).tolist()
        np.testing.assert_allclose(logs[n], wanted[np.arange(NEW), tokens[n]], atol=2e-5)
    # What is drawn is of a row alone: not of its slot, nor of what is beside it.
    compiled = [p._cache_size() for p in (programs.prefill, programs.extend, programs.steps)]
    drawn, _ = generated.said(engine, prompts, seeds=[3, 4, 5], temperature=1.5)
    again, _ = generated.said(engine, prompts[::-1], seeds=[5, 4, 3], temperature=1.5)
    assert [drawn[n] for n in range(3)] == [again[n] for n in (2, 1, 0)]
    assert drawn != tokens
    assert compiled == [
        p._cache_size() for p in (programs.prefill, programs.extend, programs.steps)
    ]
