"""An experiment on whether attention over depth lowers the loss, especially in deeper models.

Models of the same width and different depths read the same tokens. At 4 and 16 layers, each system
(kind of residual) has its own hyperparameter search. It uses two seeds of its own. It varies the
learning rate, and a factor (`train.depth_rate`) of the rate for the parameters of attention over
depth. Models of 8 layers use the geometric mean of the results at 4 and 16 layers; models of 32
layers use the result at 16 layers. At each depth, one difference was chosen for a test before
training: Block AttnRes minus the Transformer.
"""

from dataclasses import dataclass, replace

from rmt_tpu.config import BlockAttention, FullAttention, Mixer, RunConfig, Sum, overrides
from rmt_tpu.config.presets import run
from rmt_tpu.experiments.plan import DEPTH_RATE, RATE, Arm, Plan, Scale, Search, points

_LAYERS = (4, 8, 16, 32)
_SEARCHED = (4, 16)
SEEDS, SEARCH_SEEDS = tuple(range(10)), (100, 101)
_FACTORS = (1.0, 0.3, 0.1, 0.03, 0.01)
# With a matrix residual, a logit of attention over depth is a sum of four times as many terms, so
# the learning-rate factors are divided by 4.
_OF_MATRIX = tuple(factor / 4 for factor in _FACTORS)


@dataclass(frozen=True)
class _Size:
    """The sizes, text and learning rates that models of all depths share at one scale."""

    heads: int
    head_dim: int
    batch_size: int
    seq_len: int
    steps: int
    rates: tuple[float, ...]

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


SIZES = {
    "tiny": _Size(3, 8, 16, 64, 540, (0.02, 0.04, 0.08)),
    "paper": _Size(8, 64, 256, 1024, 4000, (1e-3, 2e-3, 4e-3)),
}

# Maps the number of layers to the number of sublayers per block: models of 4 layers have four
# blocks, and deeper models have eight.
_BLOCK = {4: 2, 8: 2, 16: 4, 32: 8}


def _mixer(system: str, layers: int) -> Mixer:
    if system.endswith("-full"):
        return FullAttention()
    if "attnres" in system:
        return BlockAttention(sublayers_per_block=_BLOCK[layers])
    return Sum()


def config_of(scale: Scale, system: str, layers: int, **changes) -> RunConfig:
    """Return the run config of a system; `changes` maps config paths to values."""
    size = SIZES[scale]
    matrix = system.startswith("rmt")
    base = run("rmt-tiny" if matrix else "gpt2-tiny")
    store = {"store.key_dim": 4 * size.heads} if matrix else {"store.dim": size.width}
    sizes = store | {
        "num_layers": layers,
        "attention.num_heads": size.heads,
        "attention.head_dim": size.head_dim,
        "feed_forward.hidden_dim": 4 * size.width,
        "norm": "rmsnorm",
    }
    values = {f"model.{path}": value for path, value in sizes.items()} | {
        "train.batch_size": size.batch_size,
        "data.seq_len": size.seq_len,
        "train.steps": size.steps,
        "train.optimizer.learning_rate": 1e-2,  # This is the rate unless one is searched.
        "train.optimizer.warmup_fraction": 0.05,
        "train.optimizer.final_fraction": 0.0,
        "train.eval_every": 0,
        "train.eval_tokens": 2**20,  # This number covers all held-out text.
        "train.checkpoint_every": 0,
        "train.sample_tokens": 0,
        "train.log_every": 20,
    }
    if scale == "paper":
        values |= {"model.compute_dtype": "bfloat16", "train.checkpoint_every": 500}
    config = overrides.apply(base, values)
    mixer = _mixer(system, layers)
    model = config.model.replace(mixer=mixer)
    model = model.replace(remat="none") if "none" in mixer.remats else model
    return overrides.apply(replace(config, model=model), changes)


def _search(scale: Scale, system: str, layers: int, **changes) -> Search:
    tried = {"rate": SIZES[scale].rates}
    if "attnres" in system:
        tried["depth_rate"] = _OF_MATRIX if system.startswith("rmt") else _FACTORS
    return Search(config_of(scale, system, layers, **changes), points(**tried), SEARCH_SEEDS)


def _searches(system: str, layers: int) -> tuple[str, ...]:
    """Return the names of the searches whose best values an arm (a model) gets."""
    if layers == 8:
        return tuple(f"{system}-{at}-layers" for at in _SEARCHED)
    return (f"{system}-{min(layers, max(_SEARCHED))}-layers",)


# Maps each system (kind of residual) to the system that it is compared with.
_SYSTEMS = {
    "transformer": None,
    "attnres": "transformer",
    "attnres-full": "transformer",
    "rmt": "transformer",
    "rmt-attnres": "rmt",
}
_DEEPEST = ("transformer", "attnres", "rmt")


def plan(scale: Scale) -> Plan:
    """Return the plan of the experiment's runs at a scale.

    Neither paper varies only the depth. The sizes at the papers' scale therefore come from small
    published runs of others.
    """
    size = SIZES[scale]
    searches = {
        f"{system}-{layers}-layers": _search(scale, system, layers)
        for system in _SYSTEMS
        for layers in _SEARCHED
    }
    arms = [
        Arm(
            f"{system}-{layers}-layers",
            config_of(scale, system, layers),
            system,
            against and f"{against}-{layers}-layers",
            x=layers,
            searches=_searches(system, layers),
        )
        for layers in _LAYERS
        for system, against in _SYSTEMS.items()
        if layers < max(_LAYERS) or system in _DEEPEST
    ]
    # These arms (models) repeat other arms' runs, but add numbers in a different order. They show
    # how much a loss changes by rounding alone.
    arms += [
        Arm(
            f"{system}-16-layers-again",
            config_of(scale, system, 16, **{"train.accumulate": 2}),
            f"{system}, sums in a different order",
            f"{system}-16-layers",
            searches=_searches(system, 16),
            num_seeds=3,
        )
        for system in ("transformer", "attnres")
    ]
    blocks = ", ".join(f"{size} sublayers at {layers}" for layers, size in _BLOCK.items())
    note = (
        f"Width {size.width} in heads of {size.head_dim} (the RMT's residual is four times as "
        f"large), RMSNorm, windows of {size.seq_len}, batches of {size.batch_size} and "
        f"{size.steps} steps at every depth; Block has blocks of {blocks} layers. Learning rates "
        "and factors come from the search below, with two seeds that no arm uses; at 8 layers "
        "they are the geometric means of those at 4 and 16, and at 32 layers those at 16. All "
        "held-out text is evaluated."
    )
    registered = tuple(f"attnres-{layers}-layers" for layers in _LAYERS)
    return Plan(tuple(arms), searches, SEEDS, registered, x="layers", notes=(note,))


# Maps each system to the best point of its search at 16 layers and tiny size, on the first text
# (docs/results.md): the position of its rate in `_Size.rates`, and the rate factor of attention
# over depth.
_FOUND = {
    "transformer": (1, None),
    "attnres": (0, 0.3),
    "rmt": (0, None),
    "rmt-attnres": (1, 0.0025),
}


def other_text(scale: Scale) -> Plan:
    """Return the plan that repeats the models of 16 layers, for a text that no search has read.

    The learning rates and factors are those that the searches of `plan` chose at tiny size. Three
    differences were chosen for tests before training: attention over depth against the plain sum,
    on a vector and on a matrix, and the RMT against the Transformer.
    """
    arms = []
    for system, (position, factor) in _FOUND.items():
        changes = {RATE: SIZES[scale].rates[position]}
        changes |= {} if factor is None else {DEPTH_RATE: factor}
        against = _SYSTEMS[system]
        arms.append(
            Arm(
                f"{system}-16-layers-other-text",
                config_of(scale, system, 16, **changes),
                system,
                against and f"{against}-16-layers-other-text",
            )
        )
    note = (
        "The models of 16 layers of the experiment depth, with the rates that were searched there "
        "on another text; nothing is searched. All held-out text is evaluated."
    )
    registered = tuple(arm.name for arm in arms if arm.against)
    return Plan(tuple(arms), seeds=SEEDS, registered=registered, notes=(note,))


def rates(scale: Scale) -> Plan:
    """Return the plan of searches for the rate factor of attention over depth at two batch sizes.

    The searches with the smaller batch are the same as in `plan`. The larger batch is four times as
    large, with half as many steps. One more search is over the learning rate of the deepest
    Transformer, which in `plan` has no search of its own.
    """
    size, systems = SIZES[scale], ("transformer", "attnres")
    large = {"train.batch_size": 4 * size.batch_size, "train.steps": size.steps // 2}
    searches = {}
    for layers in _SEARCHED:
        for system in systems:
            name = f"{system}-{layers}-layers"
            searches[name] = _search(scale, system, layers)
            searches[f"{name}-large-batch"] = _search(scale, system, layers, **large)
    deepest = max(_LAYERS)
    slower = points(rate=(size.rates[0] / 2, *size.rates[:2]))
    config = config_of(scale, "transformer", deepest)
    searches[f"transformer-{deepest}-layers"] = Search(config, slower, SEARCH_SEEDS)
    note = (
        f"Batches of {size.batch_size} sequences for {size.steps} steps and, in the rows named "
        f"large-batch, of {4 * size.batch_size} sequences for {size.steps // 2} steps. Everything "
        f"else is as in the experiment depth, where the Transformer of {deepest} layers has the "
        "rate of the one of 16. Nothing is trained with the result of these searches."
    )
    return Plan((), searches, SEEDS, notes=(note,))
