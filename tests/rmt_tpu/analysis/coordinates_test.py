"""muP by its coordinates: over width, what moves in a few steps moves as far, and else it does not.

Powers of width are those of two widths, x1 and x4, in steps so small that what moves is in
proportion to the rate. At widths so far from the limit 0 and 1 come out within the bounds below.
"""

import json
from dataclasses import replace

import numpy as np
import pytest

from rmt_tpu import config as cfg
from rmt_tpu.analysis import coordinates
from rmt_tpu.storage import open_folder

VOCAB = 61


def model(store: str, times: int, mixer: cfg.Mixer) -> cfg.ModelConfig:
    """One layer of width 64 times `times`; over D_k this is `times` as large alone."""
    heads, key_dim = 8 * times, 32 * times
    if store == "D_k":
        heads = 8
    stores = {"vector": cfg.VectorStore(8 * heads)}
    layer = (cfg.Attention(heads, 8, cfg.Alibi()), cfg.FeedForward(16 * heads))
    return cfg.ModelConfig(
        (cfg.Stack(layer, 1),),
        stores.get(store, cfg.MatrixStore(key_dim)),
        mixer=mixer,
        vocab_size=VOCAB,
    )


BASES = {
    "vector": ("store.dim=64", "attention.num_heads=8", "feed_forward.hidden_dim=128"),
    "R and D_k": ("store.key_dim=32", "attention.num_heads=8", "feed_forward.hidden_dim=128"),
    "D_k": ("store.key_dim=32",),
}

# Their quantities that are flat in muP, and those that grow in the standard parametrisation. D_k
# alone is what reads add up; logits then fall, for what the unembedding reads starts smaller.
ALL = coordinates.QUANTITIES
SYSTEMS = {
    "Transformer": ("vector", cfg.Sum(), ALL, ALL),
    "RMT": ("R and D_k", cfg.Sum(), ALL, ALL),
    "RMT over D_k": ("D_k", cfg.Sum(), ("read", "written", "residual"), ("read",)),
    "AttnRes": ("vector", cfg.BlockAttention(sublayers_per_block=2), ALL, ALL),
}


def measured(config: cfg.ModelConfig) -> coordinates.Coordinates:
    optimizer = cfg.AdamW(learning_rate=3e-4, warmup_fraction=0.0)
    train = cfg.TrainConfig(steps=100, batch_size=8, mesh="data=1", optimizer=optimizer)
    run = cfg.RunConfig(config, train, cfg.DataConfig(seq_len=16))
    return coordinates.measure(run, coordinates.random_batch(VOCAB), steps=4)


@pytest.mark.slow
@pytest.mark.parametrize("system", ["RMT", "Transformer", "RMT over D_k", "AttnRes"])
def test_coordinates_are_flat_in_mup_and_grow_else(system):
    store, mixer, flat, growing = SYSTEMS[system]
    small, large = (model(store, times, mixer) for times in (1, 4))
    mup = replace(large, parametrization=cfg.MuP(BASES[store]))
    first = measured(small)
    by_standard, by_mup = ({1: first, 4: measured(config)} for config in (large, mup))
    for quantity in flat:
        power = coordinates.growth(by_mup, quantity)
        assert abs(power) < 0.3, f"{quantity} moves by width^{power:.2f}"
    for quantity in growing:
        power = coordinates.growth(by_standard, quantity)
        assert power > 0.5, f"{quantity} moves by width^{power:.2f}"


def test_files(tmp_path):
    """Powers are slopes of logarithms, and numbers are kept."""
    quantities = coordinates.QUANTITIES
    one = lambda x: coordinates.Coordinates(
        {q: [1.0, 1.0, 1.0] for q in quantities}, {q: [0.0, 0.5, x] for q in quantities}
    )
    found = {"muP": {1: one(2.0), 4: one(2.0)}, "standard": {1: one(2.0), 4: one(8.0)}}
    assert coordinates.growth(found["standard"], "read") == pytest.approx(1.0)
    text = coordinates.write_check(found, open_folder(tmp_path))
    assert text.splitlines()[2].startswith("| muP | x1, x4 | +0.00 |")
    assert text.splitlines()[3].startswith("| standard | x1, x4 | +1.00 |")
    assert (tmp_path / "coordinates.md").read_text() == text
    rows = json.loads((tmp_path / "coordinates.json").read_text())
    assert [(row["what"], row["width"]) for row in rows][:2] == [("muP", 1), ("muP", 4)]
    assert (tmp_path / "coordinates.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.slow
def test_a_model_that_is_its_base_is_the_standard_one():
    config = model("R and D_k", 1, cfg.Sum())
    base = replace(config, parametrization=cfg.MuP(BASES["R and D_k"]))
    for quantity in ("size", "moved"):
        standard, mup = (getattr(measured(c), quantity) for c in (config, base))
        for name in coordinates.QUANTITIES:
            np.testing.assert_allclose(mup[name], standard[name], rtol=1e-5)
