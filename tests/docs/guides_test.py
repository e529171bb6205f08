"""The code in docs/guides/residual_in_your_model.md runs, and uses names that stay."""

import ast
import importlib
import re
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.closeness import assert_close

# The source tree itself: under Bazel, this file is a link to there.
GUIDE = Path(__file__).resolve().parents[2] / "docs/guides/residual_in_your_model.md"
TEXT = GUIDE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)\n```$", TEXT, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def names():
    """Run the guide's blocks one after the other, and return what they define."""
    found = {"__name__": "guide"}
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"{GUIDE.name}, block {number}", "exec"), found)
    return found


def test_ops_have_gradients(names):
    gradients = {name: np.abs(g).max() for name, g in names["gradients"].items()}
    assert gradients.keys() == names["params"].keys()
    assert all(0 < g < np.inf for g in gradients.values()), gradients


def test_depth_attention_mixes_its_sources(names):
    assert names["mixed"].shape == names["sources"].shape[1:]
    low, high = names["sources"].min(axis=0), names["sources"].max(axis=0)
    assert ((low - 1e-6 <= names["mixed"]) & (names["mixed"] <= high + 1e-6)).all()


def test_a_block_runs_on_either_store(names):
    shapes = {name: (X.shape[2:], y.shape[2:]) for name, (X, y) in names["outcomes"].items()}
    assert shapes == {"rmt-tiny": ((16, 32), (4, 32)), "gpt2-tiny": ((128,), (1, 128))}
    assert all(np.isfinite(y).all() and np.std(y) > 0 for _, y in names["outcomes"].values())


def test_scanned_on_a_mesh_is_what_layers_give_one_by_one(names):
    """Compare loss and gradients, to float32 rounding."""
    params, embedded = names["params"], names["embedded"]

    def unrolled(layers):
        X, y = jnp.zeros((*embedded.shape[:2], names["D_k"], names["D_v"])), embedded
        for l in range(names["L"]):
            (X, y), _ = names["layer"]((X, y), {name: p[l] for name, p in layers.items()})
        X = names["store"](X, params["w_O"], y)
        z = names["norm_retrieve"](X, params["gain_U"], params["r_U"])
        return jnp.mean(z**2)

    assert jax.device_count() > 1
    found = names["loss"], names["gradients_of_layers"]
    assert_close(found, jax.jit(jax.value_and_grad(unrolled))(names["layers"]), 1e-4)


def test_it_imports_public_names_alone():
    """Check that each is in a module's `__all__`, or is a module that has one."""
    nodes = [node for block in BLOCKS for node in ast.walk(ast.parse(block))]
    taken = [
        (node.module, alias.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        and node.module.split(".")[0] in ("pallas_kernels", "rmt_tpu")
        for alias in node.names
    ]
    assert len(taken) > 5
    for module, name in taken:
        module = importlib.import_module(module)
        value = getattr(module, name)
        assert name in module.__all__ or isinstance(value, ModuleType) and value.__all__, name


def test_names_that_stay_are_public():
    rows = re.findall(r"^\| `([\w.]+)` \| (`.*`) \|$", TEXT.partition("## Names")[2], re.MULTILINE)
    assert [module for module, _ in rows] == ["pallas_kernels", "rmt_tpu", "rmt_tpu.residual"]
    for module, names in rows:
        assert {*re.findall(r"`(\w+)`", names)} <= {*importlib.import_module(module).__all__}
