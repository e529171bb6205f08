"""Small models that generate, and the texts that they say."""

import jax
import numpy as np
from flax import nnx

from rmt_tpu import config as cfg
from rmt_tpu.generation import Engine, Request, Sampling
from tests import models

GROUPED = cfg.Attention(8, 6, cfg.Rope(), False, num_kv_heads=4, query_key_norm=True, bias=True)
LATENT = cfg.Mla(num_heads=4, head_dim=6, kv_rank=4, rope_dim=2, query_rank=2)
# In place of a core with a cache: its layer has grouped queries before it.
EXPERTS = cfg.Experts(num_experts=4, top_k=2, hidden_dim=6)
NEW = 9


def plain(positions: cfg.Positions) -> cfg.Attention:
    return cfg.Attention(num_heads=4, head_dim=6, positions=positions)


def config(store: str, mixer: cfg.Mixer, core: cfg.Core, layers: int = 2) -> cfg.ModelConfig:
    """Layers of a core that mixes tokens (or of experts behind one) and a feed-forward one."""
    stores = {"vector": cfg.VectorStore(dim=12), "matrix": cfg.MatrixStore(6, "float32", 4, 6)}
    of_layer = core, cfg.FeedForward(hidden_dim=16)
    of_layer = (GROUPED, core) if isinstance(core, cfg.Experts) else of_layer
    return cfg.ModelConfig(
        (cfg.Stack(of_layer, repeat=layers),),
        store=stores[store],
        mixer=mixer,
        vocab_size=models.VOCAB + 1,
    )


def decoder(model: cfg.ModelConfig, shardings=None) -> nnx.Module:
    """With the same parameters wherever they are put."""
    params = jax.tree.map(np.float32, models.random_parameters(model))
    return nnx.merge(models.graph(model), jax.device_put(params, shardings))


def prompts(lengths: tuple[int, ...]) -> list[np.ndarray]:
    return [np.array(models.tokens(batch=1, seq=n, seed=n))[0] for n in lengths]


def said(engine: Engine, given: list[np.ndarray], seeds=None, **how) -> tuple[dict, dict]:
    """Tokens of each prompt's text, NEW of them, and their log-probabilities.

    `seeds` are those of the prompts; None is one for all, of `how`.
    """
    tokens, logs = ({n: [] for n in range(len(given))} for _ in range(2))
    engine.reset()
    begun, seeds = engine.submitted, seeds or [how.pop("seed", 0)] * len(given)
    samplings = [Sampling(max_tokens=NEW, seed=seed, **how) for seed in seeds]
    for one in engine.run(map(Request, given, samplings)):
        tokens[one.number - begun] += one.tokens
        logs[one.number - begun] += one.scores.log_probabilities
    return tokens, logs
