"""Learning rates of the parameters that weigh sources over depth, relative to all other weights.

A logit over depth, `<gain * query, v / rms(v)>`, adds up m terms of order 1. Adam moves every entry
of a query by about the learning rate in the direction of its gradient's sign, so one step moves the
logit by up to `0.8 * rate * factor * m`. At the usual rate of a small model with small batches,
that saturates most softmaxes over depth within the warmup. In larger batches the sign of a gradient
is less noisy, by the square root of the batch size, and steps may be larger by the same factor. The
rule is

    factor = min(1, 0.07 * sqrt(tokens of a batch / 1024) / (peak rate * m))

Here m is the size of the residual over the mixer's heads for queries and key gains, m of a query
times the size of the residual for projections of "input" queries, and 1 for learned logits. muP
already divides the rate of queries and projections by the ratio of the residual's width to that of
the base model, and the rule divides their m by the same ratio: a query has the base model's factor
at every width.

At rate 0.028, width 24 and 1024 tokens the factor is 0.1, and on a matrix of 96 numbers there it is
0.026. Both are close to what did best in a few small runs. The factor is 1 at the AttnRes paper's
rate of 2e-3 with width 1168 and batches of 1.6M tokens (0.48 with 0.25M tokens), and at rate 6e-4
with width 512 and 0.26M tokens, so the rule does not lower rates that won in those settings. A
bound on one step does not guarantee a good rate: `train.depth_rate` sets the factor by hand, and is
worth a search. It is the factor of queries and key gains; the factor of a projection is smaller by
the ratio of their m.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from rmt_tpu.config import RunConfig

BOUND = 0.07
TOKENS = 1024


def is_over_depth(config: RunConfig, path: tuple) -> bool:
    """Return whether the decoder's parameter at `path` weighs sources over depth."""
    names = [str(getattr(part, "key", part)) for part in path]
    return bool(factors(config)) and ("mix" in names or names[0] == "mixer")


def factors(config: RunConfig) -> dict[str, float]:
    """Return the factors of the common rate by parameter name; {} if no parameter has one.

    The names are those that sites of the model have: "query", "key_gain", "project", or "logits".
    """
    size = config.model.residual_size
    terms = config.model.mixer.logit_terms(size)
    if (given := config.train.depth_rate) is not None:
        least = min(terms.values(), default=1)
        return {name: given * least / m for name, m in terms.items()}
    # muP multiplies the rates of these parameters by this ratio before the factor does.
    scaled = dict.fromkeys(("query", "project"), config.model.base_model.residual_size / size)
    tokens = config.train.batch_size * config.data.seq_len
    bound = BOUND * math.sqrt(tokens / TOKENS) / config.train.optimizer.learning_rate
    return {name: min(1.0, bound / (m * scaled.get(name, 1))) for name, m in terms.items()}


def trees(config: RunConfig, rates: Any) -> tuple[Any, Any]:
    """Multiply `rates` by the factors; also return a tree that is True where a factor applies."""
    found = factors(config)
    over = jax.tree_util.tree_map_with_path(lambda path, _: is_over_depth(config, path), rates)

    def scaled(path, rate, over):
        return rate * found[str(getattr(path[-1], "key", path[-1]))] if over else rate

    return jax.tree_util.tree_map_with_path(scaled, rates, over), over


def told(config: RunConfig) -> str:
    """Return the factors as text, or "" if there are none."""
    return ", ".join(f"{name} x{factor:.3g}" for name, factor in factors(config).items())


def metrics(config: RunConfig, params: Any) -> dict[str, jax.Array]:
    """Measure how large logits over depth are; return {} for a model without queries over depth.

    A logit `<g q, v / rms(v)>` with query q and key gain g is about as large as the length of g q
    if the numbers of a source are independent. It is 0 at the start; where it is 2 or more, few
    sources have most of the weight. "train/depth/logit" is the mean over sites, and
    "train/depth/largest_logit" the largest. The part that the projection adds to an "input" query
    is not counted.
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
