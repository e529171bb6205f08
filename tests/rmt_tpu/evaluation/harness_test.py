"""The adapter for lm-evaluation-harness, whose package is not needed here."""

import importlib
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from rmt_tpu.data import ByteTokenizer
from rmt_tpu.errors import UsageError
from rmt_tpu.evaluation import subjects
from rmt_tpu.storage import open_folder

NAMES = {
    "lm_eval": {},
    "lm_eval.api": {},
    "lm_eval.api.model": {"TemplateLM": object},
    "lm_eval.api.registry": {"register_model": lambda name: lambda model: model},
    "lm_eval.models": {},
    "lm_eval.models.utils": {"normalize_gen_kwargs": None},
}
MODULE = "rmt_tpu.evaluation.harness"


@pytest.fixture
def harness(monkeypatch):
    """The module with stand-ins for the names that it imports from lm-eval."""
    import rmt_tpu.evaluation as package

    for name, values in NAMES.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    # Other tests import the module anew, with lm-eval itself.
    monkeypatch.setitem(sys.modules, MODULE, None)
    monkeypatch.setattr(package, "harness", None, raising=False)
    del sys.modules[MODULE]
    return importlib.import_module(MODULE)


def test_arguments_of_the_model_are_checked(harness):
    harness.check_arguments(
        {"workdir": "runs/a", "step": 3, "mesh": "tensor=2", "max_length": None}
    )
    refused = {
        "--model_args needs workdir=FOLDER": {"step": 3},
        "--model_args 'stepp' is unknown; did you mean 'step'": {"workdir": "a", "stepp": 3},
        "--model_args step='new' must be a whole number": {"workdir": "a", "step": "new"},
    }
    for message, given in refused.items():
        with pytest.raises(UsageError, match=f"^{message}"):
            harness.check_arguments(given)


@pytest.mark.parametrize("config, starts", [({"model_type": "llama"}, False), ({}, True)])
def test_the_format_of_a_folder_in_a_bucket(harness, server, monkeypatch, config, starts):
    """The template of a hub's folder decides about the start token, also on gs://."""
    template = b"{{ messages[0].content }}"
    files = {"config.json": json.dumps(config).encode(), "chat_template.jinja": template}
    for name, content in files.items():
        server.replace(server.bucket, f"model/{name}", content)
    subject = SimpleNamespace(
        tokenizer=ByteTokenizer(),
        scorer=None,
        decoder=None,
        limit=None,
        folder=open_folder(f"gs://{server.bucket}/model"),
    )
    monkeypatch.setattr(subjects, "run_subject", lambda *args, **options: subject)
    model = harness.RmtTpu("model")
    text = model.apply_chat_template([{"role": "user", "content": "ab"}])
    requests = len(server.requests)
    bos = [ByteTokenizer.bos] if starts else []
    assert model._with_start(model.tok_encode(text)).tolist() == [*bos, 97, 98]
    assert len(server.requests) == requests
