"""Scalars that cores give beside what they write: added up, in the objective, in every schedule."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sharding
from rmt_tpu import config as cfg
from rmt_tpu import data
from rmt_tpu.cores import Core, make_core
from rmt_tpu.execution import layer
from rmt_tpu.layers.data_vectors import concatenate, separate
from rmt_tpu.layers.parameters import gain
from rmt_tpu.training.evaluation import HeldOutLoss
from rmt_tpu.training.run import prepare
from tests import models
from tests.closeness import assert_close
from tests.rmt_tpu import plain
from tests.rmt_tpu.residual import checks, over_depth
from tests.tiers import later

WEIGHT, Z_LOSS = 0.3, 0.1
BATCH, SEQ = 8, 12


@dataclass(frozen=True)
class Weighed(cfg.FeedForward):
    """`y = tanh(s) z` with `s = <w, z>`: it adds `WEIGHT s^2` to the loss, and may count s > 0.

    A feed-forward layer to those who check what a core is.
    """

    kind: ClassVar[str] = "weighed"
    hidden_dim: int = 1
    counts: bool = False

    @property
    def aux(self):
        return ("loss", "positive") if self.counts else ("loss",)


class WeighedCore(Core):
    name: ClassVar[str] = "weighed"

    def __init__(self, config, core):
        self.counts, self.vectors = core.counts, config.data_shape[0]
        self.w = gain((config.width,), axes=("width",))

    def __call__(self, z, context, index):
        return self.with_aux(z, context, index)[0]

    def with_aux(self, z, context, index):
        x = concatenate(z.residual)
        s = jnp.dot(x, self.w[...])
        aux = {"loss": WEIGHT * jnp.sum(s**2)}
        if self.counts:
            aux["positive"] = jnp.sum(s > 0).astype(s.dtype)
        return separate(jnp.tanh(s)[..., None] * x, self.vectors), aux


# Of a period: a core with one scalar, one with none, one with two.
STACK = cfg.Stack((Weighed(), cfg.FeedForward(6), Weighed(counts=True)), repeat=2)
SYSTEMS = {
    "scanned": (cfg.VectorStore(8), cfg.Sum(), "full"),
    "reversible": (cfg.MatrixStore(4, vectors=2, vector_dim=4), cfg.Sum(), "reversible"),
    "kept": (cfg.MatrixStore(4, vectors=2, vector_dim=4), cfg.Sum(), "reversible_dots"),
    "banked": (cfg.VectorStore(8), cfg.BlockAttention(sublayers_per_block=2), "blocks"),
    "blocks of a chunk": (
        cfg.MatrixStore(4, vectors=2, vector_dim=4),
        cfg.BlockAttention(sublayers_per_block=3),
        "full",
    ),
}


@pytest.fixture(autouse=True)
def weighed(monkeypatch):
    """The core is made, in float64; and what it does in NumPy is in a list of scalars."""

    def make(config, core, *rest):
        kind = getattr(core, "kind", None)
        return WeighedCore(config, core) if kind == "weighed" else make_core(config, core, *rest)

    given = []

    def in_numpy(core, params, store, site, x, index, config):
        x = store.read(x, site)
        s = x @ params["w"]
        given.append({"loss": WEIGHT * np.sum(s**2), "positive": core.counts * np.sum(s.real > 0)})
        return np.tanh(s)[..., None] * x

    monkeypatch.setattr(layer, "make_core", make)
    monkeypatch.setitem(plain.CORES, "weighed", in_numpy)
    with jax.enable_x64(True):
        yield given


def model(system, **changes):
    store, mixer, remat = SYSTEMS[system]
    options = {"vocab_size": models.VOCAB + 1, "compute_dtype": "float64"}
    return cfg.ModelConfig((STACK,), store, mixer, remat=remat, **options | changes)


def prepared(system, mesh="data=1", **train):
    devices = jax.devices()[: 2 ** mesh.count("=2")]
    train = cfg.TrainConfig(steps=2, batch_size=BATCH, z_loss=Z_LOSS, mesh=mesh, **train)
    config = cfg.RunConfig(model(system), train, cfg.DataConfig(seq_len=SEQ))
    return prepare(config, sharding.make_mesh(mesh, devices))


def reference(params, config, batch, given):
    """Mean losses, unrolled: the objective, cross-entropy, z and the scalars.

    The scalars are of all tokens, also of those without a loss.
    """
    given.clear()
    system = plain.model if config.mixer.kind == "sum" else over_depth.reference
    logits = system(params, batch.inputs, config)
    largest = logits.real.max(-1)
    log_z = largest + np.log(np.sum(np.exp(logits - largest[..., None]), axis=-1))
    chosen = np.take_along_axis(logits, batch.targets[..., None], -1)[..., 0]
    total = np.sum(batch.weights)
    cross_entropy = np.sum((log_z - chosen) * batch.weights) / total
    z = np.sum(log_z**2 * batch.weights) / total
    aux = {
        name: sum(of[name] for of in given) / batch.weights.size for name in ("loss", "positive")
    }
    return cross_entropy + Z_LOSS * z + aux["loss"], cross_entropy, z, aux


@pytest.mark.parametrize(
    "system, mesh, train",
    [
        ("scanned", "data=1", {}),
        ("reversible", "sequence=2,key=2", {}),
        *later(
            ("scanned", "data=2,tensor=2,stage=2", {"accumulate": 2}),
            ("banked", "data=1", {}),
            ("kept", "sequence=2,key=2", {}),
            ("blocks of a chunk", "stage=2,sequence=2,key=2", {}),
        ),
    ],
)
def test_losses_and_gradients_are_those_of_the_equations(system, mesh, train, weighed):
    config, batch, run = model(system), models.batch(BATCH, SEQ), prepared(system, mesh, **train)
    params = models.random_parameters(config)
    given = jax.device_put((params, batch), (run.state_shardings.params, run.batch_sharding))
    gradients, loss = jax.jit(run.gradients)(*given)

    assert_close(tuple(loss), reference(params, config, batch, weighed), 1e-12)
    assert loss.aux["positive"] > 0.1
    objective = lambda params: reference(params, config, batch, weighed)[0]
    for gradient, direction in zip(
        jax.tree.leaves(gradients), checks.directions(params), strict=True
    ):
        along = np.sum(gradient * next(filter(np.any, jax.tree.leaves(direction))))
        expected = plain.derivative(objective, params, direction)
        # Rounding over a few hundred operations in a row.
        assert abs(along - expected) < 1e-11 * max(1e-2, np.linalg.norm(gradient))


def test_they_are_in_the_rows_of_metrics(weighed):
    run, text = prepared("scanned"), models.tokens(1, 1 + 2 * BATCH * SEQ)[0]
    _, metrics = jax.eval_shape(run.step, jax.eval_shape(run.init), models.batch(BATCH, SEQ))
    assert {"train/aux/loss", "train/aux/positive"} <= metrics.keys()

    options = {"seq_len": SEQ, "batch_size": BATCH, "bos": 0, "seed": 0, "shuffle": False}
    windows = data.Windows(np.asarray(text), **options)
    params = models.random_parameters(model("scanned"))
    held_out = HeldOutLoss(run, windows, number=2 * BATCH)(params)
    both = [windows.in_order(number, slice(BATCH)) for number in range(2)]
    means = [reference(params, model("scanned"), batch, weighed)[1::2] for batch in both]
    assert_close(held_out, jax.tree.map(lambda a, b: (a + b) / 2, *means), 1e-12)


def test_a_model_without_has_none_and_decoding_leaves_them_out():
    tokens = models.tokens()
    assert models.model().aux == ()
    features = lambda params: nnx.merge(models.graph(models.model()), params).features(tokens)
    assert jax.eval_shape(features, models.random_parameters(models.model())).aux == {}
    config = model("banked")
    assert config.aux == ("loss", "positive")
    graph = models.graph(config)

    def decoded(params):
        decoder = nnx.merge(graph, params)
        return decoder.decode(tokens, decoder.empty_cache(2, 11))[0]

    logits = jax.eval_shape(decoded, models.random_parameters(config))
    assert logits.shape == (2, 11, models.VOCAB + 1)


def test_a_scalar_that_the_config_does_not_name_is_an_error():
    with pytest.raises(KeyError, match="dropped"):
        layer.add_aux({"loss": jnp.zeros(())}, {"dropped": jnp.ones(())})
