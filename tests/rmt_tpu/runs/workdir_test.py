"""Which run a folder holds, and which config it goes on with."""

import json
import shutil

import pytest

from rmt_tpu.config import RunConfig, overrides, resume_rule
from rmt_tpu.config.presets import run as preset_run
from rmt_tpu.data import ByteTokenizer
from rmt_tpu.data.token_store import seal
from rmt_tpu.errors import UsageError
from rmt_tpu.runs import workdir
from rmt_tpu.storage import open_folder
from rmt_tpu.training.run import resolve_auto

CONFIG = preset_run("rmt-tiny")


def changed(**values) -> RunConfig:
    return overrides.apply(CONFIG, {name.replace("__", "."): v for name, v in values.items()})


@pytest.fixture
def folder(tmp_path):
    workdir.open_workdir(tmp_path, CONFIG)
    return open_folder(tmp_path)


def commit(folder, step=4):
    folder.write(f"checkpoints/{step}/COMMIT", b"{}")


def test_without_a_checkpoint_any_config_is_taken_and_said(folder):
    config = changed(train__seed=1, model__num_layers=7)
    opened = workdir.open_workdir(folder, config)
    assert opened.restarts
    assert [line.split(" ")[0] for line in opened.lines] == ["model.num_layers", "train.seed"]
    # The folder keeps its config until the new one's state is known to fit.
    assert workdir.read_config(folder) == CONFIG


def test_what_another_process_may_train_does_not_become_another_run(folder):
    assert workdir.open_workdir(folder, CONFIG, other="process 7 on h") == ([], False)
    with pytest.raises(UsageError, match="by process 7 on h, .*: train.seed is 0 there, 1 here"):
        workdir.open_workdir(folder, changed(train__seed=1), other="process 7 on h")


def test_with_a_checkpoint_it_must_be_the_same(folder):
    commit(folder)
    with pytest.raises(UsageError, match="train.seed is 0 there, 1 here"):
        workdir.open_workdir(folder, changed(train__seed=1), change_config=True)
    bigger = changed(train__batch_size=128)
    with pytest.raises(UsageError, match="--change_config to continue with these"):
        workdir.open_workdir(folder, bigger, change_config=False)
    opened = workdir.open_workdir(folder, bigger, change_config=True)
    assert opened.lines == ["train.batch_size is 16 there, 128 here"] and not opened.restarts


def test_paths_of_data_and_tokenizer_are_free(folder):
    """The tokens' checksum and the tokenizer's fingerprint are what counts."""
    commit(folder)
    moved = changed(data__source="/elsewhere/books/", data__tokenizer="/elsewhere/tokenizer.json")
    assert workdir.open_workdir(folder, moved) == ([], False)


def test_a_config_beside_the_checkpoints_of_another_run_is_seen(folder):
    meta = json.loads(json.dumps(workdir.config_meta(CONFIG, ByteTokenizer())))
    check = lambda config, meta=meta, **k: workdir.check_config_meta(folder, config, 4, meta, **k)
    check(CONFIG)
    check(changed(model__store__key_dim=64, train__mesh="data=2", train__optimizer__b1=0.5))
    other = changed(train__seed=1)
    check(other, within="model.")
    with pytest.raises(
        UsageError,
        match=f"^{folder}: config.json does not match the run that saved checkpoint "
        "4: train.seed is 0 there, 1 here",
    ):
        check(other)
    with pytest.raises(UsageError, match="model.num_layers is 4 there, 7 here"):
        check(changed(model__num_layers=7), within="model.")
    with pytest.raises(UsageError, match="the config in checkpoint 4 is not legal: "):
        check(CONFIG, {"config": {"model": 3}})


@pytest.mark.parametrize("rate", [None, 0.3])
def test_a_run_over_depth_goes_on_at_its_own_rate(tmp_path, rate):
    """None is the rate by the rule."""
    config = preset_run("attnres-tiny")
    folder = open_folder(tmp_path)
    workdir.write_config(folder, overrides.apply(config, {"train.depth_rate": rate}))
    commit(folder)
    found = resolve_auto(config, workdir.resume_overrides(folder))
    assert found.train.depth_rate == rate == workdir.read_config(folder).train.depth_rate
    other = overrides.apply(config, {"train.depth_rate": 0.5})
    assert resolve_auto(other, workdir.resume_overrides(folder)).train.depth_rate == 0.5
    with pytest.raises(UsageError, match="train.depth_rate is .* there, 0.5 here"):
        workdir.open_workdir(folder, other)


def test_what_a_run_began_with_is_needed_until_it_has_a_checkpoint(folder, tmp_path_factory):
    began = changed(train__init_from="origin", model__vocab_size=300)
    workdir.write_config(folder, began)
    assert workdir.warm_started_config(folder) is None and not workdir.resume_overrides(folder)
    assert workdir.open_workdir(folder, changed(model__vocab_size=300)).restarts
    commit(folder)
    for other in "", "origin/", "moved":
        given = overrides.apply(began, {"train.init_from": other})
        assert workdir.open_workdir(folder, given) == ([], False)
        assert resolve_auto(given, workdir.resume_overrides(folder)).train.init_from == "origin"
    assert workdir.warm_started_config(folder) == began
    # The folder of the tokenizer may have been deleted, too; a copy of it is in the run folder.
    workdir.write_config(folder, overrides.apply(began, {"data.tokenizer": "origin"}))
    found = workdir.warm_started_config(folder)
    assert found == overrides.apply(began, {"data.tokenizer": str(folder)})
    own = resolve_auto(CONFIG)
    workdir.write_config(folder, own)
    late = resolve_auto(changed(train__init_from="origin"), workdir.resume_overrides(folder))
    assert not workdir.holds_run(folder, late)
    with pytest.raises(UsageError, match="train.init_from is .. there, .origin. here. Give"):
        workdir.check_workdir(folder, late, change_config=True)
    assert workdir.holds_run(folder, resolve_auto(own, workdir.resume_overrides(folder)))
    workdir.write_config(folder, began)
    several = tmp_path_factory.mktemp("several")
    shutil.copytree(folder.local_path, several / "a" / "seed-0")
    assert workdir.find_warm_started_config(open_folder(several)) == began
    assert workdir.find_warm_started_config(open_folder(several), depth=1) is None


def test_whose_folder_it_is_does_not_hang_on_paths(folder):
    began = changed(train__init_from="origin")
    workdir.write_config(folder, began)
    moved = changed(train__init_from="moved", data__source="text.txt")
    assert workdir.holds_run(folder, began) and not workdir.holds_run(folder, moved)
    commit(folder)
    assert workdir.holds_run(folder, moved) and not workdir.holds_run(
        folder, changed(train__steps=7)
    )
    older = json.loads(folder.read("config.json").data)
    del older["train"]["with_optimizer"]
    folder.write("config.json", json.dumps(older).encode())
    assert workdir.holds_run(folder, began)
    folder.write("config.json", b"}")
    assert not workdir.holds_run(folder, began)


@pytest.mark.parametrize(
    ("branch", "from_step", "changes", "found"),
    [
        (None, 2, False, 2),
        (None, 4, False, 4),  # the last one, and no older one in its place
        (2, 2, False, None),  # the same command again
        (2, 2, True, 2),
        (1, 2, False, 2),
        (1, 1, False, None),  # the step itself is not kept any more
        (None, None, True, None),
    ],
)
def test_which_checkpoint_a_run_goes_back_to(folder, branch, from_step, changes, found):
    checkpoints = workdir.open_checkpoints(folder)
    for step in (2, 4):
        checkpoints.save(step, {}, {} if branch is None else {"branch": branch})
    assert workdir.step_to_go_back_to(folder, from_step, changes=changes) == found


def test_a_step_to_go_back_to_is_there(folder):
    none = r"^--from_step=3 is not a checkpoint of --workdir=.*; it has none$"
    with pytest.raises(UsageError, match=none):
        workdir.check_workdir(folder, CONFIG, from_step=3)
    commit(folder, 2)
    commit(folder, 4)
    with pytest.raises(UsageError, match=r"^--from_step=3 is not a checkpoint .*; legal: 2, 4$"):
        workdir.check_workdir(folder, CONFIG, from_step=3)


@pytest.mark.parametrize("name", ["checkpoints", "config.json", "tokenizer.json"])
def test_what_is_of_the_wrong_kind_is_told_before_a_run(tmp_path, name):
    (tmp_path / name).write_text("") if name == "checkpoints" else (tmp_path / name).mkdir()
    kind = "is not a folder" if name == "checkpoints" else "is a folder, not a file"
    for look in (workdir.check_access, lambda f: workdir.check_workdir(f, CONFIG)):
        with pytest.raises(UsageError, match=f"^--workdir=.*: {name} {kind}; move it aw"):
            look(open_folder(tmp_path))
    with pytest.raises(UsageError, match=f"^workdir=.*: {name} {kind}"):
        workdir.read_config(tmp_path)


def refusals(folder) -> set[str]:
    """Return what the opening and the check of a run folder say; neither changes the folder."""
    files = lambda: {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    said, before = set(), files()
    for look in (workdir.open_workdir, workdir.check_workdir):
        with pytest.raises(UsageError) as error:
            look(folder, CONFIG)
        said.add(str(error.value))
    assert files() == before
    return said


@pytest.mark.parametrize("name", ["plan.json", "manifest.json"])
def test_no_run_begins_in_a_token_store(tmp_path, name):
    """It would replace the tokenizer of the store."""
    (tmp_path / name).write_text('{"files": []}')
    workdir.check_workdir(tmp_path, CONFIG)  # the file is of another program
    (tmp_path / name).write_bytes(seal({}))
    assert refusals(tmp_path) == {
        f"--workdir={tmp_path} holds a token store; legal: --data={tmp_path} with another --workdir"
    }


def test_no_run_begins_in_the_folder_of_a_hub_model(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": []}')
    assert refusals(tmp_path) == {
        f"--workdir={tmp_path} holds a model in the hub's format; legal: --init_from={tmp_path} "
        "with another --workdir"
    }


def test_another_tokenizer_is_refused(folder):
    class Other(ByteTokenizer):
        def fingerprint(self):
            return "other"

    workdir.check_tokenizer(folder, Other(), "other.json")  # none is saved yet
    ByteTokenizer().save(folder)
    workdir.check_tokenizer(folder, ByteTokenizer(), "byte")
    with pytest.raises(UsageError, match=f"--tokenizer=other.json differs from .*{folder}"):
        workdir.check_tokenizer(folder, Other(), "other.json")
    folder.write("tokenizer.json", b"damaged")
    workdir.check_tokenizer(folder, Other(), "other.json")


@pytest.mark.parametrize(
    "path, rule",
    [
        ("train.mesh", "free"),
        ("data.source", "free"),
        ("train.sample_every", "free"),
        ("train.optimizer.b1", "change"),
        ("model.store.key_dim", "change"),
        ("model.compute_dtype", "change"),
        ("model.store.kind", "fixed"),
        ("model.store.dim", "fixed"),
        ("model.num_layers", "fixed"),
        ("train.seed", "fixed"),
        ("data.seq_len", "fixed"),
    ],
)
def test_each_field_says_what_it_means_for_a_resumed_run(path, rule):
    assert resume_rule(CONFIG, path) == rule


def test_a_config_without_fields_that_came_later(folder):
    commit(folder)
    values = json.loads(folder.read("config.json").data)
    del values["train"]["sample_every"], values["train"]["tensorboard"]
    folder.write("config.json", json.dumps(values).encode())
    assert workdir.open_workdir(folder, CONFIG) == ([], False)


@pytest.mark.parametrize(
    "name, value", [("sample_tokens", -5), ("sample_tokens", 4 * 10**9), ("sample_every", -1)]
)
def test_what_a_sample_is_made_of_is_checked_at_the_start(name, value):
    with pytest.raises(UsageError, match=f"train.{name}={value}"):
        overrides.apply(CONFIG, {f"train.{name}": value})
    assert overrides.apply(CONFIG, {"train.sample_tokens": 0}).train.sample_tokens == 0
