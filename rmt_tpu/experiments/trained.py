"""The plans of experiments with training, at the papers' sizes and at sizes for two CPU cores.

An arm is a model that a plan trains once per seed. A tiny arm is a preset with four layers and
heads of size 8. Its text is the bytes of Python's standard library. It reads 20 tokens per
non-embedding weight of the Transformer with the same shape. In the RMT paper, models instead read
20 tokens for each of their own weights. Arms with the same name in several plans share their runs.
"""

from collections.abc import Iterable
from dataclasses import replace

from rmt_tpu.config import (
    BlockAttention,
    Dense,
    FullAttention,
    MhcLite,
    Mixer,
    RunConfig,
    overrides,
)
from rmt_tpu.config.presets import run
from rmt_tpu.experiments.plan import Arm, Plan, Scale, Search, points, with_rate

HEAD_DIM = 8
# The sizes (numbers of heads) of the models in an experiment over several sizes, called a ladder.
# Learning rates are searched at the second size. Experiments with one size use the third.
_LADDER = (2, 3, 4, 6)
_SEARCHED, HEADS = _LADDER[1:3]
RATES = (5e-3, 1.2e-2, 2.8e-2, 6.7e-2, 1.6e-1)
# The learning-rate factors that are tried for the parameters of attention over depth. If a logit is
# a sum of more terms, `searched_for` divides the factors.
_FACTORS = (1.0, 0.3, 0.1, 0.03, 0.01)
SEEDS, _SEARCH_SEEDS = tuple(range(10)), (100, 101)

# Maps the name of each system (kind of residual), as shown on pages, to its preset.
_SYSTEMS = {
    "transformer": "gpt2-tiny",
    "rmt": "rmt-tiny",
    "attnres": "attnres-tiny",
    "rmt-attnres": "rmt-attnres-tiny",
    "attnres-full": "attnres-full-tiny",
    "mhc-lite": "mhc-lite-tiny",
    "highway": "highway-tiny",
    "depth-lstm": "depth-lstm-tiny",
    "hierarchical": "hierarchical-tiny",
}


def tiny(system: str, heads: int, *, mup: bool = True, **changes) -> RunConfig:
    """Return the config of a tiny run of a system; `changes` maps config paths to values."""
    width, matrix = heads * HEAD_DIM, "rmt" in system
    base = run(_SYSTEMS[system])
    sizes = _sizes(matrix, heads)
    based = [f"{path}={size}" for path, size in _sizes(matrix, _SEARCHED).items()]
    per_step = 16 * 64
    steps = round(20 * 12 * base.model.num_layers * width**2 / per_step)
    if mup:
        sizes |= {"parametrization": "mup", "parametrization.base": based}
    values = {f"model.{path}": size for path, size in sizes.items()} | {
        "model.attention.head_dim": HEAD_DIM,
        "train.batch_size": 16,
        "data.seq_len": 64,
        "train.steps": steps,
        "train.optimizer.learning_rate": 1e-2,  # This is the rate unless one is searched.
        "train.optimizer.warmup_fraction": 0.05,
        "train.eval_every": max(1, steps // 5),
        "train.eval_tokens": 2**20,  # This number covers all held-out text.
        "train.checkpoint_every": 0,
        "train.sample_tokens": 0,
        "train.log_every": 10,
    }
    if "none" in base.model.mixer.remats:
        # Training is faster without recomputation, and a tiny model needs little memory.
        values["model.remat"] = "none"
    return overrides.apply(base, values | changes)


def _sizes(matrix: bool, heads: int) -> dict[str, int]:
    """Return a model's sizes by config path; a matrix residual has four times as many numbers.

    The factor of four is the same as in the preset rmt-305m.
    """
    store = {"store.key_dim": 4 * heads} if matrix else {"store.dim": heads * HEAD_DIM}
    hidden = {"feed_forward.hidden_dim": 4 * heads * HEAD_DIM}
    return store | {"attention.num_heads": heads} | hidden


def _tiny_plan(arms: Iterable[Arm], searched: tuple[str, ...], **options) -> Plan:
    searches = {system: searched_for(tiny(system, _SEARCHED)) for system in searched}
    return Plan(tuple(arms), searches, SEEDS, **options)


def searched_for(config: RunConfig, rates: tuple[float, ...] = RATES) -> Search:
    """Return a search over the learning rate and, for attention over depth, over `depth_rate`.

    `depth_rate` multiplies the learning rate of the parameters of attention over depth. With a
    matrix residual, a logit is a sum of more terms than with a vector residual. The values of
    `depth_rate` are then divided by the ratio of the numbers of terms.
    """
    tried = {"rate": rates}
    if terms := config.model.mixer.logit_terms(config.model):
        more = max(1, terms.get("query", 1) / config.model.width)
        tried["depth_rate"] = tuple(float(f"{factor / more:.3g}") for factor in _FACTORS)
    return Search(config, points(**tried), _SEARCH_SEEDS)


def _on_axes(search: Search) -> Search:
    """Return the search with fewer points: those that differ from the middle in one value only.

    The middle point has the middle value of each config path. Of five factors and three learning
    rates, 7 of 15 points remain. A search over one config path keeps all of its points.
    """
    tried = {path: sorted({point[path] for point in search.points}) for path in search.points[0]}
    middle = {path: values[len(values) // 2] for path, values in tried.items()}
    near = (p for p in search.points if sum(p[path] != middle[path] for path in middle) <= 1)
    return replace(search, points=tuple(near))


TINY_NOTE = (
    f"Models of four layers, width {_LADDER[0] * HEAD_DIM} to {_LADDER[-1] * HEAD_DIM} in heads "
    f"of {HEAD_DIM}, on bytes of Python's standard library in windows of 64, batches of 16; 20 "
    "tokens per weight of the Transformer outside of embeddings, the same for all systems of a "
    f"size. Learning rates and factors over depth come from a search at width "
    f"{_SEARCHED * HEAD_DIM} with two seeds that no arm uses, and by muP at the other widths. "
    "Losses are nats per byte."
)


# Training models of several sizes -------------------------------------------------------------


def _tiny_ladder(*systems: str) -> Plan:
    arms = (
        Arm(
            f"{system}-{heads * HEAD_DIM}",
            tiny(system, heads),
            system,
            None if system == systems[0] else f"{systems[0]}-{heads * HEAD_DIM}",
            # Use fewer seeds at the largest width, where a run takes 13 times as long as at width
            # 24.
            num_seeds=5 if heads == _LADDER[-1] else None,
        )
        for heads in _LADDER
        for system in systems
    )
    arms = tuple(arms)
    tested = tuple(arm.name for arm in arms if arm.system == systems[1])
    notes = (TINY_NOTE, f"Models of width {_LADDER[-1] * HEAD_DIM} have only the first five seeds.")
    return _tiny_plan(arms, systems, fits=True, registered=tested, notes=notes)


def _preset(name: str, system: str, against: str | None = None, **options) -> Arm:
    return Arm(name, run(name), system, against, **options)


# The sizes of the models with which the RMT paper searched for learning rates (appendix C.2.1).
_TRIAL = {"num_layers": 4, "attention.num_heads": 8, "attention.head_dim": 32}
_TRIAL_BASE = {"attention.num_heads": 8, "attention.head_dim": 32, "feed_forward.hidden_dim": 1024}
_TRIAL_STORE = {"transformer": {"store.dim": 256}, "rmt": {"store.key_dim": 32}}
_PAPER_RATES = (8e-4, 2e-3, 5e-3, 1.3e-2, 3.2e-2)


def _in_mup(config: RunConfig, system: str) -> RunConfig:
    base = [f"{path}={size}" for path, size in (_TRIAL_BASE | _TRIAL_STORE[system]).items()]
    mup = {"model.parametrization": "mup", "model.parametrization.base": base}
    return overrides.apply(config, mup)


def _trial(system: str) -> RunConfig:
    name = {"transformer": "gpt2-160m", "rmt": "rmt-134m"}[system]
    sizes = _TRIAL | _TRIAL_BASE | _TRIAL_STORE[system]
    values = {f"model.{path}": size for path, size in sizes.items()}
    values |= {"data.seq_len": 128, "train.batch_size": 32, "train.steps": 5000}
    return _in_mup(overrides.apply(run(name), values), system)


def rmt_scaling(scale: Scale) -> Plan:
    """Return the plan of the RMT paper's scaling results: Figures 2 and 3, Tables 3, 4, 8 and 9."""
    if scale == "tiny":
        return _tiny_ladder("transformer", "rmt")
    pairs = ("49m", "46m"), ("160m", "134m"), ("260m", "206m"), ("405m", "305m")
    arms = []
    for vector, matrix in pairs:
        largest = (3.02, 2.91) if vector == "405m" else (None, None)
        for name, system, paper in zip(
            (f"gpt2-{vector}", f"rmt-{matrix}"), _TRIAL_STORE, largest, strict=True
        ):
            against = f"gpt2-{vector}-mup" if system == "rmt" else None
            config = _in_mup(run(name), system)
            arms.append(Arm(f"{name}-mup", config, system, against, paper=paper))
    searches = {
        system: Search(_trial(system), points(rate=_PAPER_RATES)) for system in _TRIAL_STORE
    }
    note = (
        "As in the paper, tokens are 20 times the weights outside of embeddings, except that both "
        "models of the last pair read 6e9. The paper also searches multipliers and the initial "
        "standard deviation (100 trials); here the search is over five learning rates, and "
        "`recipes.sweep` can search the rest."
    )
    return Plan(tuple(arms), searches, fits=True, notes=(note,))


# Losses in Table 2 of Kimi Team (2026): baseline, Block AttnRes, Full AttnRes, mHC-lite.
_TABLE_2 = {
    "194m": (1.931, 1.909, 1.899, 1.906),
    "241m": (1.895, 1.875, 1.874, 1.869),
    "296m": (1.829, 1.809, 1.804, 1.807),
    "436m": (1.766, 1.746, 1.737, 1.747),
    "528m": (1.719, 1.693, 1.692, 1.694),
}


def attnres_scaling(scale: Scale) -> Plan:
    """Return the plan of the Attention Residuals paper's scaling results: Table 2 and Figure 4."""
    if scale == "tiny":
        return _tiny_ladder("transformer", "attnres", "attnres-full", "mhc-lite")
    arms = []
    for size, printed in _TABLE_2.items():
        plain = f"prenorm-{size}"
        losses = iter(printed)
        arms += [
            _preset(plain, "prenorm", paper=next(losses)),
            _preset(f"attnres-{size}", "attnres", plain, paper=next(losses)),
            _preset(f"attnres-full-{size}", "attnres-full", plain, paper=next(losses)),
            Arm(
                f"mhc-lite-{size}", _with_mixer(run(plain), MhcLite()), "mhc-lite", plain,
                paper=next(losses),
            ),
        ]  # fmt: skip
    note = (
        "Dense stand-ins for the paper's mixtures of experts (see the presets), on other text: "
        "differences within a row can be compared with the paper's, but losses cannot. Learning "
        "rates are the paper's, which were tuned on the model with the standard residual."
    )
    return Plan(tuple(arms), fits=True, notes=(note,))


def _with_mixer(config: RunConfig, mixer: Mixer) -> RunConfig:
    return replace(config, model=config.model.replace(mixer=mixer))


def ladder(scale: Scale) -> Plan:
    """Return the plan that compares RMT, Attention Residuals and both combined at several sizes.

    Neither paper has this comparison.
    """
    if scale == "tiny":
        return _tiny_ladder("transformer", "rmt", "attnres", "rmt-attnres")
    arms = []
    for vector, matrix in (("153m", "134m"), ("374m", "311m"), ("1.2b", "1b")):
        plain = f"llama-{vector}"
        arms += [
            _preset(plain, "transformer"),
            _preset(f"rmt-llama-{matrix}", "rmt", plain),
            _preset(f"llama-attnres-{vector}", "attnres", plain),
            _preset(f"rmt-llama-attnres-{matrix}", "rmt-attnres", plain),
        ]
    return Plan(tuple(arms), fits=True, notes=("Cores of current models: RoPE, SwiGLU.",))


# Training models of one size ------------------------------------------------------------------


def rmt_variants(scale: Scale) -> Plan:
    """Return the plan of the RMT paper's variants: Figure 5 and Table 10."""
    printed = {
        "transformer": 3.43, "rmt": 3.38, "hierarchical": 3.47, "depth-lstm": 3.54, "highway": 3.41
    }  # fmt: skip
    note = (
        "The paper prints training losses. It gives no code of the last three systems; "
        "`rmt_tpu/residual` says how they are read here."
    )
    if scale == "tiny":
        plain = f"transformer-{HEADS * HEAD_DIM}"
        arms = (
            Arm(
                f"{system}-{HEADS * HEAD_DIM}",
                tiny(system, HEADS),
                system,
                None if system == "transformer" else plain,
                paper=loss,
            )
            for system, loss in printed.items()
        )
        return _tiny_plan(arms, tuple(printed), notes=(TINY_NOTE, note))
    names = ("gpt2-160m", "rmt-134m", "hierarchical-165m", "depth-lstm-233m", "highway-191m")
    arms = tuple(
        Arm(
            f"{name}-variant",
            with_rate(overrides.apply(run(name), {"train.steps": 50_000}), 1e-2),
            system,
            None if system == "transformer" else "gpt2-160m-variant",
            paper=loss,
        )
        for name, (system, loss) in zip(names, printed.items(), strict=True)
    )
    return Plan(arms, notes=(note,))


_BLOCKS = {1: 1.737, 2: 1.746, 4: 1.746, 8: 1.748, 16: 1.753, 32: 1.757}


def attnres_block_size(scale: Scale) -> Plan:
    """Return the plan of the Attention Residuals paper's Figure 6, which varies the block size.

    The block size is the number of sublayers per block.
    """
    axis = "sublayers per block, S"
    if scale == "tiny":
        plain, arms = f"transformer-{HEADS * HEAD_DIM}", []
        arms.append(Arm(plain, tiny("transformer", HEADS), "transformer"))
        for size in (1, 2, 4, 8):
            mixer = FullAttention() if size == 1 else BlockAttention(sublayers_per_block=size)
            arms.append(_mixed(f"attnres-s{size}", mixer, "attnres", plain, x=size))
        searched = ("transformer", "attnres")
        return _tiny_plan(arms, searched, x=axis, notes=(TINY_NOTE,))
    plain = "prenorm-436m"
    arms = [_preset(plain, "prenorm", paper=1.766)]
    for size, loss in _BLOCKS.items():
        mixer = FullAttention() if size == 1 else BlockAttention(sublayers_per_block=size)
        config = _with_mixer(run(plain), mixer)
        arms.append(Arm(f"attnres-436m-s{size}", config, "attnres", plain, x=size, paper=loss))
    return Plan(tuple(arms), x=axis)


def _mixed(name: str, mixer: Mixer, system: str, plain: str, heads=HEADS, **options) -> Arm:
    """Return an arm: a tiny Transformer with a given mixer and the learning rate of `system`.

    Its loss is measured at the end only. All held-out text takes a quarter of the training's time.
    """
    config = _with_mixer(tiny("attnres", heads, **{"train.eval_every": 0}), mixer)
    return Arm(f"{name}-{heads * HEAD_DIM}", config, system, plain, **options)


def _ablations(size: int, window: int, heads: int) -> dict[str, tuple[Mixer, float]]:
    """Return the mixers of the Attention Residuals paper's Table 4, each with the paper's loss.

    `size` is the block size S in the table's Block rows. One of these rows has `heads` heads over
    depth.
    """
    block = {"sublayers_per_block": size}
    return {
        "denseformer": (Dense(), 1.767),
        "mhc-lite": (MhcLite(), 1.747),
        "full": (FullAttention(), 1.737),
        "full-input-query": (FullAttention(query="input"), 1.731),
        "full-scalars": (FullAttention(query="scalars"), 1.749),
        "full-sigmoid": (FullAttention(weights="sigmoid"), 1.741),
        "full-no-key-norm": (FullAttention(key_norm=False), 1.743),
        "full-window": (FullAttention(window=window), 1.764),
        "block": (BlockAttention(**block), 1.746),
        "block-heads": (BlockAttention(**block, num_heads=heads), 1.752),
        "block-no-key-norm": (BlockAttention(**block, key_norm=False), 1.750),
    }


_ABLATION_NOTE = (
    f"All at width {_SEARCHED * HEAD_DIM}, and each ablation has its own search there: three "
    "learning rates at the middle factor, and five factors at the middle rate. The paper's "
    "ablations use the learning rate of the model with the standard residual."
)


def attnres_ablations(scale: Scale) -> Plan:
    """Return the plan of the Attention Residuals paper's ablations: Table 4."""
    notes = ("Table 4's mHC is mHC-lite here.",)
    if scale == "tiny":
        heads = _SEARCHED
        plain = f"transformer-{heads * HEAD_DIM}"
        arms = [Arm(plain, tiny("transformer", heads), "transformer", paper=1.766)]
        arms += [
            _mixed(f"ablation-{name}", mixer, f"ablation-{name}", plain, heads, paper=loss)
            for name, (mixer, loss) in _ablations(2, 2, heads).items()
        ]
        shared = _tiny_plan(arms, ("transformer",), notes=(TINY_NOTE, _ABLATION_NOTE, *notes))
        own_searches = {
            arm.system: _on_axes(searched_for(arm.config, RATES[1:4])) for arm in arms[1:]
        }
        return replace(shared, searches=shared.searches | own_searches)
    plain = "prenorm-436m"
    arms = [_preset(plain, "prenorm", paper=1.766)]
    for name, (mixer, loss) in _ablations(4, 8, 16).items():
        config = _with_mixer(run(plain), mixer)
        arms.append(Arm(f"ablation-{name}-436m", config, "attnres", plain, paper=loss))
    return Plan(tuple(arms), notes=notes)


def all_systems(scale: Scale) -> Plan:
    """Return the plan that compares all residual systems at the same number of tokens."""
    if scale == "tiny":
        plain = f"transformer-{HEADS * HEAD_DIM}"
        arms = (
            Arm(
                f"{system}-{HEADS * HEAD_DIM}", tiny(system, HEADS), system,
                None if system == "transformer" else plain,
            )
            for system in _SYSTEMS
        )  # fmt: skip
        return _tiny_plan(arms, tuple(_SYSTEMS), notes=(TINY_NOTE,))
    names = ("gpt2-160m", "rmt-134m", "highway-191m", "depth-lstm-233m", "hierarchical-165m",
             "hc-160m", "mhc-160m", "mhc-lite-160m")  # fmt: skip
    steps = {"train.steps": run("gpt2-160m").train.steps}
    first = f"{names[0]}-equal"
    arms = (
        Arm(f"{name}-equal", overrides.apply(run(name), steps), name,
            None if name == names[0] else first)
        for name in names
    )  # fmt: skip
    return Plan(tuple(arms))


def today(scale: Scale) -> Plan:
    """Return the plan that combines both papers' residuals with sublayers of today's models.

    These are the sublayers of Llama and of Kimi Linear.
    """
    size = {"tiny": ("tiny", "tiny", "tiny"), "paper": ("153m", "134m", "194m")}[scale]
    vector, matrix, kimi = size
    plain, first = f"llama-{vector}", "kimi-tiny" if scale == "tiny" else f"prenorm-kimi-{kimi}"
    arms = [
        _preset(plain, "llama"),
        _preset(f"llama-attnres-{vector}", "llama-attnres", plain),
        _preset(f"rmt-llama-{matrix}", "rmt-llama", plain),
        _preset(first, "kimi"),
        _preset(f"attnres-kimi-{kimi}", "attnres-kimi", first),
        _preset(f"attnres-full-kimi-{kimi}", "attnres-full-kimi", first),
    ]
    if scale == "tiny":
        arms.append(_preset("rmt-kimi-tiny", "rmt-kimi", first))
    return Plan(
        tuple(arms), notes=("The presets' own runs and learning rates; nothing is searched.",)
    )


def largest_of(plan: Plan, systems: tuple[str, ...]) -> Plan:
    """Reduce a plan over model sizes to the largest model of each given system."""
    last = {arm.system: arm for arm in plan.arms}
    return _row(plan, [last[system] for system in systems])


def smallest_of(plan: Plan, systems: tuple[str, ...]) -> Plan:
    """Reduce a plan over model sizes to the smallest model of each given system."""
    first = {arm.system: arm for arm in reversed(plan.arms)}
    return _row(plan, [first[system] for system in systems])


def _row(plan: Plan, arms: list[Arm]) -> Plan:
    """Return a plan with only the given arms (models of one size), whose differences are tested."""
    systems = {arm.system for arm in arms}
    return replace(
        plan,
        arms=tuple(arms),
        searches={s: search for s, search in plan.searches.items() if s in systems},
        registered=tuple(arm.name for arm in arms if arm.against),
        fits=False,
    )
