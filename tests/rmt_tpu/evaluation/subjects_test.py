"""The models that a trained one is compared with."""

import json

import jax
import numpy as np
import pytest
from flax import nnx, traverse_util

from rmt_tpu import config as cfg
from rmt_tpu.config import overrides
from rmt_tpu.config.presets import run as preset_run
from rmt_tpu.data import ByteTokenizer
from rmt_tpu.errors import UsageError
from rmt_tpu.evaluation.evaluate import Subject
from rmt_tpu.evaluation.scorer import Scorer
from rmt_tpu.evaluation.subjects import untrained
from rmt_tpu.hub.folder import export
from rmt_tpu.storage import open_folder
from tests import models


def parameters(decoder) -> dict[tuple, np.ndarray]:
    params = nnx.to_pure_dict(nnx.state(decoder, nnx.Param))
    return traverse_util.flatten_dict(jax.tree.map(np.asarray, params))


def test_a_run_that_another_model_began_had_its_weights(tmp_path):
    """What only the new model has is drawn, as in a run from the start."""
    small = {"model.num_layers": 2, "model.feed_forward.hidden_dim": 32}
    config = overrides.apply(preset_run("llama-tiny"), small)
    source = models.decoder(config.model)
    export(source, ByteTokenizer(), tmp_path / "hub", max_length=64)
    mixer = {"model.mixer": "block_attention", "model.mixer.num_blocks": 2}
    subject = Subject("m", Scorer(None, 8), ByteTokenizer(), {}, open_folder(tmp_path / "run"))

    def baseline(init_from):
        changes = mixer | {"train.seed": 7, "train.init_from": str(init_from)}
        run = overrides.to_json(overrides.apply(config, changes))
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run/config.json").write_text(json.dumps(run))
        return untrained(tmp_path / "run", subject)

    drawn, begun = baseline(""), baseline(tmp_path / "hub")
    assert drawn.identity["weights"] != begun.identity["weights"]
    own, supplied = parameters(drawn.decoder), parameters(source)
    found = parameters(begun.decoder)
    for path, array in found.items():
        expected = supplied.get(path, own[path])
        np.testing.assert_array_equal(array, expected.astype(array.dtype))
    assert 0 < len(supplied) < len(found) == len(own)
    assert isinstance(begun.decoder.config.mixer, cfg.BlockAttention)
    words = "--against=untrained needs the weights from which the run started: train.init_from="
    with pytest.raises(UsageError, match=f"^{words}{tmp_path}/gone holds no run"):
        baseline(tmp_path / "gone")
