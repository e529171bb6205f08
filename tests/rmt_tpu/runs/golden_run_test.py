"""A run folder of the present format, kept from the day it was made: it opens as it was.

Who changes the format, the names or the order of parameters without a reader breaks this.
"""

import shutil
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rmt_tpu
import sharding
from rmt_tpu.errors import ArgumentError, RunError
from rmt_tpu.runs import loading, workdir
from rmt_tpu.storage import open_folder
from rmt_tpu.training.run import prepare

# An RMT of two layers after 4 of 6 steps, written on 2026-11-27.
RUN = Path(__file__).parent / "golden_run.zip"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    with zipfile.ZipFile(RUN) as files:
        files.extractall(folder)
    return str(folder)


def test_its_model_is_the_same_function(run):
    decoder, tokenizer = rmt_tpu.load(run)
    assert decoder.config.num_layers == 2 and decoder.config.data_shape == (2, 4)
    tokens = jnp.asarray(tokenizer.encode("the quick brown"))[None]
    logits = jax.jit(lambda tokens: decoder(tokens)[0, -1, 100:106])(tokens)
    # As the version that wrote it printed them.
    expected = [0.321289, 0.19212, -0.018752, -0.330099, 0.148465, -0.314092]
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_weights_that_are_not_finite_are_told_by_name(run, monkeypatch):
    restored = loading.restore_grown

    def damaged(*given, **how):
        step, state, meta = restored(*given, **how)
        state["params"]["final_site"] = jax.tree.map(
            lambda x: x.at[0].set(jnp.nan), state["params"]["final_site"]
        )
        return step, state, meta

    monkeypatch.setattr(loading, "restore_grown", damaged)
    with pytest.raises(RunError, match="step 4 of .*: final_site/.* numbers that are not finite; "):
        rmt_tpu.load(run)


def test_a_tokenizer_that_is_missing_or_damaged_is_told_with_its_remedy(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    remedy = "; repeat the run's training command, which writes it again$"
    for damage, words in (
        (lambda file: file.write_bytes(b""), r": the tokenizer cannot be read \(Expecting .*\)"),
        (lambda file: file.unlink(), " is missing"),
    ):
        damage(folder / "tokenizer.json")
        with pytest.raises(
            ArgumentError, match=f"^workdir={folder}: tokenizer.json{words}{remedy}"
        ):
            rmt_tpu.load(folder)


def test_its_training_state_is_all_of_todays(run):
    config = workdir.read_config(run)
    state = prepare(config, sharding.make_mesh(config.train.mesh, jax.devices()[:1])).abstract
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    checkpoints = workdir.open_checkpoints(open_folder(run))
    step, restored, _ = checkpoints.restore(state)
    assert step == int(restored.step) == 4
    moment = restored.optimizer[1].mu["stacks"][0][1]["core"]["w_2"]
    assert moment.shape == (2, 8, 8) and np.abs(moment).max() > 0
