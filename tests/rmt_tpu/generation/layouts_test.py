"""How weights lie in memory changes no text; what the TPU compiler makes of it, `tpu_test` has."""

import jax
import numpy as np
import pytest
from flax import nnx

import sharding
from rmt_tpu import config as cfg
from rmt_tpu.generation import Engine, Request, Sampling, choice, layouts, programs
from rmt_tpu.generation.placement import parameter_shardings
from tests import generated, models
from tests.generated import plain


def orders(decoder) -> list[tuple[int, ...]]:
    leaves = jax.tree.leaves(nnx.state(decoder, nnx.Param))
    return [x.format.layout.major_to_minor for x in leaves]


@pytest.fixture
def turned(monkeypatch):
    """As on a TPU whose steps turn all matrices; what these here turn is told."""
    found, choose = [], layouts.axis_orders

    def other(model, tree, shapes, rows):
        found.append(choose(model, tree, shapes, rows))
        order = lambda x: (*range(x.ndim - 2), *range(x.ndim)[:-3:-1])
        return {place: order(x) for place, x in enumerate(shapes)}

    monkeypatch.setattr(layouts, "axis_orders", other)
    monkeypatch.setattr(layouts, "PLATFORM", "cpu")
    return found


def told(engine):
    """The tokens that follow a prompt, and how likely they were."""
    prompt, tokens, logs = np.arange(1, 10) % models.VOCAB, [], []
    for said in engine.run([Request(prompt, Sampling(max_tokens=6))]):
        tokens, logs = tokens + said.tokens, logs + said.scores.log_probabilities
    return tokens, logs


@pytest.mark.slow
def test_programs_take_weights_as_they_lie(request):
    decoder = models.byte_decoder(positions=cfg.Rope())
    before = told(Engine(decoder, stop=0, slots=2, steps=2))
    as_made = orders(decoder)
    assert as_made == [tuple(sorted(order)) for order in as_made], "on a CPU as they are"
    found = request.getfixturevalue("turned")
    engine = Engine(decoder, stop=0, slots=2, steps=2)
    assert len(found) == 1 and {(1, 0), (0, 2, 1)} <= {*orders(decoder)}
    tokens, logs = told(engine)
    assert tokens == before[0]
    np.testing.assert_allclose(logs, before[1], atol=1e-5)
    given = (np.ones(2, bool), choice([Sampling()] * 2), engine.ends, np.bool_(False), 2)
    steps = programs.steps.lower(engine.model, engine.params, engine.rows, *given).compile()
    taken = jax.tree.leaves(steps.input_formats[0][0])
    assert [x.layout.major_to_minor for x in taken] == orders(decoder)


@pytest.mark.slow
def test_divided_weights_lie_otherwise_too(request):
    model = generated.config("matrix", cfg.BlockAttention(num_blocks=2), plain(cfg.Learned(40)))
    mesh = sharding.make_mesh("data=2,key=2,tensor=2", jax.devices())

    def said():
        decoder = generated.decoder(model, parameter_shardings(models.abstract(model), mesh))
        engine = Engine(decoder, stop=models.VOCAB + 7, slots=2, steps=3, part=12)
        return *generated.said(engine, generated.prompts((29, 5)), temperature=0.0), decoder

    tokens, logs, _ = said()
    found = request.getfixturevalue("turned")
    of_turned, logs_of_turned, decoder = said()
    assert len(found) == 1 and {(1, 0), (0, 2, 1)} <= {*orders(decoder)}
    assert of_turned == tokens
    for one, other in zip(logs_of_turned, logs, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_what_a_program_turns_is_read_from_it():
    text = """
%loop (q: bf16[2,8,4]) -> bf16[2,8,4] {
  %q = bf16[2,8,4]{1,2,0} parameter(0)
  ROOT %copy.9 = bf16[2,8,4]{0,1,2} copy(%q)
}

ENTRY %main (a: bf16[2,8,4], b: f32[8,4], c: f32[8,4]) -> bf16[2,8,4] {
  %a.1 = bf16[2,8,4]{1,2,0:T(8,128)(2,1)} parameter(0), metadata={op_name="params"}
  %b.1 = f32[8,4]{1,0:T(8,128)} parameter(1)
  %c.1 = f32[8,4]{1,0:T(8,128)} parameter(2)
  %copy.1 = bf16[2,8,4]{2,1,0:T(8,128)(2,1)} copy(%a.1), metadata={op_name="params"}
  %copy.2 = f32[8,4]{1,0:T(8,128)S(1)} copy(%b.1)
  %copy.3 = f32[8,4]{0,1:T(8,128)} copy(%c.1)
}
"""
    given = [None, (0, 2, 1), (0, 1), (0, 1)]
    assert layouts.transposed_arguments(text, given) == {1: (0, 1, 2), 3: (1, 0)}, (
        "the first is not read"
    )
