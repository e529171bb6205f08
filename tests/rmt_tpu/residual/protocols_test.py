"""Stores and mixers have what is asked of them, method by method."""

import inspect
from typing import Protocol, get_args

import pytest

from rmt_tpu import config as cfg
from rmt_tpu.residual import protocols
from tests import models

STORES = {
    "vector": {protocols.Store, protocols.StepwiseStore},
    "matrix": {protocols.Store, protocols.ReversibleStore},
}
MIXERS = [
    cfg.Sum(),
    cfg.FullAttention(),
    cfg.BlockAttention(num_heads=2),  # an ablation
    cfg.DeltaAttention(),
    cfg.Dense(),
    cfg.Mudd(),
    cfg.HyperConnections(),
    cfg.Mhc(),
    cfg.MhcLite(),
    cfg.WideStreams(),
    cfg.ResidualScalars(),
    cfg.Highway(),
    cfg.DepthLstm(),
    cfg.Hierarchical(hidden_dim=5),
]


def lacks(found: object, protocol: type) -> list[str]:
    """Members of a protocol that an object has not, or with arguments of other names or kinds."""
    asked = [vars(cls) for cls in protocol.__mro__ if cls not in (Protocol, object)]
    methods = {k: m for of in asked for k, m in of.items() if inspect.isfunction(m) and k[0] != "_"}
    names = {name for of in asked for name in of.get("__annotations__", ())}
    alike = lambda f: [(p.name, p.kind) for p in inspect.signature(f).parameters.values()]
    return [name for name in sorted(names) if not hasattr(found, name)] + [
        name
        for name, method in methods.items()
        if alike(getattr(type(found), name, lambda: None)) != alike(method)
    ]


@pytest.mark.parametrize("kind", STORES)
def test_stores_have_what_is_asked_of_them(kind):
    store = models.abstract(models.model(kind)).store
    every = (protocols.Store, protocols.ReversibleStore, protocols.StepwiseStore)
    assert {protocol for protocol in every if not lacks(store, protocol)} == STORES[kind]
    assert {protocol for protocol in every if isinstance(store, protocol)} == STORES[kind]


@pytest.mark.parametrize("mixer", MIXERS, ids=lambda mixer: mixer.kind)
def test_mixers_have_what_is_asked_of_them(mixer):
    config = models.model("vector", mixer=mixer)
    found, every = models.abstract(config).mixer, (protocols.StateMixer, protocols.BankMixer)
    wanted = protocols.BankMixer if mixer.banked else protocols.StateMixer
    assert [protocol for protocol in every if not lacks(found, protocol)] == [wanted]
    assert [protocol for protocol in every if isinstance(found, protocol)] == [wanted]


def test_there_is_no_other_mixer():
    assert {type(mixer) for mixer in MIXERS} == {*get_args(cfg.Mixer)}


def test_what_is_lacking_is_named():
    class Half:
        def start(self, store, state, y): ...

        def advance(self, store, state, site, index): ...

    assert lacks(Half(), protocols.StateMixer) == ["advance"]
    assert lacks(object(), protocols.StateMixer) == ["start", "advance"]
    assert lacks(Half(), protocols.Store)[:2] == ["compute_dtype", "dtype"]
