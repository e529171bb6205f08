"""A pod without the pod: memory, collectives and time of a whole train step, and what to change."""

import dataclasses
import json
import re

import jax
import pytest

import sharding
from rmt_tpu import cost as resources
from rmt_tpu.analysis import preflight as module
from rmt_tpu.analysis.preflight import GROUPS, KINDS, Preflight, StepTime, preflight, readable
from rmt_tpu.analysis.preflight_advice import advice
from rmt_tpu.analysis.preflight_report import draw_memory, report_text
from rmt_tpu.analysis.prompt import Prompt
from rmt_tpu.config import overrides
from rmt_tpu.config.presets import run
from rmt_tpu.errors import RunError, UsageError
from rmt_tpu.estimator import (
    BEST_GUESS,
    MODELS,
    Assignment,
    Buffer,
    Failure,
    Job,
    Program,
    compile_jobs,
    parse_topology,
)
from rmt_tpu.estimator.calibration import error_bar
from rmt_tpu.estimator.hlo import Module
from rmt_tpu.training import memory_check
from rmt_tpu.training.run import prepare

GIB = 2**30
SMALL = {
    "model.num_layers": 2,
    "model.vocab_size": 512,
    "train.batch_size": 8,
    "train.mesh": "data=-1",
}


def config(preset="rmt-tiny", **changes):
    return overrides.apply(run(preset), SMALL | changes)


def outcome(monkeypatch, given):
    """What compiling is to give."""
    monkeypatch.setattr(module, "compile_jobs", lambda *args, **options: (x for x in [given]))


@pytest.fixture(scope="module")
def compiled():
    return preflight(config(), parse_topology("v5e:2x2"))


@pytest.mark.compile
@pytest.mark.xdist_group("preflight")
def test_memory_of_a_step(compiled):
    four = jax.devices()[:4]
    assert compiled.fits and compiled.devices == 4 and compiled.mesh["data"] == 4
    assert list(compiled.memory) == list(KINDS) and compiled.used == sum(compiled.memory.values())
    # All of them on every device: with two moments each, and rounded up to tiles.
    size = 4 * sum(resources.parameters(compiled.config.model).values())
    assert size <= compiled.memory["parameters"] < 1.1 * size
    # And copies in half the bits of what is no embedding.
    copies = sum(b.bytes for b in compiled.buffers if b.name.startswith("copies."))
    assert 0.6 * size / 2 < copies < size / 2
    moments = compiled.memory["optimizer"] - 2 * compiled.memory["parameters"] - copies
    assert 0 <= moments < 4096
    # Inputs, targets, segments and weights of two rows; scalars beside them.
    assert 4 * 4 * 2 * 128 <= compiled.memory["batch"] < 4 * 4 * 2 * 128 + 8192
    for kind in ("parameters", "optimizer", "batch"):
        assert sum(b.bytes for b in compiled.buffers if b.kind == kind) == compiled.memory[kind]
    sizes = [buffer.bytes for buffer in compiled.buffers]
    assert sizes == sorted(sizes, reverse=True)
    least = memory_check.lower_bound(
        compiled.config, prepare(compiled.config, sharding.make_mesh("data=4", four))
    )
    assert least.state <= compiled.memory["parameters"] + compiled.memory["optimizer"]
    assert least.device <= compiled.used
    largest = {b.name for b in compiled.buffers if b.kind == "parameters"}
    assert {"params.stacks[0][1].core.w_1", "params.unembedding.kernel"} <= largest


@pytest.mark.compile
@pytest.mark.xdist_group("preflight")
def test_gradients_are_added_up_over_the_batch(compiled):
    size = 4 * sum(resources.parameters(compiled.config.model).values())
    reduced = sum(t.bytes for t in compiled.traffic if t.kind == "all-reduce")
    # Every gradient once around a ring of four, and the sums of the loss.
    assert 2 * size * 3 // 4 <= reduced < 1.02 * 2 * size * 3 / 4
    assert {t.axes for t in compiled.traffic} == {"data"}


@pytest.mark.compile
@pytest.mark.xdist_group("preflight")
def test_gradients_go_once_between_slices():
    """Of the four devices of a slice each sends a quarter of what they have added up."""
    # Of a vocabulary beside which small gradients, which are rounded up to tiles, are few.
    report = preflight(config(**{"model.vocab_size": 2048}), parse_topology("v5e:2x2", 2))
    (sent,) = (t for t in report.traffic if t.between_slices)
    assert (sent.kind, sent.axes) == ("all-reduce", "data")
    quarter = sum(resources.parameters(report.config.model).values())
    # Twice half of it.
    assert quarter <= sent.bytes < 1.05 * quarter
    within = sum(t.bytes for t in report.traffic if not t.between_slices)
    assert report.time.collectives == pytest.approx(within / 200e9 + sent.bytes / 3.125e9)
    assert "data, between slices" in report_text(report, "rmt-tiny")
    assert report.json()["num_slices"] == 2


@pytest.mark.compile
@pytest.mark.xdist_group("preflight")
def test_time_of_a_step(compiled):
    time = compiled.time
    assert set(time.parts) == set(GROUPS) and all(time.parts[p] > 0 for p in ("cores", "residual"))
    sent = sum(t.bytes for t in compiled.traffic)
    assert time.collectives == pytest.approx(sent / 200e9)
    # A ring of 2x2 chips has two of a chip's four links.
    assert time.slow_collectives == pytest.approx(2 * time.collectives)
    assert time.total == pytest.approx(sum(time.parts.values()) + time.collectives)
    assert time.compute <= time.least <= time.total and time.unknown_loops == 0
    assert time.by_model.keys() == MODELS.keys()
    assert time.by_model[BEST_GUESS] == pytest.approx(time.compute)
    forward = resources.causal_flops_per_token(compiled.config.model, 128)
    assert time.mfu == pytest.approx(3 * forward * 8 * 128 / (4 * 196.6e12 * time.total), rel=1e-3)


@pytest.mark.compile
@pytest.mark.xdist_group("preflight")
def test_json_and_text_say_the_same(compiled, tmp_path):
    values = json.loads(json.dumps(compiled.json()))
    assert values["memory_bytes"] == compiled.memory and values["hbm_bytes"] == 15.75 * GIB
    assert values["estimated_seconds"]["total"] == compiled.time.total
    assert overrides.from_json(type(compiled.config), values["config"]) == compiled.config
    assert values["config"]["model"]["compute_dtype"] == "bfloat16"
    text = report_text(compiled, "rmt-tiny", 3)
    assert text.startswith("rmt-tiny on v5e:2x2: FITS, ") and " MiB of 15.75 GiB" in text
    assert "ESTIMATE" in text and "ASSUMED: 200 GB/s" in text and "what to change" not in text
    assert " tokens/s; MFU " in text and "the 3 largest buffers" in text
    assert f"{compiled.buffers[2].bytes / 2**20:.1f}" in text
    draw_memory(compiled, tmp_path / "memory.png", "rmt-tiny")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.compile
def test_a_gpu(monkeypatch):
    """Its compiler does not refuse what does not fit, and nobody here knows its time."""
    changes = {"train.mesh": "fsdp=2", "model.compute_dtype": "bfloat16"}
    target, fsdp = parse_topology("h100:2"), config(**changes)
    job = Job(f"{module.__name__}:lower_run", {"config": overrides.to_json(fsdp)}, True)
    (program,) = compile_jobs(target, [job], buffers=True)
    outcome(monkeypatch, program)
    report = preflight(fsdp, target)
    assert report.fits and report.time is None and report.limit == 80e9
    size = 4 * sum(resources.parameters(report.config.model).values())
    assert 0.5 * size <= report.memory["parameters"] < 0.6 * size
    assert report.memory["activations"] > 0
    run = (ran.instruction.attributes for ran in program.module.run())
    calls = re.findall(r"__cudnn\$fmhaSoftmax\w*", " ".join(run))
    assert set(calls) == {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
    assert report.launches == program.module.launches() > 100
    sent = {(t.kind, t.axes) for t in report.traffic}
    assert {("all-gather", "fsdp"), ("reduce-scatter", "fsdp")} <= sent
    text = report_text(report, "rmt-tiny")
    assert "of 74.51 GiB in total (JAX takes 75 %" in text and "ESTIMATE" not in text
    assert f"kernels and copies launched: {report.launches:,} per step" in text
    for hbm, fits in ((report.used, True), (report.used - 1, False)):
        smaller = dataclasses.replace(target, hbm=hbm)
        outcome(monkeypatch, dataclasses.replace(program, target=smaller))
        assert preflight(fsdp, smaller).fits == fits


@pytest.mark.parametrize(
    ("op_name", "name"),
    [
        ("state.params['stacks'][0][1]['core']['w_1']", "params.stacks[0][1].core.w_1"),
        ("args[0].optimizer[1].mu['embedding']['tokens']", "optimizer[1].mu.embedding.tokens"),
        ("state.copies[\"['stacks'][0]['core']['w_1']\"]", "copies.stacks[0].core.w_1"),
        ("batch.inputs", "inputs"),
        ("jit(f)/shard_map/jvp()/while/body/closed_call/residual/cond/branch_0_fun/"
         "key_vector_forward/pallas_call", "residual/key_vector_forward (forward)"),
        ("jit(f)/transpose(jvp(loss))/while/body/mul", "loss/mul (backward)"),
        ("jit(f)/transpose(jvp())/while/body/closed_call/checkpoint/rematted_computation/"
         "feed_forward/tanh", "feed_forward/tanh (recomputed)"),
        ("jit(f)/optimizer/add", "optimizer/add"),
        ("fusion.3", "fusion.3"),
    ],
)  # fmt: skip
def test_names_that_are_the_models(op_name, name):
    assert readable(op_name) == name


# Without a compiler ------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ["MeshError", "UsageError"])
def test_mesh_that_cannot_be(monkeypatch, error):
    outcome(monkeypatch, Failure(f"{error}: --mesh='data=3' needs 3", error))
    with pytest.raises(UsageError, match="^--mesh='data=3' needs 3$"):
        preflight(config(), parse_topology("v5e:2x2"))


@pytest.mark.parametrize("assignment", [None, Assignment((), (), 1, 0)])
def test_other_errors_of_the_compiler(monkeypatch, assignment):
    outcome(monkeypatch, Failure("ValueError: no such tile", "ValueError", assignment))
    with pytest.raises(RunError, match="does not compile for v5e:2x2: no such tile"):
        preflight(config(), parse_topology("v5e:2x2"))


def test_what_does_not_fit(monkeypatch):
    message = (
        "JaxRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required "
        "for HLO temporaries (21.00G) exceeds available HBM (15.50G)."
    )
    weights = Buffer("state.params['w']", "p", "f32[9]", 3 * GIB)
    moments = Buffer("state.optimizer[1].mu['w']", "q", "f32[9]", 6 * GIB)
    rows = Buffer("batch.inputs", "r", "s32[9]", GIB)
    kept = Buffer("jit(f)/jvp()/while/body/residual/add", "while.1{3}", "bf16[9]", 5 * GIB, True)
    cast = Buffer("state.params['w']", "convert.1", "bf16[9]", 2 * GIB)
    found = Assignment((weights, moments, rows), (kept, cast), 10 * GIB, GIB)
    info = {"mesh": {"data": 4, "fsdp": 1}}
    outcome(monkeypatch, Failure(message, "JaxRuntimeError", found, info))
    report = preflight(config(), parse_topology("v5e:2x2"))
    sizes = {kind: size // GIB for kind, size in report.memory.items()}
    assert not report.fits and report.limit == 15.5 * GIB and report.gaps == 3 * GIB
    assert sizes == {"parameters": 3, "optimizer": 6, "cache": 0, "batch": 1, "activations": 5,
                     "temporaries": 6, "program": 0}  # fmt: skip
    assert [b.name for b in report.buffers] == [
        "optimizer[1].mu.w", "residual/add (forward)", "params.w", "a copy of params.w", "inputs",
    ]  # fmt: skip
    text = report_text(report, "rmt-tiny")
    first = text.splitlines()[0]
    assert "DOES NOT FIT, 21.00 GiB needed, 15.50 GiB per device" in first
    assert "5.50 over the limit" in text and "ESTIMATE" not in text
    for step in advice(report):
        assert step.flags in text


# A copy, and another one in a branch.
COPIES = """HloModule m

%kept (p: f32[1024,1024]) -> f32[1024,1024] {
  ROOT %p = f32[1024,1024]{1,0} parameter(0)
}

%copied (q: f32[1024,1024]) -> f32[1024,1024] {
  %q = f32[1024,1024]{1,0} parameter(0)
  ROOT %c.1 = f32[1024,1024]{1,0} copy(%q)
}

ENTRY %main (a: f32[1024,1024], n: s32[]) -> f32[1024,1024] {
  %a = f32[1024,1024]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %c = f32[1024,1024]{1,0} copy(%a)
  ROOT %r = f32[1024,1024]{1,0} conditional(%n, %c, %c), branch_computations={%kept, %copied}
}
"""


@pytest.mark.parametrize("rows", [None, 4])
def test_model_flops_and_branches_of_a_prompt(monkeypatch, rows):
    """A part has logits of one token; new tokens attend to the whole prompt, and are greedy."""
    target, given = parse_topology("v5e:1x1"), config("llama-tiny")
    info = {"mesh": {"data": 1}, "ids": None, "coordinates": None}
    memory = {"argument": 32, "generated_code": 0}
    nothing = Assignment((), (), 0, 0)
    program = Program(target, Module(COPIES), {}, memory, 1.0, [], nothing, info)
    outcome(monkeypatch, program)
    time = preflight(given, target, prompt=Prompt(512, part=128, rows=rows)).time
    copy = 2 * 4 * 1024**2 / target.bandwidth
    assert time.total == pytest.approx(copy if rows else 2 * copy)
    model = given.model
    if rows:
        flops = rows * 8 * resources.flops_per_token(model, 512)
    else:
        parts = [resources.forward_flops(model, n) for n in range(1, 513)]
        layers = sum(sum(p.values()) - p["embedding"] - p["unembedding"] for p in parts) / 512
        flops = 128 * layers + parts[0]["unembedding"]
    assert time.mfu * time.total * target.peak_flops == pytest.approx(flops)


# What to change ----------------------------------------------------------------------------------


def report(preset="rmt-305m", mesh=None, topology="v5e:4x4", state=3.0, work=20.0, **changes):
    mesh = {"data": 16, "fsdp": 1} | (mesh or {})
    memory = dict.fromkeys(KINDS, 0) | {
        "parameters": int(state * GIB) // 3,
        "optimizer": int(state * GIB) * 2 // 3,
        "activations": int(work * GIB),
    }
    given = {"model.vocab_size": 50257, "model.remat": "full", "train.batch_size": 256}
    changes = given | changes
    return Preflight(
        config=overrides.apply(run(preset), changes),
        target=parse_topology(topology),
        mesh=mesh,
        fits=False,
        limit=int(15.75 * GIB),
        memory=memory,
        gaps=0,
        buffers=(),
        traffic=(),
        time=None,
        compile_seconds=None,
    )


def test_few_bytes_are_told_in_mib(tmp_path):
    given = dataclasses.replace(report(state=0.03, work=0.02), fits=True, gaps=0)
    text = report_text(given, "rmt-tiny")
    assert "FITS, 51.20 MiB of 15.75 GiB per device (0%)" in text
    assert "memory per device in MiB, of 15.75 GiB that" in text
    assert "optimizer    20.48  ################ " in text  # of 40 characters for all of it
    assert "15.70 GiB free" in text and "0.00 G" not in text
    draw_memory(given, tmp_path / "memory.png", "rmt-tiny")
    large = report_text(dataclasses.replace(report(), fits=True), "rmt-305m")
    assert "FITS, 23.00 of 15.75 GiB" in large and "memory per device in GiB" in large


@pytest.mark.parametrize(
    ("topology", "changes", "form", "told"),
    [
        ("h100:1", {}, "cudnn", "attention, heads of 64: cuDNN's fused kernels\n"),
        (
            *("h100:1", {"model.attention.head_dim": 256}, "xla"),
            "attention, heads of 256: plain JAX, with an online softmax if there are many logits; "
            "no kernel: heads of size 256 plus 11 entries for ALiBi and segments (legal: up "
            "to 256 in total)\n",
        ),
        (
            *("h100:1", {"model.kernels": "xla"}, "xla"),
            "if there are many logits; no kernel: model.kernels=xla\n",
        ),
        ("v5e:1x1", {}, "mosaic_tpu", "attention, heads of 64: kernels for TPUs\n"),
        (
            *("v5e:1x1", {"model.attention.head_dim": 60}, "xla"),
            "no kernel: heads of size 60 (legal: multiples of 8)\n",
        ),
    ],
)
def test_the_form_that_attention_takes_and_why(topology, changes, form, told):
    given = report("gpt2-405m", topology=topology, **{"data.seq_len": 512} | changes)
    text = report_text(dataclasses.replace(given, fits=True), "gpt2-405m")
    assert told in text
    (attends,) = given.json()["attention"]
    assert attends["form"] == form and (attends["why"] is None) == (form != "xla")
    decoding = dataclasses.replace(given, prompt=Prompt(512, rows=4))
    assert decoding.attention == ()


def test_what_cannot_be_seen_in_a_bar_is_not_in_its_legend(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda self, *_, **__: drawn.append(self)
    )
    given = report()
    thin = given.memory | {"batch": int(0.01 * GIB)}
    draw_memory(dataclasses.replace(given, memory=thin), tmp_path / "memory.png", "rmt-tiny")
    shown = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert any(text.startswith("optimizer ") for text in shown), shown
    assert not any(text.startswith("batch") or text.endswith(" 0.00") for text in shown), shown


def test_a_prompt_has_a_cache_and_no_moments():
    read = dataclasses.replace(report(state=0.0), prompt=Prompt(131072, 2048))
    text = report_text(read, "rmt-305m")
    assert "mesh data=16; a prompt of 131072 tokens, 2048 at a time, auto, vocabulary 50257" in text
    assert "  cache " in text and "  optimizer " not in text and "  activations " not in text
    assert flags(read) == [] and "what to change: more devices on tensor, sequence or key" in text
    memory = read.memory | {"cache": 10 * GIB, "temporaries": 12 * GIB, "activations": 0}
    (step,) = advice(dataclasses.replace(read, memory=memory))
    assert step.flags == "--part=512" and step.bytes == 13 * GIB


def test_time_is_a_range_where_the_model_of_cost_decides():
    parts = dict.fromkeys(GROUPS, 0.0) | {"cores": 0.3, "residual": 0.1}
    by_model = {"least": 0.25, BEST_GUESS: 0.4, "most": 0.5}
    time = StepTime(parts, by_model, 0.1, 0.25, overlapped=0.06, mfu=0.3, unknown_loops=0)
    assert (time.total, time.least) == pytest.approx((0.5, 0.44))
    assert time.range == pytest.approx((0.29, 0.75))
    given = dataclasses.replace(report(), fits=True, time=time, compile_seconds=1.0)
    assert given.json()["estimated_seconds"]["range"] == time.range
    text = report_text(given, "rmt-305m")
    assert f"  {error_bar(['v5e'])}\n" in text
    assert "  step          500.00 ms, 440.00 ms if overlapped collectives cost nothing\n" in text
    tokens = given.config.train.batch_size * given.config.data.seq_len
    assert (
        "  least, best guess and most: 290.00, 500.00, 750.00 ms; "
        f"{tokens / 0.29:,.0f}, {tokens / 0.5:,.0f}, {tokens / 0.75:,.0f} tokens/s; "
        "MFU 51.7%, 30.0%, 20.0%\n"
    ) in text


def flags(given):
    return [step.flags for step in advice(given)]


def test_advice_in_its_order():
    # Of 23 GiB: half of 20, and another gradient of 1; or half of 20; or of the state half.
    given = report()
    assert flags(given) == [
        "--set=model.remat=reversible",
        "--set=train.accumulate=2",
        "--batch_size=128",
        "--mesh=fsdp=16",
        "--topology=v5e:4x8 --mesh=data=16,fsdp=2",
    ]
    sizes = [step.bytes and round(step.bytes / GIB, 2) for step in advice(given)]
    assert sizes == [None, 14.0, 13.0, round(20 + 3 / 16, 2), 11.5]


@pytest.mark.parametrize(
    ("preset", "now", "legal"),
    [
        ("rmt-305m", "none", ["full", "reversible"]),
        ("rmt-305m", "reversible_dots", ["reversible"]),
        ("rmt-305m", "reversible", []),
        ("gpt2-405m", "dots", ["full"]),
        ("gpt2-405m", "full", []),
        ("gpt2-405m-attnres", "full", ["blocks"]),
    ],
)
def test_only_what_the_model_can_have(preset, now, legal):
    given = [flag for flag in flags(report(preset, **{"model.remat": now})) if "remat" in flag]
    assert given == [f"--set=model.remat={policy}" for policy in legal]
    for flag in given:
        path, value = overrides.parse_assignment(flag.removeprefix("--set="))
        overrides.apply(run(preset), {path: value})  # raises what is not legal


def test_a_state_that_leaves_no_room_is_divided_first():
    given = report(state=24.0, work=4.0)
    first = advice(given)[0]
    # A quarter of it and the work fit, half of it and the work do not.
    assert first.flags == "--mesh=data=4,fsdp=4" and first.bytes == 10 * GIB
    assert "train.accumulate" not in advice(given)[1].flags


def test_one_row_a_device():
    """There are no parts of a row: a sequence is divided instead."""
    mesh = dict.fromkeys(("stage", "key", "sequence", "tensor"), 1) | {"data": 16, "fsdp": 1}
    given = flags(report(mesh=mesh, **{"train.batch_size": 16}))
    assert "--mesh=data=8,sequence=2 --set=train.accumulate=2" in given
    assert not any(flag.startswith(("--set=train.accumulate", "--batch_size")) for flag in given)


def test_more_parts_than_there_are():
    given = report(work=60.0, **{"train.accumulate": 2})
    # Sixteen rows a device in two parts: a half of 60 beside 3 is too much, as is a quarter.
    (step,) = [s for s in advice(given) if s.flags.startswith("--set=train.accumulate")]
    assert step.flags == "--set=train.accumulate=16"
    assert step.bytes == 3 * GIB + 60 * GIB // 8 < given.limit


def test_fewer_rows_keep_the_number_of_parts():
    """A run that chooses it would have fewer parts, each as large as before."""
    given = flags(report(**{"train.accumulate": 2}))
    assert "--batch_size=128 --set=train.accumulate=2" in given
    assert "--topology=v5e:4x8 --mesh=data=16,fsdp=2 --set=train.accumulate=2" in given


def test_a_pipeline_takes_more_microbatches():
    """Of 32 rows; two stages keep 2 of 2, then 3 of 4, 8 or 16. The rest is as with one stage."""
    mesh = dict.fromkeys(("data", "key", "sequence", "tensor", "fsdp"), 1) | {"stage": 2}
    given = report(work=40.0, mesh=mesh, **{"train.batch_size": 32})
    (step,) = [s for s in advice(given) if "microbatches" in s.flags]
    assert step.flags == "--set=train.microbatches=16"
    assert step.bytes == 3 * GIB + 40 * GIB * 3 // 16 < given.limit
    assert not any("accumulate" in flag or "reversible" in flag for flag in flags(given))


def test_a_pipelines_rows_are_whole_microbatches():
    """Each device's rows must be a multiple of the microbatches, also of a smaller batch."""
    mesh = dict.fromkeys(("data", "key", "sequence", "tensor", "fsdp"), 1) | {"stage": 2}
    given = flags(report(work=400.0, mesh=mesh, **{"train.batch_size": 32}))
    assert "--batch_size=2" in given
    assert "--topology=v5e:4x8 --mesh=fsdp=2,stage=2" in given, "16 rows in 2 microbatches"
    most = {"train.batch_size": 32, "train.microbatches": 32}
    assert not flags(report(work=40.0, mesh=mesh, **most)), "no fewer rows, and none on each device"


def test_a_sequence_is_divided_over_the_tensor_axis_too():
    """16 heads can be divided over 2 x 8 devices, and not over 2 x 16."""
    axes = dict.fromkeys(("stage", "key", "sequence"), 1) | {"data": 16, "fsdp": 1}
    changed = {"train.batch_size": 16}
    assert any("sequence=2" in flag for flag in flags(report(mesh=axes | {"tensor": 8}, **changed)))
    given = flags(report(mesh=axes | {"tensor": 16}, **changed))
    assert not any("sequence" in flag for flag in given)


def test_no_more_chips_than_a_pod_has():
    largest = report(topology="v5e:16x16", mesh={"data": 256}, **{"train.batch_size": 1024})
    assert not any("topology" in flag for flag in flags(largest))
    assert any("--topology=v5e:2x2 " in flag for flag in flags(report(topology="v5e:1x1")))
    gpus = [flag for flag in flags(report(topology="h100:4")) if "topology" in flag]
    assert gpus == ["--topology=h100:8 --mesh=data=16,fsdp=2"]
