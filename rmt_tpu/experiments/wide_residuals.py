"""An experiment that compares two ways to make the residual K times as wide as the model.

Wide streams keep K residual vectors of the model's width d. An RMT keeps a matrix `D_k x D_v`. Here
`D_k D_v = K d`, so that both residuals have the same size. Neither way enlarges the weight matrices
of sublayers. At the same shape, an RMT has fewer weights and FLOPs, because it has key vectors in
place of the projections of attention. Therefore, for each K, the model with wide streams is
compared with three RMTs:

- an RMT of the same shape;
- an RMT with a larger hidden size of the feed-forward layers, so that the numbers of weights
  outside of the embeddings are equal;
- an RMT with a hidden size at which the FLOPs per token are equal.

For each system, the learning rate is searched at the smallest and at the largest K. Models with
another K use the geometric mean of the two rates. One difference was chosen for a test before any
training: an RMT minus wide streams with the same K and the same FLOPs.
"""

from collections.abc import Callable
from dataclasses import replace

from rmt_tpu import cost
from rmt_tpu.config import RunConfig, WideStreams, overrides
from rmt_tpu.experiments import depth
from rmt_tpu.experiments.plan import Arm, Plan, Scale, Search, points

WIDTHS = (1, 2, 4, 8)
LAYERS = 8
_HIDDEN = "model.feed_forward.hidden_dim"
# One arm (model) may forget at most this share of a stream before a write. The value is from the
# publication on wide streams.
_FORGET = 0.1


def weights(config: RunConfig) -> int:
    """Return the number of a model's weights outside of the embedding and the unembedding."""
    parts = cost.parameters(config.model)
    return sum(parts.values()) - parts["embedding"] - parts["unembedding"]


def flops(config: RunConfig) -> int:
    """Return a model's forward FLOPs per token."""
    return cost.flops_per_token(config.model, config.data.seq_len)


def _wide(scale: Scale, streams: int, forget: float = 0.0) -> RunConfig:
    config = depth.config_of(scale, "transformer", LAYERS)
    model = config.model.replace(mixer=WideStreams(streams=streams, forget=forget))
    return replace(config, model=model)


def _rmt(scale: Scale, width: int) -> RunConfig:
    """Return an RMT whose residual has `width * d` numbers, where d is the model's width."""
    key_dim = {"model.store.key_dim": width * depth.SIZES[scale].heads}
    return depth.config_of(scale, "rmt", LAYERS, **key_dim)


def _matched(config: RunConfig, other: RunConfig, size: Callable[[RunConfig], int]) -> RunConfig:
    """Return `config` with another hidden size, so that `size(config)` is nearest to `size(other)`.

    `size` returns the number of weights or FLOPs. It must be linear in the hidden size.
    """
    hidden = overrides.value_at(config, _HIDDEN)
    at = lambda hidden: overrides.apply(config, {_HIDDEN: hidden})
    slope = size(at(hidden + 1)) - size(config)
    return at(hidden + round((size(other) - size(config)) / slope))


# Maps each kind of RMT to its label, and to the number (weights or FLOPs) in which it equals the
# model with wide streams.
_RMTS = {
    "rmt": ("rmt, same shape", None),
    "rmt-equal-weights": ("rmt, equal weights", weights),
    "rmt-equal-flops": ("rmt, equal FLOPs", flops),
}


def _config(scale: Scale, system: str, width: int) -> RunConfig:
    if system == "wide":
        return _wide(scale, width)
    _, size = _RMTS[system]
    config = _rmt(scale, width)
    return config if size is None else _matched(config, _wide(scale, width), size)


def _name(system: str, width: int) -> str:
    return f"{system}-{width}x-{LAYERS}-layers"


def _search(scale: Scale, system: str, width: int) -> Search:
    rates = points(rate=depth.SIZES[scale].rates)
    return Search(_config(scale, system, width), rates, depth.SEARCH_SEEDS)


def _searches(system: str, width: int) -> tuple[str, ...]:
    """Return the names of the searches whose best values an arm (a model) gets."""
    ends = WIDTHS[0], WIDTHS[-1]
    return tuple(_name(system, end) for end in ((width,) if width in ends else ends))


def plan(scale: Scale) -> Plan:
    """Return the plan of the experiment's runs at a scale.

    The baseline is a Transformer from the experiment `depth`, with the same searches and runs.
    """
    size, of_depth = depth.SIZES[scale], depth.plan(scale)
    plain = f"transformer-{LAYERS}-layers"
    (arm,) = (arm for arm in of_depth.arms if arm.name == plain)
    arms, searches = [replace(arm, x=1)], {name: of_depth.searches[name] for name in arm.searches}
    labels = {"wide": "wide streams"} | {name: label for name, (label, _) in _RMTS.items()}
    for system, label in labels.items():
        for width in WIDTHS:
            config = _config(scale, system, width)
            against = plain if system == "wide" else _name("wide", width)
            name, of_arm = _name(system, width), _searches(system, width)
            arms.append(Arm(name, config, label, against, x=width, searches=of_arm))
            if name in of_arm:
                searches[name] = _search(scale, system, width)
    forgetting = Arm(
        f"wide-4x-forgetting-{LAYERS}-layers",
        _wide(scale, 4, _FORGET),
        "wide streams that forget",
        _name("wide", 4),
        x=4,
        searches=_searches("wide", 4),
    )
    ends = f"{WIDTHS[0]} and {WIDTHS[-1]}"
    note = (
        f"Width {size.width}, {LAYERS} layers, RMSNorm, windows of {size.seq_len}, batches of "
        f"{size.batch_size} and {size.steps} steps. A residual has 1 to {WIDTHS[-1]} times as many "
        "numbers as the model is wide: in streams, or as the D_k D_v of an RMT. Equal weights "
        "(outside of embeddings) and equal FLOPs are reached by the hidden size of the RMT's "
        f"feed-forward layers, to the nearest whole number. Learning rates are searched at {ends} "
        "times the width with two seeds that no arm uses; in between they are the geometric mean. "
        f"Streams that forget may lose up to {_FORGET:g} of themselves at each site."
    )
    registered = tuple(_name("rmt-equal-flops", width) for width in WIDTHS)
    return Plan(
        (*arms, forgetting),
        searches,
        depth.SEEDS,
        registered,
        x="numbers in a token's residual, divided by the width",
        notes=(note,),
    )
