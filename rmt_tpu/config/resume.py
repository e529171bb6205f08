"""What of a run's config may differ when it is resumed: each field says so itself."""

import dataclasses
from typing import Any, Literal

Rule = Literal["fixed", "change", "free"]
# What was "auto" when a run began stays what it was: where the run goes on, its curve does.
KEPT = ("model.remat", "model.store.dtype")
# Fields of `train` that say with what a run began, and matter until it has a checkpoint.
BEGAN = ("init_from", "with_optimizer")


def free(default: Any) -> Any:
    """A field that changes no number of the curve, beyond the order in which devices add up."""
    return dataclasses.field(default=default, metadata={"resume": "free"})


def changeable(default: Any = dataclasses.MISSING) -> Any:
    """A field that may differ if that is wanted: the state fits, the curve goes on as another."""
    return dataclasses.field(default=default, metadata={"resume": "change"})


def resume_rule(config: Any, path: str) -> Rule:
    """The rule of a dotted path, which is that of its outermost field that has one."""
    for name in path.split("."):
        fields = {f.name: f for f in dataclasses.fields(config)}
        if name not in fields:  # of another choice, or its kind
            break
        if rule := fields[name].metadata.get("resume"):
            # Another kind keeps another state.
            return "fixed" if rule == "change" and path.endswith(".kind") else rule
        config = getattr(config, name)
        if not dataclasses.is_dataclass(config):
            break
    return "fixed"
