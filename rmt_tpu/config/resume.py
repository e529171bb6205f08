"""Rules for which config fields may change when a run resumes."""

import dataclasses
from typing import Any, Literal

Rule = Literal["fixed", "change", "free"]
# Config paths of fields whose values a run chooses if they are "auto" or None. A resumed run keeps
# what it chose when it started, so that its loss curve continues.
PINNED_ON_RESUME = ("model.remat", "model.store.dtype", "train.accumulate")
# Fields of `train` that determine how a run starts. They have no effect once the run has a
# checkpoint.
START_FIELDS = ("init_from", "with_optimizer")


def free(default: Any) -> Any:
    """Return a dataclass field that may always change when a run resumes.

    Such a field does not affect the loss curve, except by the order of sums over devices.
    """
    return dataclasses.field(default=default, metadata={"resume": "free"})


def changeable(default: Any = dataclasses.MISSING) -> Any:
    """Return a dataclass field that may change on a resume if the user asks for it.

    The saved state still fits the changed config, but the loss curve changes.
    """
    return dataclasses.field(default=default, metadata={"resume": "change"})


def fixed(default: Any) -> Any:
    """Return a dataclass field that never changes when a run resumes, within a changeable one.

    The saved state would not fit the changed config.
    """
    return dataclasses.field(default=default, metadata={"resume": "fixed"})


def resume_rule(config: Any, path: str) -> Rule:
    """Return whether the field at a dotted path may change when a run resumes.

    The rule is that of the outermost field on the path that declares one, unless a field within it
    is fixed. Without any, the result is "fixed".
    """
    rules = []
    for name in path.split("."):
        fields = {f.name: f for f in dataclasses.fields(config)}
        if name not in fields:  # the name is `kind`, or a field of a different class
            break
        rules.append(fields[name].metadata.get("resume"))
        config = getattr(config, name)
        if not dataclasses.is_dataclass(config):
            break
    rule = next(filter(None, rules), "fixed")
    # A component of a different kind would not fit the saved state, so its kind is fixed.
    of_kind = rule == "change" and path.endswith(".kind")
    return "fixed" if of_kind or "fixed" in rules else rule
