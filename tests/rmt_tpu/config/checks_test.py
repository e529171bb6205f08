"""Every number of a config is finite and in range, on both sides."""

import dataclasses
import json
import math
import typing

import pytest

from rmt_tpu import config as cfg
from rmt_tpu.config import overrides
from rmt_tpu.config.checks import Checked, ranges
from rmt_tpu.config.presets import run
from rmt_tpu.errors import UsageError
from rmt_tpu.generation import Sampling

CHOICES = (cfg.Store, cfg.Mixer, cfg.Positions, cfg.Parametrization)
CLASSES = [
    cfg.AdamW,
    cfg.TrainConfig,
    cfg.DataConfig,
    cfg.ModelConfig,
    cfg.Attention,
    cfg.FeedForward,
    Sampling,
    *(cls for choice in CHOICES for cls in typing.get_args(choice)),
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_number_has_a_range(cls):
    hints = typing.get_type_hints(cls)
    numbers = {int, float, int | None, float | None}
    named = {f.name for f in dataclasses.fields(cls) if hints[f.name] in numbers}
    assert named == set(ranges(cls))
    assert not named or issubclass(cls, Checked)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_both_sides_of_every_range(cls):
    """The ends are legal; what is beyond them, NaN and the infinities are not."""
    for name, legal in ranges(cls).items():
        for end, is_open in ((legal.low, legal.open_low), (legal.high, legal.open_high)):
            assert (end in legal) == (not is_open), name
        below, above = math.nextafter(legal.low, -math.inf), math.nextafter(legal.high, math.inf)
        for value in (below, above, math.nan, math.inf, -math.inf):
            config = object.__new__(cls)  # of its other fields nothing is asked here
            for field in ranges(cls):
                object.__setattr__(config, field, None)
            object.__setattr__(config, name, value)
            with pytest.raises(UsageError, match=f"{cls.__name__}.{name}=.* must be "):
                Checked.__post_init__(config)


@pytest.mark.parametrize(
    "path, values",
    {
        "train.optimizer.b1": (1.5, 1, -0.1),
        "train.optimizer.b2": (1, -3),
        "train.optimizer.weight_decay": (-5, math.inf),
        "train.optimizer.epsilon": (0, math.inf),
        "train.optimizer.learning_rate": (math.inf, math.nan, 0, -1, 1e39),
        "train.optimizer.warmup_fraction": (1.01, -0.1),
        "train.z_loss": (-1, math.nan),
        "train.checkpoint_every": (-5, 2**31),
        "train.checkpoint_seconds": (-1, math.inf),
        "train.eval_every": (-5,),
        "train.microbatches": (-2,),
        "train.sample_tokens": (-5, 4_000_000_000),
        "train.seed": (-1, 2**32, 10**30),
        "train.steps": (0, 10**20),
        "data.eval_fraction": (0, 0.51),
        "model.norm_epsilon": (0, math.inf),
        "model.init_std": (math.inf,),
        "model.vocab_size": (10**11,),
    }.items(),
)
def test_senseless_numbers_are_told_by_their_path(path, values):
    values_of_run = overrides.to_json(run("rmt-tiny"))
    for value in values:
        text = json.dumps(value)
        *parents, name = path.split(".")
        fields = json.loads(json.dumps(values_of_run))
        node = fields
        for parent in parents:
            node = node[parent]
        node[name] = json.loads(text)
        with pytest.raises(UsageError, match=rf"^{path}=\S+ must be ") as error:
            overrides.from_json(cfg.RunConfig, fields)
        assert "\n" not in str(error.value)


def test_products_of_sizes_are_counted_too():
    small = run("rmt-tiny")
    with pytest.raises(UsageError, match="model.store.key_dim .* = 3200000000 must be at most"):
        overrides.apply(small, {"model.store.key_dim": 10**8})
    with pytest.raises(UsageError, match="model.attention.num_heads .* must be at most"):
        overrides.apply(small, {"model.attention.num_heads": 10**9})
