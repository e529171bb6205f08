"""Rules for which fields of a run's config may differ on a resume; each field states its own."""

import dataclasses
from typing import Any, Literal

Rule = Literal["fixed", "change", "free"]
# If these were "auto" when a run began, a resumed run keeps the choice made then, so that its curve
# goes on.
KEPT = ("model.remat", "model.store.dtype")
# Fields of `train` that say how a run began, and matter until it has a checkpoint.
BEGAN = ("init_from", "with_optimizer")


def free(default: Any) -> Any:
    """Return a field that changes no number of the curve, up to the order of sums over devices."""
    return dataclasses.field(default=default, metadata={"resume": "free"})


def changeable(default: Any = dataclasses.MISSING) -> Any:
    """Return a field that may change on request: the state still fits, but the curve changes."""
    return dataclasses.field(default=default, metadata={"resume": "change"})


def resume_rule(config: Any, path: str) -> Rule:
    """Return the rule of a dotted path, which is that of its outermost field with a rule."""
    for name in path.split("."):
        fields = {f.name: f for f in dataclasses.fields(config)}
        if name not in fields:  # the field is of another choice, or is the kind
            break
        if rule := fields[name].metadata.get("resume"):
            # Another kind has another state.
            return "fixed" if rule == "change" and path.endswith(".kind") else rule
        config = getattr(config, name)
        if not dataclasses.is_dataclass(config):
            break
    return "fixed"
