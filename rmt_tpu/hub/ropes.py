"""RoPE in the fields of a config.json: its base, scaling, and the rotated part of each head.

This module does not import JAX.
"""

import math
from typing import Any, NamedTuple

from rmt_tpu import config as cfg
from rmt_tpu.hub.families import PARTIAL_ROPE, Family
from rmt_tpu.hub.fields import Fields

# These are the names in config.json for layers without and with a sliding window.
FULL, SLIDING = "full_attention", "sliding_attention"
_SCALINGS = {
    scaling.kind: scaling for scaling in (cfg.Llama3Scaling, cfg.LinearScaling, cfg.YarnScaling)
}

# The field with the context length before scaling.
_ORIGINAL = "original_max_position_embeddings"
# The field with the base of layers with a window, which Gemma 3 has and OLMo 3 lacks.
_LOCAL = "rope_local_base_freq"
# The YaRN field from which DeepSeek models compute a factor for the attention logits.
_ALL_DIMS = "mscale_all_dim"


class Ropes(NamedTuple):
    """The RoPE of layers without a sliding window, and of layers with one."""

    full: cfg.Rope
    sliding: cfg.Rope


def read_ropes(fields: Fields, family: Family, head_dim: int) -> Ropes:
    """Read the RoPE settings from `rope_theta` and `rope_scaling`, or from `rope_parameters`.

    Newer versions of transformers write `rope_parameters`, which contains the base and the scaling.
    If layers with a window have their own RoPE, it contains one such object for each of the two
    sorts of layers. `rope_scaling` then replaces values of the layers without a window. For other
    model types, `rope_scaling` replaces the whole `rope_parameters`, as in transformers.

    Raises:
      UsageError: a field has a value that is not supported.
    """
    if not family.ropes:
        rope = _rope(fields, (_group(fields),), "rope_theta", family, head_dim)
        return Ropes(rope, rope)
    newer = fields.holds("rope_parameters", FULL, SLIDING)
    if not newer and fields.has("rope_parameters"):
        value = "another object"
        raise fields.wrong(
            "rope_parameters", value, f"null, or an object with {FULL} and {SLIDING}"
        )
    inside = fields.inside("rope_parameters") if newer else fields
    groups = [(inside.group(name),) if newer else () for name in (FULL, SLIDING)]
    groups[0] += (fields.group("rope_scaling"),)
    bases = "rope_theta", _LOCAL if fields.has(_LOCAL) else "rope_theta"
    return Ropes(
        *(
            _rope(fields, own, base, family, head_dim)
            for own, base in zip(groups, bases, strict=True)
        )
    )


def rope_values(family: Family, ropes: Ropes) -> dict[str, Any]:
    """Return the fields of config.json that describe RoPE, except `partial_rotary_factor`.

    Older and newer versions of transformers read different fields. Both are written if layers with
    a window have their own RoPE.
    """
    values = {"rope_theta": ropes.full.base, "rope_scaling": _scaling_values(ropes.full.scaling)}
    if not family.ropes:
        return values
    if _LOCAL in family.absent:
        values[_LOCAL] = ropes.sliding.base
    both = zip((FULL, SLIDING), ropes, strict=True)
    return values | {
        "rope_parameters": {
            name: {
                "rope_type": "default",
                "rope_theta": rope.base,
                **(_scaling_values(rope.scaling) or {}),
            }
            for name, rope in both
        }
    }


def _group(fields: Fields) -> Fields:
    """Return the fields in `rope_scaling`, or in `rope_parameters` if there are none."""
    scaling = fields.group("rope_scaling")
    return scaling if scaling.names() else fields.group("rope_parameters")


def _rope(
    fields: Fields, groups: tuple[Fields, ...], base: str, family: Family, head_dim: int
) -> cfg.Rope:
    """Read the RoPE of the layers with a window, or of the layers without a window.

    The base is in a group, or else in the model's field named `base`. A value in a later group
    replaces that of an earlier one.
    """
    scaling, theta = None, fields.positive(base, 10_000.0)
    for group in groups:
        found = _scaling(group, fields, family)
        scaling = found if group.has("rope_type") or group.has("type") else scaling
        theta = group.positive("rope_theta", theta)
    if family.rotated is None:
        for group in (*groups, fields):
            group.only("partial_rotary_factor", 1.0, None)
        return cfg.Rope(base=theta, scaling=scaling)
    given = (group for group in (*groups, fields) if group.has("partial_rotary_factor"))
    dims = _rotated(next(given, fields), head_dim, family.rotated)
    return cfg.Rope(base=theta, dims=None if dims == head_dim else dims, scaling=scaling)


def _rotated(fields: Fields, head_dim: int, default: float) -> int:
    """Return the size of the part of a head that RoPE rotates."""
    name = "partial_rotary_factor"
    factor = fields.positive_or(name, default)
    dims = int(head_dim * min(factor, 2.0))  # The product with a larger factor may be infinite.
    if dims % 2 or not 0 < dims <= head_dim:
        legal = f"a number up to 1 whose product with head_dim={head_dim} is even"
        raise fields.wrong(name, factor, legal)
    return dims


def _scaling(group: Fields, model: Fields, family: Family) -> cfg.Scaling | None:
    """Return the RoPE scaling in a group of fields, or None if the group has no scaling.

    The context length before scaling is `original_max_position_embeddings`. As in transformers, the
    model's own field of this name takes precedence over the group's, unless layers with a window
    have their own RoPE. If both are missing, the model's `max_position_embeddings` is used. For
    model types with `PARTIAL_ROPE`, a group with a scaling raises UsageError.
    """
    kinds = () if PARTIAL_ROPE in family.traits else _SCALINGS
    for name in ("rope_type", "type"):
        group.only(name, "default", *kinds)
    named = [
        group.lookup(n, {"default": None, **_SCALINGS})
        for n in ("rope_type", "type")
        if group.has(n)
    ]
    kind = next((kind for kind in named if kind is not None), None)
    if kind is None:
        return None
    if kind is cfg.LinearScaling:
        return kind(group.positive("factor"))
    most = model.size("max_position_embeddings", 2048)
    length = group.size(_ORIGINAL, most)
    if model.has(_ORIGINAL) and not family.ropes:
        length = model.size(_ORIGINAL)
    if kind is cfg.YarnScaling:
        return _yarn(group, length, most)
    low, high = group.positive("low_freq_factor"), group.positive("high_freq_factor")
    if low >= high:
        raise group.wrong("low_freq_factor", low, f"below high_freq_factor={high}")
    return cfg.Llama3Scaling(group.positive("factor"), low, high, length)


def _yarn(group: Fields, length: int, most: int) -> cfg.YarnScaling:
    fast, slow = group.positive_or("beta_fast", 32.0), group.positive_or("beta_slow", 1.0)
    if slow >= fast:
        raise group.wrong("beta_slow", slow, f"below beta_fast={fast}")
    factor = group.positive_or("factor", most / length)
    scales = [group.not_negative(n) if group.has(n) else 0.0 for n in ("mscale", _ALL_DIMS)]
    magnitude = None
    if group.has("attention_factor"):
        magnitude = group.positive("attention_factor")
    elif all(scales):
        of_rotated, of_all = (_magnitude(factor, scale) for scale in scales)
        magnitude = of_rotated / of_all
    return cfg.YarnScaling(factor, length, fast, slow, magnitude, group.flag("truncate", True))


def _magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def read_logit_factor(fields: Fields, rope: cfg.Rope) -> float:
    """Return YaRN's factor for the attention logits in DeepSeek models; 1 without YaRN.

    It is the square of `0.1 s log(factor) + 1`, where s is the field `mscale_all_dim`.

    Raises:
      UsageError: the config has this field, but does not use YaRN, or the number is too large.
    """
    group = _group(fields)
    if not isinstance(rope.scaling, cfg.YarnScaling):
        group.only(_ALL_DIMS, None, 0)
        return 1.0
    scale = group.not_negative(_ALL_DIMS) if group.has(_ALL_DIMS) else 0.0
    magnitude = _magnitude(rope.scaling.factor, scale)
    if magnitude > 1e100:
        raise group.wrong(_ALL_DIMS, scale, "a number whose factor for the logits is finite")
    return magnitude**2


def logit_factor_values(rope: cfg.Rope, factor: float) -> dict[str, float]:
    """Return the `rope_scaling` field that encodes the factor for the attention logits.

    The result is {} if the factor is 1 or the field cannot express it. The caller must read the
    field back and compare the result with the model.
    """
    scaling = rope.scaling
    if factor == 1.0 or not isinstance(scaling, cfg.YarnScaling) or scaling.factor <= 1:
        return {}
    scale = (math.sqrt(factor) - 1) / (0.1 * math.log(scaling.factor))
    # Round the quotient, because the numbers in config files have few digits.
    return {_ALL_DIMS: round(scale, 12)}


def _scaling_values(scaling: cfg.Scaling | None) -> dict[str, Any] | None:
    match scaling:
        case None:
            return None
        case cfg.LinearScaling():
            return {"rope_type": scaling.kind, "factor": scaling.factor}
        case cfg.YarnScaling():
            magnitude = {} if scaling.magnitude is None else {"attention_factor": scaling.magnitude}
            return {
                "rope_type": scaling.kind,
                "factor": scaling.factor,
                _ORIGINAL: scaling.original_length,
                "beta_fast": scaling.fast,
                "beta_slow": scaling.slow,
                "truncate": scaling.whole,
                **magnitude,
            }
        case cfg.Llama3Scaling():
            return {
                "rope_type": scaling.kind,
                "factor": scaling.factor,
                "low_freq_factor": scaling.low,
                "high_freq_factor": scaling.high,
                _ORIGINAL: scaling.original_length,
            }
