"""A check that each flag of a run has an effect.

This module does not import jax, because the import is slow.
"""

from collections.abc import Callable
from typing import NamedTuple

from recipes import common
from rmt_tpu.config import RunConfig, overrides
from rmt_tpu.errors import UsageError, shown
from sharding.spec import parse_mesh


class _Condition(NamedTuple):
    """A config field, and the condition under which it has an effect.

    Attributes:
      path: the config path of the field.
      without_effect: the value of the field that asks for nothing, which is always legal; None if
        there is no such value.
      holds: a function of the config that returns whether the field has an effect.
      legal: the flags with which it has one.
    """

    path: str
    without_effect: int | None
    holds: Callable[[RunConfig], bool]
    legal: str


_has_stages = lambda config: parse_mesh(config.train.mesh).get("stage", 1) != 1
_has_tasks = lambda config: bool(config.train.eval_tasks)
_PIPELINE = "a pipeline, like --mesh=stage=2"
_TEXT = "--data or --mixture with files of text"
_FIELDS = "--data or --mixture with .jsonl, .parquet or .arrow files"


def _reads_files(config: RunConfig) -> bool:
    """Return whether any text of the run comes from files, and not from a token store."""
    return bool(_texts(config))


def _reads_fields(config: RunConfig) -> bool:
    """Return whether any text of the run may come from files whose documents have fields."""
    from rmt_tpu.data.inputs import may_have_fields

    return any(map(may_have_fields, _texts(config)))


def _texts(config: RunConfig) -> list[str]:
    """Return the sources of the run's text that are not token stores."""
    from rmt_tpu.data.token_store import is_store

    sources = [each.source for each in config.data.mixture] or [config.data.source]
    return [source for source in sources if not is_store(source)]


_CONDITIONS = [
    _Condition("train.microbatches", 0, _has_stages, _PIPELINE),
    _Condition("train.virtual_stages", 1, _has_stages, _PIPELINE),
    _Condition(
        "train.optimizer.decay_fraction",
        None,
        lambda config: config.train.optimizer.schedule == "wsd",
        "--set=train.optimizer.schedule=wsd",
    ),
    _Condition("train.eval_tasks_every", 0, _has_tasks, "--eval_tasks"),
    _Condition("train.eval_tasks_limit", None, _has_tasks, "--eval_tasks"),
    _Condition(
        "train.eval_tokens",
        None,
        lambda config: config.train.eval_batches == 0,
        "--set=train.eval_batches=0",
    ),
    _Condition(
        "train.sample_every",
        0,
        lambda config: config.train.sample_tokens > 0,
        "train.sample_tokens of 1 or more",
    ),
    _Condition(
        "data.chat_template",
        None,
        lambda config: config.data.format == "messages",
        "--format=messages",
    ),
    _Condition(
        "data.text_field",
        None,
        lambda config: config.data.format != "completion",
        "the format text or messages",
    ),
    _Condition("data.chat_template", None, _reads_files, _TEXT),
    _Condition("data.text_field", None, _reads_fields, _FIELDS),
    _Condition("data.eval_fraction", None, _reads_files, _TEXT),
]


def check_effects(config: RunConfig) -> None:
    """Check that no flag sets a field that this run ignores.

    Values in the file of --config are not checked, because it may be of a run on another mesh.

    Args:
      config: the config with all flags applied.

    Raises:
      UsageError: a flag has no effect; the message says with which flags it has one.
    """
    given = common.given_paths()
    for path, without_effect, holds, legal in _CONDITIONS:
        if path not in given or holds(config):
            continue
        if (value := overrides.value_at(config, path)) != without_effect:
            raise UsageError(
                f"{given[path]}={shown(value)} has no effect on this run; legal: {legal}, or leave "
                f"out {given[path]}"
            )
