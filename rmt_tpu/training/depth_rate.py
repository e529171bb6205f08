"""How fast what weighs sources over depth learns, beside all other weights.

A logit over depth, `<gain * query, v / rms(v)>`, adds up m terms of order 1. Adam moves every entry
of a query by about the rate in the sign of its gradient, so that a step moves the logit by up to
`0.8 * rate * factor * m`. At the common rate of a small model with small batches that closes most
softmaxes over depth within the warm-up. In larger batches the sign of a gradient is less noisy, by
the root of their size, and steps may be larger by as much. The rule is

    factor = min(1, 0.07 * sqrt(tokens of a batch / 1024) / (peak rate * m))

for queries and key gains (m is the size of the residual over the heads of the mixer), projections
of "input" queries (m of a query times the residual's size), and learned logits (1). muP divides the
rate of queries and projections by how much wider the residual is than its base's, and m counts so
much less for them: at every width a query's factor is the base's.

It is 0.1 at rate 0.028, width 24 and 1024 tokens, and 0.026 on a matrix of 96 numbers there, about
what did best in a few small runs; 1 at the AttnRes paper's 2e-3, width 1168 and batches of 1.6M
tokens (0.48 with 0.25M), and at 6e-4, width 512 and 0.26M tokens: what won there is not lowered.
A bound on one step is no law: `train.depth_rate` sets the factor by hand, and is worth a search. It
is that of queries and key gains; a projection's is smaller by as much as it has more terms.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from rmt_tpu.config import RunConfig

BOUND = 0.07
TOKENS = 1024


def is_over_depth(config: RunConfig, path: tuple) -> bool:
    """Whether the parameter at a path of the decoder's weighs sources over depth."""
    names = [str(getattr(part, "key", part)) for part in path]
    return bool(factors(config)) and ("mix" in names or names[0] == "mixer")


def factors(config: RunConfig) -> dict[str, float]:
    """Returns what the common rate is multiplied by, by name of a parameter; {} without any.

    The names are those that sites of the model have: "query", "key_gain", "project", or "logits".
    """
    size = config.model.residual_size
    terms = config.model.mixer.logit_terms(size)
    if (given := config.train.depth_rate) is not None:
        least = min(terms.values(), default=1)
        return {name: given * least / m for name, m in terms.items()}
    # What muP multiplies their rates by, before the factor.
    scaled = dict.fromkeys(("query", "project"), config.model.base_model.residual_size / size)
    tokens = config.train.batch_size * config.data.seq_len
    bound = BOUND * math.sqrt(tokens / TOKENS) / config.train.optimizer.learning_rate
    return {name: min(1.0, bound / (m * scaled.get(name, 1))) for name, m in terms.items()}


def trees(config: RunConfig, rates: Any) -> tuple[Any, Any]:
    """Multiplies `rates` by the factors; also returns of each parameter whether it has one."""
    found = factors(config)
    over = jax.tree_util.tree_map_with_path(lambda path, _: is_over_depth(config, path), rates)

    def scaled(path, rate, over):
        return rate * found[str(getattr(path[-1], "key", path[-1]))] if over else rate

    return jax.tree_util.tree_map_with_path(scaled, rates, over), over


def told(config: RunConfig) -> str:
    """Writes the factors in words; "" without any."""
    return ", ".join(f"{name} x{factor:.3g}" for name, factor in factors(config).items())


def metrics(config: RunConfig, params: Any) -> dict[str, jax.Array]:
    """Measures how large logits over depth are; {} of a model without queries over depth.

    A logit `<g q, v / rms(v)>` of query q and key gain g has the size of g q's length where the
    numbers of a source are independent: 0 at the start; where it is 2 or more, few sources have
    most of the weight. "logit" is the mean over sites, "largest_logit" the largest. What an "input"
    query has of its projection is not counted.
    """
    if "query" not in factors(config):
        return {}
    sites: dict[tuple, dict[str, jax.Array]] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        name = str(getattr(path[-1], "key", path[-1]))
        if name in ("query", "key_gain") and is_over_depth(config, path):
            sites.setdefault(path[:-1], {})[name] = x
    ndim = len(config.model.residual_shape)
    lengths = []
    for site in sites.values():
        scaled = jnp.square(site["query"] * site.get("key_gain", 1.0))
        length = jnp.sqrt(jnp.sum(scaled, axis=tuple(range(-ndim, 0))))
        lengths.append(length.reshape(-1) / math.sqrt(config.model.mixer.num_heads))
    lengths = jnp.concatenate(lengths)
    return {
        "train/depth/logit": jnp.mean(lengths),
        "train/depth/largest_logit": jnp.max(lengths),
    }
