"""A factor for the learning rate of the parameters of attention over depth.

Mixers with attention over depth score each source, which is an earlier output v, with a logit
`<gain * query, v / rms(v)>`. This logit is a sum of m terms of order 1. Adam moves every entry of a
query by about the learning rate, in the direction given by the sign of the gradient. One step
therefore moves the logit by up to `0.8 * rate * factor * m`. At the usual rate for a small model
with small batches, this would saturate most softmaxes over depth within the warmup. In larger
batches the sign of the gradient is less noisy, in proportion to the square root of the batch size,
and steps may be larger in the same proportion. The rule is

    factor = min(1, 0.07 * sqrt(tokens per batch / 1024) / (peak rate * m))

The number m of terms depends on the parameter. For queries and key gains, m is the size of the
residual divided by the number of the mixer's heads. For the projections of "input" queries, m is
the m of queries times the size of the residual. For learned logits, m is 1. For the second
projections of the networks of `mudd`, whose outputs are weights and not logits, m is the number of
hidden units. muP already divides the learning rates of queries and projections by the ratio of the
residual's size to its size in the base model. The rule divides the m of these parameters by the
same ratio, so a query has the same factor at every width as in the base model. The factors that
scale the residual before each layer (`residual_scalars`) follow the rule too. In each layer, one
step changes the logarithm of the residual's scale by up to the rate, so m is the number of layers.

At rate 0.028, width 24 and 1024 tokens per batch the factor is 0.1; with a residual matrix of 96
numbers it is 0.026. Both are close to the best factors in a few small runs. The factor is 1 at the
AttnRes paper's rate of 2e-3 with width 1168 and 1.6M tokens per batch; with 0.25M tokens it is
0.48. It is also 1 at rate 6e-4 with width 512 and 0.26M tokens. The rule therefore does not lower
the rates that were best in those settings. A bound on a single step does not guarantee a good rate,
so a search over `train.depth_rate` may find a better one. This config field sets the factor for
queries and key gains by hand. The factor for a projection is then smaller, by the ratio of the two
values of m.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from rmt_tpu.config import RunConfig

BOUND = 0.07
TOKENS = 1024


def is_over_depth(config: RunConfig, path: tuple) -> bool:
    """Return whether `factors` has a factor for the parameter at `path` in the decoder.

    Such a parameter determines the weights with which a sublayer reads earlier outputs, or scales
    the residual before a layer.
    """
    names = [str(getattr(part, "key", part)) for part in path]
    return names[-1] in factors(config) and ("mix" in names or names[0] == "mixer")


def factors(config: RunConfig) -> dict[str, float]:
    """Return the factor for the learning rate of each parameter of attention over depth.

    Returns:
      The factors by parameter name: "query", "key_gain", "project", "logits", "project_out" or
      "residual_scale". The result is {} if the model has no such parameters.
    """
    size = config.model.residual_size
    terms = config.model.mixer.logit_terms(config.model)
    if (factor := config.train.depth_rate) is not None:
        fewest = min(terms.values(), default=1)
        return {name: factor * fewest / m for name, m in terms.items()}
    # muP multiplies the learning rates of queries and projections by the size of the base model's
    # residual, divided by the size of this model's residual.
    scaled = dict.fromkeys(("query", "project"), config.model.base_model.residual_size / size)
    tokens = config.train.batch_size * config.data.seq_len
    bound = BOUND * math.sqrt(tokens / TOKENS) / config.train.optimizer.learning_rate
    return {name: min(1.0, bound / (m * scaled.get(name, 1))) for name, m in terms.items()}


def scale_rates(config: RunConfig, rates: Any) -> tuple[Any, Any]:
    """Return all learning rate factors, with the factors for attention over depth applied.

    Args:
      config: the run's config.
      rates: tree of the factors that muP gives for each parameter's learning rate.

    Returns:
      The products, and a tree that is True for the parameters of attention over depth.
    """
    found = factors(config)
    over = jax.tree_util.tree_map_with_path(lambda path, _: is_over_depth(config, path), rates)

    def scaled(path, rate, over):
        return rate * found[str(getattr(path[-1], "key", path[-1]))] if over else rate

    return jax.tree_util.tree_map_with_path(scaled, rates, over), over


def describe(config: RunConfig) -> str:
    """Return a list, as text, of learning rate factors by parameter name; "" if there are none."""
    return ", ".join(f"{name} x{factor:.3g}" for name, factor in factors(config).items())


def metrics(config: RunConfig, params: Any) -> dict[str, jax.Array]:
    """Return the typical size of the logits of attention over depth; {} if there are no queries.

    A logit is `<g q, v / rms(v)>` with query q, key gain g and source v. If the entries of v are
    independent, its typical size is the length of `g q`, which this function computes for each
    site. It is 0 at the start of training. If it is 2 or more, a few sources receive most of the
    weight. "train/depth/logit" is the mean over sites, and "train/depth/largest_logit" the maximum.
    With `query="input"`, only the learned vector q is measured, not the projection that is added to
    it.
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
