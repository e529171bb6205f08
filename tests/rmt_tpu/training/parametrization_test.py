"""muP's rates and starts, as numbers: nothing is drawn or compiled."""

from dataclasses import replace

import pytest

from rmt_tpu import config as cfg
from rmt_tpu.residual.matrix import key_init_scale
from rmt_tpu.training import run
from tests import models


def test_queries_over_depth_learn_by_the_size_of_the_residual():
    mixer = cfg.BlockAttention(sublayers_per_block=2)
    for kind, base, ratio in (("vector", "store.dim=5", 4), ("matrix", "store.key_dim=1", 5)):
        model = models.model(kind, mixer=mixer, parametrization=cfg.MuP((base,)))
        rates = run._rates(model, models.abstract(model))
        assert rates["final_site"]["mix"]["query"] == pytest.approx(1 / ratio)
        assert rates["final_site"]["mix"]["key_gain"] == 1.0
        assert rates["embedding"]["tokens"] == rates["unembedding"]["kernel"] == 1.0


def test_keys_start_smaller_where_one_size_grows_alone():
    config = models.model("matrix")  # R 3, D_k 5
    start = lambda *base, writes: key_init_scale(
        replace(config, parametrization=cfg.MuP(base)), 3, writes=writes
    )
    assert key_init_scale(config, 3, writes=False) == 1.0
    # What reads takes in D_k and gives R, of 1 and 3 in the base; what writes the other way round.
    largest = lambda taken, given: 1 + (taken / given) ** 0.5
    reads, writes = largest(1, 3) / largest(5, 3), largest(3, 1) / largest(3, 5)
    assert start("store.key_dim=1", writes=False) == pytest.approx(reads)
    assert start("store.key_dim=1", writes=True) == pytest.approx(writes)
    both = replace(config, store=cfg.MatrixStore(15))
    base = cfg.MuP(("store.key_dim=5", "attention.num_heads=1"))
    assert key_init_scale(replace(both, parametrization=base), 3, writes=False) == pytest.approx(
        1.0
    )
