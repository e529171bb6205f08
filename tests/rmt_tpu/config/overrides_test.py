"""Configs to JSON and back, and overrides by path."""

import json

import pytest

import rmt_tpu
from rmt_tpu import config as cfg
from rmt_tpu.config import overrides
from rmt_tpu.config.presets import run
from rmt_tpu.errors import RmtError, UsageError


def apply(*assignments, base="rmt-tiny"):
    return overrides.apply(run(base), dict(map(overrides.parse_assignment, assignments)))


@pytest.mark.parametrize("name", rmt_tpu.presets())
def test_json_round_trip(name):
    config = run(name)
    text = json.dumps(overrides.to_json(config))
    assert overrides.from_json(cfg.RunConfig, json.loads(text)) == config


def test_values_are_parsed_by_their_field():
    config = apply(
        "model.store.key_dim=128",
        "model.store.fraction_bits=none",
        "model.attention.positions=rope",
        "model.attention.positions.base=5e5",
        "train.optimizer.learning_rate=1",
        "train.optimizer.decay_exclude=gain,keys",
        "train.optimizer.independent_weight_decay=true",
        "data.source=a.txt,b.txt",
        "train.sample_prompt=7",
    )
    assert config.model.store == cfg.MatrixStore(key_dim=128)
    assert config.model.attention.positions == cfg.Rope(base=500_000.0)
    assert config.train.optimizer.learning_rate == 1.0
    assert config.train.optimizer.decay_exclude == ("gain", "keys")
    assert config.train.optimizer.independent_weight_decay is True
    assert config.data.source == "a.txt,b.txt"
    assert config.train.sample_prompt == "7"


def test_a_choice_can_be_given_whole_or_by_kind_and_fields():
    whole = apply('model.store={"kind": "vector", "dim": 48}')
    assert whole.model.store == cfg.VectorStore(48)
    assert apply("model.store=vector", "model.store.dim=48") == whole
    sizes = "store.key_dim=2,attention.num_heads=2"
    mup = apply("model.parametrization=mup", f"model.parametrization.base={sizes}")
    assert mup.model.parametrization == cfg.MuP(base=("store.key_dim=2", "attention.num_heads=2"))


def test_a_choice_may_be_none():
    yarn = cfg.YarnScaling(4.0, 64)
    given = json.dumps(overrides.to_json(yarn))
    rope = "model.attention.positions=rope"
    found = apply(rope, f"model.attention.positions.scaling={given}")
    assert found.model.attention.positions == cfg.Rope(scaling=yarn)
    without = {"model.attention.positions.scaling": "none"}
    assert overrides.apply(found, without).model == apply(rope).model
    with pytest.raises(UsageError, match="scaling 'longrope' is unknown; legal: llama3, linear, y"):
        apply(rope, "model.attention.positions.scaling=longrope")


def test_fields_of_a_choice_outlive_its_kind_whatever_their_order():
    """The flags of a run come before --set, where its kind is."""
    rate = {"train.optimizer.learning_rate": 0.1}
    for changes in (rate | {"train.optimizer": "muon"}, {"train.optimizer": "muon"} | rate):
        optimizer = overrides.apply(run("rmt-tiny"), changes).train.optimizer
        assert (optimizer.kind, optimizer.learning_rate) == ("muon", 0.1)


def test_value_at():
    config = apply("model.attention.num_heads=8")
    assert overrides.value_at(config, "model.attention.num_heads") == 8
    assert overrides.value_at(config, "model.stacks.0.cores.0.num_heads") == 8
    with pytest.raises(UsageError, match="model.store.dim: field 'dim' is unknown"):
        overrides.value_at(config, "model.store.dim")


def test_all_overrides_are_in_place_before_any_is_checked():
    config = apply("data.seq_len=4096", "model.attention.positions=alibi")
    assert config.data.seq_len == 4096


@pytest.mark.parametrize(
    "assignment, message",
    [
        ("model.store.key_dim", "'model.store.key_dim' must be path=value"),
        ("model.stroe.key_dim=3", "field of model 'stroe' is unknown; did you mean 'store'"),
        ("trian.steps=3", "field of the config 'trian' is unknown; did you mean 'train'"),
        ("train.accumulate=auto", "train.accumulate='auto' must be a whole number, or none"),
        ("model.num_layers=six", "model.num_layers='six' must be a whole number"),
        ("model.num_layers=1.5", "model.num_layers=1.5 must be a whole number"),
        ("model.num_layers=true", "model.num_layers=true must be a whole number"),
        ("model.num_layers=null", "model.num_layers=null must be a whole number"),
        ("model.norm=null", "model.norm 'null' is unknown"),
        ("model.store=true", "model.store 'true' is unknown"),
        ("model=null", "model=null must be a JSON object"),
        ("model.num_layers=0", "model.num_layers=0 must be positive"),
        ("model.num_layers.x=1", "model.num_layers has no fields; legal: a new value"),
        ("model.norm=batchnorm", "model.norm 'batchnorm' is unknown.*layernorm, rmsnorm"),
        ("model.attention.positions=ropee", "did you mean 'rope'.*learned, alibi, rope, none"),
        ("model.store=vector", 'model.store needs dim, like model.store={"kind": "vector"'),
        ("model.store.dim=4", "field of model.store 'dim' is unknown.*key_dim"),
        ("train.optimizer.decay_exclude=gains", "'gains' is unknown; did you mean 'gain'"),
        ("train.mesh=model=2", "--mesh='model=2': axis 'model' is unknown"),
        ("model.norm_epsilon=1" + "0" * 400, r"norm_epsilon=10+\.\.\.0+ must be a number"),
        (
            "train.steps=1" + "0" * 400,
            r"train.steps=10+\.\.\.0+ must be positive, at most 2147483647",
        ),
        ("model.store=" + "[" * 5000, "model.store '.{1,120}' is unknown"),
        ("model.store=" + "[" * 500 + "]" * 500, r"model.store \[+\.\.\.\]+ is unknown"),
        ("model.num_layers=" + "[" * 500 + "]" * 500, r"model.num_layers=\[+\.\.\.\]+ must be"),
        ("model=" + "x" * 5000, "model='x+\\.\\.\\.x+' must be a JSON object"),
        ("train.optimizer.learning_rate=fast", "must be a number"),
        ("train.optimizer.independent_weight_decay=1", "must be true or false"),
    ],
)
def test_what_is_not_legal_is_named(assignment, message):
    with pytest.raises(RmtError, match=message) as error:
        apply(assignment)
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_learned_positions_must_reach_the_window():
    with pytest.raises(UsageError, match="--seq_len=512 is more than the model's 16 learned"):
        apply("model.attention.positions.max_length=16", base="rmt-46m")


def test_differences_name_every_leaf():
    old = overrides.to_json(run("rmt-tiny"))
    new = overrides.to_json(apply("model.store.key_dim=4", "train.steps=7"))
    assert overrides.differences(old, new) == [
        "model.store.key_dim is 16 there, 4 here",
        "train.steps is 400 there, 7 here",
    ]
    vector = overrides.to_json(apply("model.store=vector", "model.store.dim=4"))
    assert 'model.store.kind is "matrix" there, "vector" here' in overrides.differences(old, vector)


def test_fields_left_out_of_a_file_take_their_defaults():
    values = {"model": overrides.to_json(rmt_tpu.preset("rmt-46m"))}
    assert overrides.from_json(cfg.RunConfig, values).train == cfg.TrainConfig()
    with pytest.raises(UsageError, match="lacks required fields: model"):
        overrides.from_json(cfg.RunConfig, {})
