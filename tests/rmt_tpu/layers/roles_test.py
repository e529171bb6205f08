"""The role of every parameter, which decides about weight decay and learning rates."""

from typing import get_args

import jax
from flax import nnx

from rmt_tpu import config as cfg
from rmt_tpu.layers.parameters import metadata
from rmt_tpu.training.optimizer import make_optimizer
from tests import models

# Roles by the parameters' last names. Those that choose streams share two names with others.
ROLES = {
    "embedding": "tokens positions",
    "unembedding": "kernel",
    "keys": "read_keys store_keys position_keys",
    "hidden": "read read_fewer write w_out w_1 w_2 "
    "w_q w_q_down w_kv_down w_kv_up w_gate "
    "w_decay w_decay_down w_decay_up w_beta w_gate_down w_gate_up "
    "w_router w_down w_up w_shared_gate "
    "project project_in gate_and_value gates w w_a w_b",
    "gain": "gain bias query_gain key_gain output_gain output_bias b_1 b_2 q_gain kv_gain "
    "taps value_taps decay_bias log_rate latent_gain hidden_gain gate_gains "
    "query newest_bias logits gate null_logit weights static project_out "
    "mix/read mix/write mix scales read_bias write_bias mix_bias write_logits forget_logits "
    "residual_scale embedding_scale value_scale first_value_scale",
    "load": "load",
    "balance_steps": "load",
    "histogram": "seen",
}
MIXERS = models.MIXERS | {
    "static": cfg.HyperConnections(streams=2, dynamic=False),
    "null source": cfg.DeltaAttention(num_blocks=2, null_source=0.0),
    "newest bias": cfg.FullAttention(newest_bias=0.0),
    "table": cfg.FullAttention(query="scalars"),
}
GROUPED = {"num_kv_heads": 2, "query_key_norm": True, "bias": True, "output_bias": True}
CORES = (
    cfg.Attention(4, 2, normed="both", **GROUPED),
    cfg.FeedForward(5, bias=True, normed="both"),
    cfg.Mla(2, 4, kv_rank=6, rope_dim=2, query_rank=5, output_gate=True),
    cfg.Experts(4, 2, 3, shared_gate=True, latent_dim=5, latent_norm=True),
    cfg.Kda(2, 4),
    cfg.Experts(4, 2, 3, shared=0, balance=cfg.Quantiles()),
    cfg.Kda(4, 4, num_key_heads=2, decays="heads", gates="full"),
)


def systems() -> list[cfg.ModelConfig]:
    some = [models.model("vector", num_layers=2, mixer=mixer) for mixer in MIXERS.values()]
    of_cores = (cfg.Stack(CORES),), cfg.VectorStore(12), cfg.Sum()
    return [*some, models.model("matrix", num_layers=2), cfg.ModelConfig(*of_cores, norm_bias=True)]


def named_roles(config: cfg.ModelConfig) -> set[tuple[str, str]]:
    """The names and roles of a model's parameters."""
    found = set()
    roles = metadata(models.abstract(config), "role")
    for path, role in jax.tree_util.tree_leaves_with_path(roles):
        *outer, name = (part.key for part in path)
        shared = name in ("read", "write") and "mix" in outer
        found.add((f"mix/{name}" if shared else name, role))
    return found


def test_parameters_of_all_mixers_and_cores_have_the_roles_of_the_table():
    """A role that nothing has is found as well, and a name that the table lacks."""
    assert {type(mixer) for mixer in MIXERS.values()} == {*get_args(cfg.Mixer)}
    assert {type(core) for core in CORES} == {*get_args(cfg.Core)}
    found = set().union(*map(named_roles, systems()))
    assert found ^ {(name, role) for role in ROLES for name in ROLES[role].split()} == set()


def test_muon_trains_no_matrix_of_one_column():
    """Its singular value would be the gradient's norm, so that all its steps were equally long."""
    for system in systems():
        params = nnx.to_pure_dict(nnx.state(models.abstract(system), nnx.Param))
        roles, axes = (metadata(models.abstract(system), name) for name in ("role", "axes"))
        rates = jax.tree.map(lambda role: 1.0, roles)
        muon = make_optimizer(cfg.Muon(), steps=2, roles=roles, axes=axes, rates=rates)
        (states,) = (
            s.inner_states for s in jax.eval_shape(muon.init, params) if hasattr(s, "inner_states")
        )
        assert len(states) > 1
        for rule in set(states) - {"adam"}:
            of_matrices = [-int(place) for place in rule.split("-")[1:]]
            for momentum in jax.tree.leaves(states[rule].inner_state[0].trace):
                assert min(momentum.shape[axis] for axis in of_matrices) > 1
