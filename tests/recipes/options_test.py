"""What every program answers, what its flags refuse, and that neither needs jax."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

import rmt_tpu
from recipes import common, program
from rmt_tpu import cost
from rmt_tpu.config import ModelConfig, RunConfig, overrides, presets
from rmt_tpu.config.presets import about
from rmt_tpu.data import ByteTokenizer
from rmt_tpu.errors import ArgumentError, UsageError, about_flag
from rmt_tpu.estimator.ops import OPS
from rmt_tpu.runs.workdir import read_config
from rmt_tpu.training.run import resolve_auto
from tests import cli
from tests.tiers import later

PROGRAMS = sorted(
    file.stem
    for file in (cli.ROOT / "recipes").glob("*.py")
    if 'if __name__ == "__main__"' in file.read_text(encoding="utf-8")
)

# As the process ends, whether it has loaded jax, and its CPU seconds.
RUN = """
import atexit, resource, runpy, sys
@atexit.register
def tell():
    used = resource.getrusage(resource.RUSAGE_SELF)
    print("jax" in sys.modules, used.ru_utime + used.ru_stime, file=sys.stderr)
recipe = sys.argv.pop(1)
runpy.run_module(f"recipes.{recipe}", run_name="__main__", alter_sys=True)
"""


def alone(recipe, *flags):
    """Exit code and outputs of a program in a process that has loaded nothing before it."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, recipe, *flags],
        cwd=cli.ROOT,
        env=cli.environment(),
        capture_output=True,
        encoding="utf-8",
        timeout=cli.TIMEOUT,
    )
    *lines, told = done.stderr.splitlines()
    loaded, seconds = told.split()
    assert loaded == "False", f"{recipe} {' '.join(flags)} loads jax"
    assert float(seconds) < 2, "half a second on an idle machine"
    return done.returncode, done.stdout, lines


@pytest.mark.parametrize("recipe", ["train", *later("storage_report", "depth_report")])
def test_help_needs_no_jax(recipe):
    code, out, errors = alone(recipe, "--help")
    assert code == 0 and not errors
    assert f"python -m recipes.{recipe}" in out and "  --version:" in out


@pytest.mark.parametrize(
    "recipe, flag",
    [
        ("train", "--set=model.num_layers=two"),
        ("compare", "--presets=rmt-tinny"),
        *later(("train", "--stepz=3"), ("train", "--mesh=model=2")),
    ],
)
def test_what_is_refused_needs_no_jax(recipe, flag, tmp_path):
    """Where no run has begun: one in the usual folder would be looked at."""
    code, out, errors = alone(recipe, flag, f"--workdir={tmp_path}/none")
    assert code == 2 and not out
    assert len(errors) == 1 and errors[0].startswith("error: ")


@pytest.mark.parametrize("recipe", PROGRAMS)
def test_h_is_help(recipe):
    done = cli.succeed(recipe, "-h")
    assert done.stdout.splitlines()[0].endswith(".")
    assert "  -h,--help:" in done.stdout


def test_version():
    out = cli.succeed("generate", "--version").stdout
    assert re.fullmatch(rf"rmt_tpu {rmt_tpu.__version__}, jax \d[\d.]+, Python 3\.\d+\.\d+\n", out)


def test_index_has_every_program():
    out = cli.succeed("__main__").stdout
    listed = re.findall(r"^python -m recipes\.(\w+)  +\S.+\.$", out, re.MULTILINE)
    assert listed == PROGRAMS


@pytest.mark.parametrize(
    "recipe", ["train", *later("compare", "preflight", "kernel_report", "decode_report")]
)
def test_list_presets(recipe):
    _, *lines = cli.succeed(recipe, "--list_presets").stdout.splitlines()
    assert [line.split()[0] for line in lines] == rmt_tpu.presets()
    tiny = lines[rmt_tpu.presets().index("rmt-tiny")]
    assert re.fullmatch(r"rmt-tiny +596,352 +512  Residual Matrix Transformer; .+", tiny)


def test_every_preset_has_a_phrase():
    phrases = [about(name) for name in rmt_tpu.presets()]
    assert all(phrases) and not any("None" in phrase for phrase in phrases)


def test_kernel_report_names_its_ops():
    assert f"one of {', '.join(OPS)}, or all" in " ".join(
        cli.succeed("kernel_report", "--help").stdout.split()
    )


def test_parameters_bring_their_vocabulary(tmp_path, monkeypatch):
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    values = dict.fromkeys(sizes, 8) | {"head_dim": 4, "hidden_act": "silu", "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(values | {"model_type": "llama"}))
    (tmp_path / "tokenizer.json").write_text(ByteTokenizer().to_json())
    for preset in "llama-tiny", None:
        given = {"preset": preset, "config": None, "init_from": str(tmp_path)}
        monkeypatch.setattr(common.flags, "FLAGS", SimpleNamespace(**given))
        _, base = common.selected_config()
        assert base.model.vocab_size == 300 and base.data.tokenizer == str(tmp_path)
    # A folder of this name is no byte tokenizer.
    (tmp_path / "byte").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    given = {"preset": None, "config": None, "init_from": "byte"}
    monkeypatch.setattr(common.flags, "FLAGS", SimpleNamespace(**given))
    assert common.selected_config()[1].data.tokenizer == "./byte"


def test_dry_run(tmp_path):
    workdir = tmp_path / "run"
    flags = (*cli.TINY, "--learning_rate=0.5", "--mesh=fsdp=2", f"--workdir={workdir}", "--dry_run")
    flags += ("--batch_size=1000000000",)
    out = cli.succeed("train", *flags, devices=2).stdout
    assert not workdir.exists()
    text, told = out.split("\n}\n\n")
    config = json.loads(text + "}")
    assert config["train"]["optimizer"]["learning_rate"] == 0.5
    assert config["model"]["compute_dtype"] == "float32"
    lines = dict(re.split("  +", line, maxsplit=1) for line in told.splitlines())
    assert lines["compiled for"] == "cpu" and lines["schedule"].startswith("reversible: ")
    model = overrides.from_json(ModelConfig, config["model"])
    parameters = sum(cost.parameters(model).values())
    assert lines["parameters"].startswith(f"{parameters:,} (embedding ")
    assert lines["tokens"].startswith(
        f"{cli.STEPS * 10**9 * 16:,} in 48 steps of 1000000000 x 16; "
    )
    gradients = 1e3 * float(re.search(r"([\d.]+) kB for gradients", lines["memory"])[1])
    assert 4 * parameters / 2 <= gradients < 4 * parameters, "of two devices, but for small ones"
    assert "--batch_size=1000000000 of --seq_len=16 with " in lines["too large"]


DRY = {
    "tasks": (["--eval_tasks=arc_easy"], "--eval_tasks and --eval_data_dir must be given together"),
    "no such task": (
        ["--eval_tasks=nope", "--eval_data_dir=x"],
        "eval_tasks 'nope' is unknown",
    ),
    "member": (
        ["--coordinator=127.0.0.1:1", "--num_processes=2", "--process_id=5"],
        "--process_id=5 is out of range",
    ),
    "half a member": (["--num_processes=2"], "missing: --coordinator, --process_id"),
    "workdir": (["--workdir={text}/run"], "text.txt/run cannot be"),
}


@pytest.mark.parametrize("flags, message", DRY.values(), ids=DRY)
def test_a_dry_run_refuses_what_train_would(flags, message, tmp_path):
    flags = [flag.format(text=cli.TEXT) for flag in flags]
    workdir = tmp_path / "run"
    error = cli.fail("train", *cli.TINY, f"--workdir={workdir}", "--dry_run", *flags)
    assert message in error
    assert not workdir.exists()


REFUSED = {
    "repeated entry": (
        "speedrun",
        ["--presets=gpt2-tiny,gpt2-tiny"],
        "--presets=gpt2-tiny,gpt2-tiny repeats a name; legal: different names",
    ),
    "no store": (
        "speedrun",
        ["--track=tpu", "--data=stdlib"],
        "--data=stdlib is no token store; legal with --track=tpu: one of",
    ),
    "lr": ("train", ["--lr=1"], "flag '--lr' is unknown; did you mean '--learning_rate'?"),
    "learning rate": ("train", ["--learning_rate=nan"], "--learning_rate=nan must be a finite"),
    "set": (
        "train",
        ["--set=model.num_layers=two"],
        "--set=model.num_layers='two' must be a whole",
    ),
    "seed": ("train", ["--seed=1" + "0" * 29], "--seed=1" + "0" * 29 + " must be at least 0"),
    "digits": (
        "train",
        ["--seed=1" + "0" * 5000],
        "must be a smaller whole number",
    ),
    "seeds": ("compare", ["--seeds=0,-1"], "--seeds=-1 must be at least 0, at most 4294967295"),
    "steps": ("train", ["--steps=99999999999999999999"], "--steps=99999999999999999999 must be"),
    "nesting": ("train", ["--set=model.store=" + "[" * 3000], "--set=model.store '[[["),
    "exponent": ("train", ["--seed=1e9"], "--seed=1e9 must be a whole number in digits, like"),
    "boolean": ("train", ["--dry_run=maybe"], "error: flag --dry_run=maybe must be true or false"),
    "null": ("train", ["--set=model.num_layers=null"], "--set=model.num_layers=null must be a wh"),
    "no text": ("train", ["--set=data.tokenizer=true"], "data.tokenizer=true must be a string"),
    "flag and set": (
        "train",
        ["--steps=4", "--set=train.steps=5"],
        "--steps and --set=train.steps both set train.steps; give one",
    ),
    "flag and a set whole": (
        "compare",
        ["--learning_rate=0.1", '--set=train.optimizer={"b1": 0.8}'],
        "--learning_rate and --set=train.optimizer both set train.optimizer.learning_rate; give",
    ),
    "empty preset": ("train", ["--preset="], "--preset= is empty"),
    "empty config": ("train", ["--config="], "--config= is empty"),
    "empty workdir": ("train", ["--workdir="], "--workdir= is empty"),
    "generate's": ("generate", ["--workdir="], "--workdir= is empty"),
    "empty origin": (
        "train",
        ["--init_from="],
        "--init_from= is empty; leave it out, or give: a run folder",
    ),
    "empty tasks": ("evaluate", ["--workdir=x", "--tasks="], "--tasks= is empty; leave it out"),
    "empty stop": ("generate", ["--workdir=x", "--stop="], "--stop= is empty"),
    "a line break as a stop": ("generate", ["--workdir=x", "--stop=\n\n"], "holds no run"),
    "empty part": ("evaluate", ["--workdir=x", "--tasks=a,"], "--tasks=a, has an empty item"),
    "a flag as a value": (
        "train",
        ["--workdir", "--dry_run"],
        "--workdir has no value before '--dry_run'; legal: --workdir=VALUE",
    ),
    "a flag as a value after a name": (
        "experiment",
        ["rmt-scaling", "--workdir", "--jobs=2"],
        "--workdir has no value before '--jobs=2'; legal: --workdir=VALUE",
    ),
    "nothing after two dashes": (
        "experiment",
        ["--", "rmt-scaling", "--workdir", "--jobs=2"],
        "argument '--workdir' is not a flag",
    ),
    "export to a bucket": (  # The output is checked before the run is opened.
        "export",
        ["--workdir=none", "--output=gs://bucket/hub"],
        "error: --output=gs://bucket/hub is not a local folder; legal: a new or empty local fold",
    ),
    "temperature": ("generate", ["--workdir=x", "--temperature=nan"], "--temperature=nan must be"),
    "generate's seed": ("generate", ["--workdir=x", "--seed=-1"], "--seed=-1 must be at least 0"),
    "chunks of no pipeline": (
        "train",
        ["--mesh=data=1", "--set=train.virtual_stages=2"],
        "--set=train.virtual_stages=2 has no effect on this run; legal: a pipeline, like",
    ),
    "a decay of a cosine": (
        "compare",
        ["--set=train.optimizer.decay_fraction=0.1"],
        "--set=train.optimizer.decay_fraction=0.1 has no effect on this run; legal: --set=train.op",
    ),
    "float64": (
        "train",
        ["--set=model.compute_dtype=float64"],
        "model.compute_dtype='float64' needs JAX_ENABLE_X64=1",
    ),
}


@pytest.mark.parametrize("recipe, flags, message", REFUSED.values(), ids=REFUSED)
def test_one_line(recipe, flags, message, tmp_path):
    if recipe == "train" and not flags[0].startswith("--workdir"):
        flags = [f"--data={cli.TEXT}", f"--workdir={tmp_path / 'new'}", *flags]
    error = cli.fail(recipe, *flags)
    assert message in error
    assert len(error) < 600
    assert not (tmp_path / "new").exists()


def test_a_config_nested_too_deeply(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"model": ' + "[" * 100_000, encoding="utf-8")
    error = cli.fail("train", f"--config={file}", f"--workdir={tmp_path}")
    assert error.endswith("is not JSON: it is nested too deeply")
    assert "nested too deeply" in cli.fail("generate", f"--workdir={tmp_path}")


def test_what_a_flag_is_about_is_told(tmp_path):
    """Errors from below know no flags."""
    with pytest.raises(UsageError, match="^--prompt: the text has an unpaired"):
        with about_flag("prompt", "the text has"):
            ByteTokenizer().encode("\udcff")
    with pytest.raises(UsageError, match="^another"), about_flag("prompt", "the text has"):
        raise UsageError("another")


def test_the_line_of_a_platform_that_is_not_there(monkeypatch):
    def none():
        raise RuntimeError("Unable to initialize backend")

    monkeypatch.setattr(jax, "devices", none)
    usual = jax.config.jax_platforms
    try:
        line = program._no_platform()
    finally:
        jax.config.update("jax_platforms", usual)
    assert line.startswith(f"JAX_PLATFORMS={usual} is a platform without a device")
    assert "legal: cpu, or unset" in line


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cuda", "banana"])
def test_a_platform_that_is_not_there(platform, tmp_path):
    env = {"JAX_PLATFORMS": platform}
    error = cli.fail("train", *cli.TINY, f"--workdir={tmp_path}", env=env)
    assert error.startswith(f"error: JAX_PLATFORMS={platform} is a platform without a device")
    assert "legal: cpu, or unset" in error


def test_what_a_run_began_with_is_not_opened_once_it_has_begun(monkeypatch):
    """Its own config has the vocabulary and the tokenizer that it took from there."""
    own = overrides.apply(
        presets.run("gpt2-tiny"),
        {"model.vocab_size": 300, "data.tokenizer": "t", "train.init_from": "gone"},
    )
    given = {"preset": None, "config": None, "init_from": "gone/"}
    monkeypatch.setattr(common.flags, "FLAGS", SimpleNamespace(**given))
    assert common.selected_config(lambda name: own) == ("gone", own)
    with pytest.raises(UsageError, match="--init_from=gone.* holds no run"):
        common.selected_config(lambda name: None)
    given["init_from"] = None
    monkeypatch.setattr(common.flags, "FLAGS", SimpleNamespace(**given))
    assert common.selected_config(lambda name: own) == ("gone", own)
    for init_from in "gone/", None:
        given |= {"preset": "rmt-tiny", "init_from": init_from}
        monkeypatch.setattr(common.flags, "FLAGS", SimpleNamespace(**given))
        name, base = common.selected_config(lambda name: own)
        assert (name, base.model.vocab_size, base.data.tokenizer) == ("rmt-tiny", 300, "t")
        assert base.train.init_from == "gone" and base.model.store.kind == "matrix"


def test_what_a_source_chose_for_its_devices_is_chosen_anew(tmp_path, monkeypatch):
    bfloat16 = overrides.apply(presets.run("rmt-tiny"), {"model.compute_dtype": "bfloat16"})
    stored = overrides.to_json(resolve_auto(bfloat16))
    (tmp_path / "config.json").write_text(json.dumps(stored))
    given = {"preset": None, "config": None, "init_from": str(tmp_path)}
    monkeypatch.setattr(common.flags, "FLAGS", SimpleNamespace(**given))
    model = common.selected_config()[1].model
    assert model == presets.run("rmt-tiny").model and model.store.dtype == "auto"
    # A run that began with it may still outgrow int16, but keeps any other dtype.
    own = overrides.from_json(RunConfig, stored)
    assert own.model.store.dtype == "int16"
    for kept, dtype in (("int16", "auto"), ("float32", "float32")):
        begun = overrides.apply(own, {"model.store.dtype": kept, "train.init_from": "other"})
        found = common.selected_config(lambda name, begun=begun: begun)[1]
        assert found == overrides.apply(begun, {"model.store.dtype": dtype})


@pytest.mark.parametrize(
    "preset, parts, kept", [("rmt-tiny", 1, None), ("rmt-tiny", 16, None), ("gpt2-tiny", 4, 4)]
)
def test_parts_that_a_source_chose_are_chosen_anew(tmp_path, monkeypatch, preset, parts, kept):
    """Only an RMT chooses them; those of another model were set, maybe for want of memory."""
    stored = resolve_auto(presets.run(preset))
    stored = overrides.apply(stored, {"train.accumulate": parts})
    (tmp_path / "config.json").write_text(json.dumps(overrides.to_json(stored)))
    given = {"preset": None, "config": None, "init_from": str(tmp_path)}
    monkeypatch.setattr(common.flags, "FLAGS", SimpleNamespace(**given))
    assert common.selected_config()[1].train.accumulate == kept


def test_a_dry_run_looks_at_the_origin(tmp_path):
    workdir = tmp_path / "run"
    flags = ("--preset=rmt-tiny", *cli.TINY)
    text = cli.succeed("train", *flags, f"--workdir={workdir}", "--dry_run").stdout
    workdir.mkdir()
    (workdir / "config.json").write_text(text.partition("\n}\n\n")[0] + "\n}\n", encoding="utf-8")
    before = sorted(workdir.rglob("*"))
    error = cli.fail(
        "train", *flags, "--set=model.vocab_size=300", f"--init_from={workdir}",
        f"--workdir={tmp_path / 'other'}", "--dry_run",
    )  # fmt: skip
    assert "has parameters with different shapes" in error
    assert sorted(workdir.rglob("*")) == before and not (tmp_path / "other").exists()
    shapes = ("--set=model.vocab_size=300", f"--init_from={workdir}", "--topology=v5e:2x2")
    error = cli.fail("preflight", *flags, *shapes)
    assert "has parameters with different shapes" in error


def test_a_run_does_not_begin_in_the_folder_of_its_origin(tmp_path):
    """The run there would go on. Without --workdir, the default folder may be the same."""
    origin = tmp_path / "runs/a"
    origin.mkdir(parents=True)
    config = overrides.to_json(presets.run("gpt2-tiny"))
    (origin / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "link").symlink_to(origin)
    error = cli.fail("train", f"--init_from={tmp_path}/link", f"--workdir={origin}/")
    assert f"--workdir={origin}/ is the folder of --init_from={tmp_path}/link, whose" in error
    process = cli.start(
        "train", "--init_from=runs/a", first=f"import os; os.chdir({str(tmp_path)!r})"
    )
    error = process.communicate()[1]
    assert process.returncode == 2
    assert "runs/a, the default of --workdir, is the folder of --init_from=runs/a" in error
    assert [path.name for path in origin.iterdir()] == ["config.json"]


def test_a_hub_folder_as_a_run_folder(tmp_path):
    """Nothing is written into it, and it does not say how training began."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    flags = [f"--workdir={tmp_path}", f"--text={cli.TEXT}"]
    assert "--workdir in Hugging Face format needs --output" in cli.fail("evaluate", *flags)
    flags += [f"--output={tmp_path}/out", "--against=untrained"]
    assert "--against=untrained needs a --workdir that is a run folder" in cli.fail(
        "evaluate", *flags
    )
    with pytest.raises(ArgumentError, match="is in Hugging Face format"):
        read_config(tmp_path)


def test_the_folder_of_another_run_is_refused_before_anything_is_said(tmp_path):
    """Of a run, and by a dry run too."""
    flags = ("--preset=rmt-tiny", *cli.TINY, f"--workdir={tmp_path}")
    text = cli.succeed("train", *flags, "--dry_run").stdout
    (tmp_path / "config.json").write_text(text.partition("\n}\n\n")[0] + "\n}\n", encoding="utf-8")
    (tmp_path / "checkpoints/2").mkdir(parents=True)
    (tmp_path / "checkpoints/2/COMMIT").write_text("}")
    before = sorted(tmp_path.rglob("*"))
    reasons = {
        "--seed=3": "holds a run with a different config: train.seed is 0 there, 3 here",
        "--from_step=3": f"--from_step=3 is not a checkpoint of --workdir={tmp_path}; legal: 2",
    }
    for flag, reason in reasons.items():
        for more in ["--dry_run"], []:
            done = cli.run("train", *flags, flag, *more)
            assert done.returncode == 2 and reason in done.stderr
            assert done.stderr.startswith("error: ") and done.stdout == ""
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("recipe", ["compare", "sweep"])
def test_runs_that_have_begun_need_what_they_began_with_no_more(recipe, tmp_path):
    """One of several is gone on with, so that its checkpoint is what is told of."""
    flags = ("--preset=rmt-tiny", *cli.TINY, f"--workdir={tmp_path}", "--dry_run")
    text = cli.succeed("train", *flags).stdout.partition("\n}\n\n")[0] + "\n}\n"
    of = {"compare": "rmt-tiny", "sweep": "model/seed=0"}
    run = tmp_path / recipe / of[recipe]
    (run / "checkpoints/2").mkdir(parents=True)
    (run / "checkpoints/2/COMMIT").write_text("}")
    began = text.replace('"init_from": ""', '"init_from": "gone"')
    assert began != text
    (run / "config.json").write_text(began, encoding="utf-8")
    models = {
        "compare": ["--presets=rmt-tiny"],
        "sweep": ["--preset=rmt-tiny", "--sweep=train.seed=0"],
    }
    given = *models[recipe], *cli.TINY, "--init_from=gone", f"--workdir={run.parents[0]}"
    if recipe == "sweep":
        given = *given[:-1], f"--workdir={run.parents[1]}"
    assert "no undamaged checkpoint in" in cli.fail(recipe, *given, code=1)
    error = cli.fail(recipe, *given, "--set=train.optimizer.clip_norm=2")
    assert (
        "train.optimizer.clip_norm is 1.0 there, 2.0 here" in error
        and "--change_config" not in error
    )
