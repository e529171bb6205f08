"""A model that takes over another's weights says whether it begins as the same function."""

import re

import jax
import numpy as np
import pytest
from flax import nnx, traverse_util

import sharding
from rmt_tpu import data
from rmt_tpu.config import overrides
from rmt_tpu.config.presets import run as preset_run
from rmt_tpu.data import ByteTokenizer
from rmt_tpu.distributed import processes
from rmt_tpu.errors import RunError
from rmt_tpu.hub.folder import export
from rmt_tpu.runs import workdir
from rmt_tpu.runs.warm_start import WarmStart
from rmt_tpu.storage import open_folder
from rmt_tpu.training import start_comparison
from rmt_tpu.training.run import prepare, resolve_auto
from tests import models
from tests.tiers import later

pytestmark = pytest.mark.xdist_group("start_comparison")  # one worker compiles the programs


@pytest.fixture(scope="module")
def config():
    changes = {
        "model.num_layers": 4,
        "model.feed_forward.hidden_dim": 32,
        "train.batch_size": 8,
        "data.seq_len": 16,
        "train.seed": 7,
    }
    return overrides.apply(preset_run("llama-tiny"), changes)


@pytest.fixture(scope="module")
def hub(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    export(models.decoder(config.model), ByteTokenizer(), folder, max_length=64)
    return str(folder)


@pytest.fixture(scope="module")
def windows():
    tokens = np.random.default_rng(0).integers(0, 256, 400).astype(np.int32)
    return data.Windows(tokens, seq_len=16, batch_size=8, bos=256, seed=0, shuffle=True)


def said(config, location, windows, *, mesh="data=1", change=lambda params: params, **changes):
    """What the start prints; `change` edits the new model's parameters."""
    config = overrides.apply(config, {"train.mesh": mesh} | changes)
    config = resolve_auto(config)
    count = int(np.prod([*sharding.parse_mesh(mesh).values()]))
    run = prepare(config, sharding.make_mesh(mesh, jax.devices()[:count]))
    warm_start, lines = WarmStart(location, config.model), []
    log = lambda line: None
    drawn = run.jitted_init()().params
    params = change(warm_start.initial_params(drawn, run.state_shardings.params, log))
    start_comparison.report(config, run, warm_start, params, windows, lines.append)
    (line,) = lines
    return line


def numbers(line):
    """The largest difference, the largest logit and, if it is said, what epsilon leaves."""
    found = re.search(
        r": on \d+ tokens in float32, logits differ by at most (\S+) \(the largest logit is "
        r"(\S+)\)(?:, all but (\S+) by the norm's epsilon)?$",
        line,
    )
    return tuple(float(x or "nan") for x in found.groups())


ATTENTION = {"model.mixer": "full_attention"}


@pytest.mark.parametrize(
    ("mesh", "mixer"),
    [
        ("data=1", "full_attention"),
        *later(
            ("data=2,fsdp=2,tensor=2", "full_attention"),
            ("stage=2,fsdp=2", "full_attention"),
            ("sequence=8", "hyper_connections"),
            ("data=1", "delta_attention"),
            ("data=1", "dense"),
            ("data=1", "wide_streams"),
            ("data=1", "residual_scalars"),
        ),
    ],
)
def test_the_same_function_is_shown_to_be_it(config, hub, windows, mesh, mixer):
    """To rounding; attention over depth reads a mean, for which the epsilon counts more."""
    line = said(config, hub, windows, mesh=mesh, **{"model.mixer": mixer})
    assert line.startswith(f"the model starts as the same function as {hub}, because ")
    difference, scale, left = numbers(line)
    bound = start_comparison.rounding_bound(overrides.apply(config, {"model.mixer": mixer}).model)
    assert 3 < scale < 6 and 1e-5 < bound < 1e-4
    if mixer == "full_attention":
        assert bound * scale < difference < 1e-2 and 0 < left < bound * scale
    else:
        assert difference < bound * scale and np.isnan(left)


def test_a_model_without_changes_is_not_measured(config, hub, windows):
    line = said(config, hub, windows, **{"model.compute_dtype": "bfloat16"})
    assert line == (
        f"the model starts as the same function as {hub}, because the config is the same"
    )


@pytest.mark.parametrize(
    ("changes", "begins"),
    [
        (
            {"model.mixer": {"kind": "wide_streams", "forget": 0.5}},
            "does not start as the same function as .*, because forget=0.5 lets streams forget",
        ),
        *later(
            (
                {"model.norm": "layernorm"},
                'may not start as the same function as .*, because model.norm is "rmsnorm" there',
            ),
        ),
    ],
)
def test_another_function_is_said_to_be_one(config, hub, windows, changes, begins):
    line = said(config, hub, windows, **changes)
    assert re.match(f"the model {begins}", line)
    difference, scale, _ = numbers(line)
    assert 3 < scale < 6 and difference > 1e-3


def test_a_mixer_that_begins_otherwise_than_it_states_ends_the_run(config, hub, windows):
    def with_queries(params):
        final = params["final_site"]
        query = np.full_like(final["mix"]["query"], 0.1)
        return params | {"final_site": final | {"mix": final["mix"] | {"query": query}}}

    with pytest.raises(RunError, match="^--init_from=.*full_attention should start as") as error:
        said(config, hub, windows, change=with_queries, **ATTENTION)
    pattern = r"differ by at most (\S+); rounding explains at most (\S+);"
    found = re.search(pattern, str(error.value))
    difference, bound = map(float, found.groups())
    assert difference > 1e-2 and 1e-5 < bound < 1e-3 and "\n" not in str(error.value)


@pytest.mark.slow
def test_weights_that_the_new_model_lacks_count(config, windows, tmp_path):
    """Of a run with attention over depth, whose queries the plain sum leaves out."""
    origin, folder = resolve_auto(overrides.apply(config, ATTENTION)), open_folder(tmp_path)
    run = prepare(origin, sharding.make_mesh("data=1", jax.devices()[:1]))
    state = run.jitted_init()()
    moved = lambda path, x: x + 0.1 if "query" in jax.tree_util.keystr(path) else x
    params = jax.tree_util.tree_map_with_path(moved, state.params)
    workdir.write_config(folder, origin)
    meta = workdir.config_meta(origin, ByteTokenizer())
    workdir.open_checkpoints(folder).save(1, {"params": params}, meta)
    line = said(config, str(tmp_path), windows)
    assert re.search(
        "may not start as the same function .*, because the mixer is full_attention there and "
        "sum here",
        line,
    )
    moved, plain = (logits(of.model, params, windows) for of in (origin, config))
    wanted = np.max(np.abs(moved - plain)), np.max(np.abs(moved))
    np.testing.assert_allclose(numbers(line)[:2], wanted, rtol=0.06)
    assert wanted[0] > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("gone", [True, False])
def test_a_checkpoint_that_its_run_deletes_meanwhile_is_not_compared(
    config, windows, tmp_path, gone
):
    """Its run goes on; a checkpoint that is damaged still ends the start."""
    origin, folder = resolve_auto(overrides.apply(config, ATTENTION)), open_folder(tmp_path)
    params = nnx.to_pure_dict(nnx.state(models.decoder(origin.model), nnx.Param))
    workdir.write_config(folder, origin)
    meta = workdir.config_meta(origin, ByteTokenizer())
    workdir.open_checkpoints(folder).save(1, {"params": params}, meta)

    def delete(params):
        if gone:
            (tmp_path / "checkpoints/1/COMMIT").unlink()
        else:
            next((tmp_path / "checkpoints/1").glob("*/manifest.json")).write_text("{}")
        return params

    start = lambda: said(config, str(tmp_path), windows, change=delete)
    if gone:
        assert start().endswith(
            "logits are not compared: the run there has deleted its checkpoint by now"
        )
    else:
        with pytest.raises(RunError, match=r"manifest\.json is damaged"):
            start()


def logits(model, params, windows):
    """Logits of the same text; parameters that the model lacks are left out."""
    graph, like = models.split(model)
    flat = traverse_util.flatten_dict(params)
    own = {path: flat[path] for path in traverse_util.flatten_dict(like)}
    batch = windows.batch_at(0, np.array([0]))
    decoder = nnx.merge(graph, traverse_util.unflatten_dict(own))
    return jax.jit(decoder.__call__)(batch.inputs, segment_ids=batch.segment_ids)


def test_no_process_compares_if_another_one_has_too_little_memory(
    config, hub, windows, monkeypatch
):
    """Its devices would wait for those of the other process for ever."""
    short = "that needs at least 138.0 MB on each device, which has 100.0 MB"
    monkeypatch.setattr(processes, "exchange", lambda own, what: [own, short])
    line = said(overrides.apply(config, ATTENTION), hub, windows)
    assert line.endswith(f"; logits are not compared: {short}")


def test_what_cannot_be_compared_is_said(config, hub, windows, monkeypatch):
    attention = overrides.apply(config, ATTENTION)
    monkeypatch.setattr(start_comparison.memory, "machine_bytes", lambda: 10**8)
    line = said(attention, hub, windows)
    assert line.endswith(
        "which is normed; logits are not compared: that needs at least 138.0 MB on each device, "
        "which has 100.0 MB"
    )

    def cannot(*_):
        raise sharding.MeshError("model.attention.num_heads=4 is not divisible")

    monkeypatch.setattr(start_comparison, "check_sizes", cannot)
    line = said(attention, hub, windows)
    assert line.endswith(
        "which is normed; logits are not compared on this mesh: model.attention.num_heads=4 is not "
        "divisible"
    )
