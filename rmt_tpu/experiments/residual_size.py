"""Plans that vary the key size D_k of a matrix residual, or increase D_k during training.

Tiny models use the standard parametrisation, with learning-rate searches at several D_k. They do
not use muP, which divides the learning rate of the read keys by D_k. Models with different D_k
would then also differ in this rate.
"""

from rmt_tpu.config import RunConfig, overrides
from rmt_tpu.config.presets import run
from rmt_tpu.experiments.plan import Arm, Plan, Scale, with_rate
from rmt_tpu.experiments.trained import HEAD_DIM, HEADS, SEEDS, TINY_NOTE, searched_for, tiny

_WIDTH = HEADS * HEAD_DIM
# The values of D_k with a learning-rate search. Other values of D_k use the geometric mean of the
# two nearest searches.
_SEARCHED = (HEADS, 4 * HEADS, 16 * HEADS)
_NOTE = (
    f"All at width {_WIDTH} in the standard parametrization; learning rates are searched with D_k "
    f"{', '.join(map(str, _SEARCHED))}. Other sizes use the rate of the nearest D_k, or the "
    "geometric mean of the two nearest."
)


def _name(key_dim: int) -> str:
    return f"rmt-{_WIDTH}-slots-{key_dim}"


def _config(key_dim: int) -> RunConfig:
    return tiny("rmt", HEADS, mup=False, **{"model.store.key_dim": key_dim})


def _searches(key_dim: int) -> tuple[str, ...]:
    """Return the name of the search at D_k = `key_dim`, or the names of the nearest two."""
    if key_dim in _SEARCHED:
        return (_name(key_dim),)
    below = [size for size in _SEARCHED if size < key_dim][-1:]
    above = [size for size in _SEARCHED if size > key_dim][:1]
    return tuple(map(_name, below + above))


def rmt_key_dim(scale: Scale) -> Plan:
    """Return the plan of the RMT paper's Figure 6: larger residuals at equal weights and FLOPs."""
    axis = "numbers in a token's residual, D_k D_v"
    if scale == "tiny":
        plain = f"transformer-{_WIDTH}-standard"
        config = tiny("transformer", HEADS, mup=False)
        arms = [Arm(plain, config, "transformer", x=_WIDTH, searches=(plain,))]
        arms += [
            Arm(
                _name(k),
                _config(k),
                "rmt",
                _name(HEADS) if k != HEADS else None,
                x=k * HEAD_DIM,
                searches=_searches(k),
            )
            for k in (HEADS // 2, HEADS, 2 * HEADS, 4 * HEADS, 8 * HEADS, 16 * HEADS)
        ]
        searches = {plain: searched_for(config)}
        searches |= {_name(k): searched_for(_config(k)) for k in _SEARCHED}
        return Plan(tuple(arms), searches, SEEDS, x=axis, notes=(TINY_NOTE, _NOTE))
    names = {k: "rmt-134m" if k == 32 else f"rmt-134m-k{k}" for k in (6, 12, 24, 32, 48, 64)}
    configs = {
        k: with_rate(overrides.apply(run(name), {"train.steps": 50_000}), 1e-2)
        for k, name in names.items()
    }
    arms = tuple(
        Arm(f"{name}-50k", configs[k], "rmt", None if k == 12 else "rmt-134m-k12-50k", x=64 * k)
        for k, name in names.items()
    )
    return Plan(arms, x=axis, notes=("50,000 steps at a learning rate of 1e-2 (C.3).",))


def growth(scale: Scale) -> Plan:
    """Return the plan of a run whose D_k grows to four times its size after a quarter of the steps.

    For comparison, the plan has arms (models) with a constant small and a constant large D_k. One
    more arm has the small D_k and the learning-rate schedule of the growing arm.
    """
    if scale == "tiny":
        small, large, name = HEADS, 4 * HEADS, _name
        config, searches = _config, {_name(k): searched_for(_config(k)) for k in _SEARCHED[:2]}
        search_names = {"searches": (_name(small), _name(large))}
    else:
        small, large, name = 16, 64, "rmt-134m-k{}".format
        config = lambda k: overrides.apply(run("rmt-134m"), {"model.store.key_dim": k})
        searches, search_names = {}, {}
    base, constant = name(small), f"{name(small)}-held"
    searches_for = lambda k: {"searches": (name(k),)} if searches else {}
    arms = (
        Arm(base, config(small), "rmt", **searches_for(small)),
        Arm(constant, config(small), "rmt", base, grows_from=small, **search_names),
        Arm(f"{base}-to-{large}", config(large), "rmt", constant, grows_from=small, **search_names),
        Arm(name(large), config(large), "rmt", base, **searches_for(large)),
    )
    note = (
        "The second and third arms keep the peak learning rate for a quarter of the steps, and "
        "then follow the schedule of the other arms. At that step the third arm grows, which does "
        "not change what it computes. New entries start with Adam's first moment at 0 and its "
        "second moment as large as that of the old entries, so that they warm up over about ten "
        "steps. FLOPs and weights are counted as if the model had been large from the start."
    )
    notes = (TINY_NOTE, _NOTE, note) if scale == "tiny" else (note,)
    seeds = SEEDS if scale == "tiny" else SEEDS[:3]
    return Plan(arms, searches, seeds, registered=(f"{base}-to-{large}",), notes=notes)
