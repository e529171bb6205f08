"""How weights lie in memory changes no text; what the TPU compiler makes of it, `tpu_test` has."""

import jax
import numpy as np
from flax import nnx
from jax.experimental.layout import Format, Layout

from rmt_tpu import config as cfg
from rmt_tpu.data import ByteTokenizer
from rmt_tpu.generation import Engine, Request, Sampling, choice, layouts, programs
from tests import models


def told(engine):
    """The tokens that follow a prompt, and how likely they were."""
    prompt, tokens, logs = np.arange(1, 10) % models.VOCAB, [], []
    for said in engine.run([Request(prompt, Sampling(max_tokens=6))]):
        tokens, logs = tokens + said.tokens, logs + said.scores.log_probabilities
    return tokens, logs


def test_all_programs_take_weights_as_they_lie(monkeypatch):
    """Matrices with their other axis last: the decoder has them so, and says the same."""
    decoder = models.byte_decoder(positions=cfg.Rope())
    before = told(Engine(decoder, ByteTokenizer.bos, slots=2, steps=2))
    assert all(x.format.layout.major_to_minor == tuple(range(x.ndim)) for x in leaves(decoder))

    def turned(model, tree, shapes, rows):
        assert rows == 2
        order = lambda x: (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2) if x.ndim > 1 else (0,)
        return [Format(Layout(order(x)), x.sharding) for x in shapes]

    monkeypatch.setattr(layouts, "_chosen", turned)
    monkeypatch.setattr(layouts, "_PLATFORM", "cpu")
    engine = Engine(decoder, ByteTokenizer.bos, slots=2, steps=2)
    orders = [x.format.layout.major_to_minor for x in leaves(decoder)]
    assert {*orders} == {(1, 0), (0, 2, 1)}
    tokens, logs = told(engine)
    assert tokens == before[0]
    np.testing.assert_allclose(logs, before[1], atol=1e-5)
    given = (np.ones(2, bool), choice([Sampling()] * 2), np.int32(0), np.bool_(False), 2)
    steps = programs.steps.lower(engine.model, engine.params, engine.rows, *given).compile()
    taken = jax.tree.leaves(steps.input_formats[0][0])
    assert [x.layout.major_to_minor for x in taken] == orders


def leaves(decoder) -> list[jax.Array]:
    return jax.tree.leaves(nnx.state(decoder, nnx.Param))
