"""Sliding windows in the fields of a config.json: the window size, and which layers have it.

This module does not import JAX.
"""

from typing import Any

from rmt_tpu.hub.families import Family
from rmt_tpu.hub.fields import Fields
from rmt_tpu.hub.ropes import FULL, SLIDING

# Model types with these values of `Family.windows` do not use `layer_types` to choose layers.
_UNLISTED = (None, "all")
# A flag that enables `sliding_window`. Only model types with a default for it have this flag.
_ON_REQUEST = "use_sliding_window"


def read_windows(fields: Fields, family: Family, rotated: list[bool]) -> list[int | None]:
    """Return each layer's window in tokens, or None for a layer without a window.

    Args:
      fields: the fields of config.json.
      family: the model type.
      rotated: whether each layer has RoPE.

    Raises:
      UsageError: the model type has no windows, or it does not allow these `layer_types`.
    """
    window, count = None, len(rotated)
    if family.windows is None:
        fields.only("sliding_window", None)
    elif _is_on(fields, family) and fields.has("sliding_window"):
        window = fields.size("sliding_window")
    slides = [False] * count if window is None else _by_default(fields, family, rotated)
    usual = [SLIDING if layer else FULL for layer in slides]
    listed = fields.texts("layer_types", count, FULL, SLIDING)
    if listed is not None and family.windows not in _UNLISTED:
        if window is None and SLIDING in listed:
            legal = f"{FULL} for every layer, or a config with a sliding_window"
            raise fields.wrong("layer_types", listed, legal)
        usual = listed
    elif listed not in (None, usual):
        raise fields.wrong("layer_types", listed, f"null, or the model type's own choice: {usual}")
    return [window if name == SLIDING else None for name in usual]


def _is_on(fields: Fields, family: Family) -> bool:
    return _ON_REQUEST not in family.absent or fields.flag(_ON_REQUEST)


def _by_default(fields: Fields, family: Family, rotated: list[bool]) -> list[bool]:
    """Return, for each layer, whether it has a window by the model type's default rule."""
    layers = range(len(rotated))
    match family.windows:
        case "late":
            first = fields.count("max_window_layers")
            return [layer >= first for layer in layers]
        case "unrotated":
            return [not turned for turned in rotated]
        case "other":
            return [layer % 2 == 0 for layer in layers]
        case "most":
            named = "sliding_window_pattern" in family.absent
            period = fields.size("sliding_window_pattern") if named else 4
            return [(layer + 1) % period > 0 for layer in layers]
    return [True for _ in layers]


def _no_windows(family: Family, layers: int) -> dict[str, Any]:
    """Return the fields for a model without windows; {} if the type has none by default."""
    if "sliding_window" not in family.absent or _ON_REQUEST in family.absent:
        return {}
    if family.windows in _UNLISTED:
        return {"sliding_window": None}
    # The transformers library expects a size even if no layer has a window, so the default stays.
    return {"layer_types": [FULL] * layers}


def window_values(family: Family, windows: list[int | None]) -> dict[str, Any]:
    """Return the fields of config.json that describe the windows of all layers.

    The fields can express only one window size, and for some model types they cannot choose the
    layers that have it. The caller must therefore read the fields back and compare the result with
    the model.
    """
    window = next((size for size in windows if size is not None), None)
    if family.windows is None:
        return {}
    if window is None:
        return _no_windows(family, len(windows))
    values: dict[str, Any] = {"sliding_window": window}
    if _ON_REQUEST in family.absent:
        values[_ON_REQUEST] = True
    if family.windows not in _UNLISTED:
        values["layer_types"] = [FULL if size is None else SLIDING for size in windows]
    if family.windows == "late":
        values["max_window_layers"] = next(n for n, size in enumerate(windows) if size is not None)
    return values
