"""The example of docs/guides/add_*.md: a core and a mixer are added in the files that it names."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rmt_tpu.example import FILES

ROOT = Path(__file__).parents[2]

# What they then do: on both stores, counted, decoded, and differentiated.
USE = """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
import rmt_tpu
from rmt_tpu import config as cfg, cost

layer = (cfg.Average(), cfg.FeedForward(8), cfg.Attention(2, 4, cfg.Alibi()))
for store in (cfg.VectorStore(8), cfg.MatrixStore(4, vectors=2, vector_dim=4)):
    stacks = (cfg.Stack((cfg.Average(), cfg.FeedForward(8)), 2), cfg.Stack(layer))
    config = cfg.ModelConfig(stacks, store, cfg.Damped(kept=0.5), vocab_size=11)
    decoder = rmt_tpu.Decoder(config, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(decoder, nnx.Param)
    assert sum(p.size for p in jax.tree.leaves(params)) == sum(cost.parameters(config).values())
    tokens = jnp.arange(12).reshape(2, 6) % 11

    @jax.jit
    def both(params):
        decoder = nnx.merge(graphdef, params)
        cache, pieces = decoder.empty_cache(2, 6), []
        for new in (tokens[:, :4], tokens[:, 4:]):
            logits, cache = decoder.decode(new, cache)
            pieces.append(logits)
        last, cache = decoder.prefill(tokens, jnp.array([3, 5]), decoder.empty_cache(2, 6))
        after, _ = decoder.decode(tokens[jnp.arange(2), jnp.array([3, 5])][:, None], cache)
        ragged = jnp.stack([last, after[:, 0]], axis=1)
        return decoder(tokens), jnp.concatenate(pieces, axis=1), ragged

    whole, decoded, ragged = both(params)
    np.testing.assert_allclose(decoded, whole, atol=1e-5)
    for row, length in enumerate((3, 5)):
        np.testing.assert_allclose(ragged[row], whole[row, length - 1 : length + 1], atol=1e-5)
    loss = jax.jit(jax.grad(lambda params: jnp.sum(both(params)[0] ** 2)))
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(loss(params)))
print("ok")
"""


@pytest.mark.slow
def test_a_core_and_a_mixer_are_added_in_these_files(tmp_path):
    for package in ("rmt_tpu", "sharding", "pallas_kernels"):
        shutil.copytree(ROOT / package, tmp_path / package)
    for name, change in FILES.items():
        file = tmp_path / name
        if isinstance(change, str):
            assert not file.exists()
            file.write_text(change)
            continue
        text = file.read_text()
        for old, new in change:
            assert text.count(old) == 1, f"{name}: {old!r}"
            text = text.replace(old, new)
        file.write_text(text)
    run = subprocess.run(
        [sys.executable, "-c", USE],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.stdout == "ok\n", run.stderr
