"""How accurate a model with an int16 residual is beside one with a bfloat16 residual.

    JAX_PLATFORMS=cpu python -m tests.fixed_point_accuracy [init_std ...]

rmt-tiny with new parameters on random tokens, against float32. A cell is: error of the logits over
their standard deviation, of the worst key's gradient, and the mean over all gradients, each as root
mean squares.
"""

import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import rmt_tpu
from rmt_tpu import config as cfg
from rmt_tpu.decoder import residual_dtype
from rmt_tpu.residual import fixed_point

TOKENS = np.random.default_rng(0).integers(0, 257, (2, 64), np.int32)
WEIGHTS = np.random.default_rng(1).normal(size=(2, 64, 257)).astype(np.float32)


def run(config: cfg.ModelConfig, params: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits, and the gradient of each parameter by name."""
    abstract = nnx.eval_shape(lambda: rmt_tpu.Decoder(config, rngs=nnx.Rngs(0)))
    graphdef = nnx.split(abstract, nnx.Param)[0]

    def loss(params):
        logits = nnx.merge(graphdef, params)(TOKENS)
        return jnp.mean(WEIGHTS * logits), logits

    gradients, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
    named = jax.tree_util.tree_flatten_with_path(gradients)[0]
    return np.asarray(logits), {jax.tree_util.keystr(path): np.asarray(x) for path, x in named}


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x.astype(np.float64)))))


def cell(got: tuple, want: tuple) -> str:
    (logits, gradients), (exact, exact_gradients) = got, want
    errors = {k: rms(gradients[k] - g) / rms(g) for k, g in exact_gradients.items() if rms(g)}
    keys = max(error for name, error in errors.items() if "keys" in name)
    shown = (rms(logits - exact) / exact.std(), keys, np.mean([*errors.values()]))
    return " / ".join(f"{x:.1%}" if np.isfinite(x) else "NaN" for x in shown)


def row(init_std: float) -> str:
    exact = replace(rmt_tpu.preset("rmt-tiny"), init_std=init_std, compute_dtype="float32")
    params = nnx.state(rmt_tpu.Decoder(exact, rngs=nnx.Rngs(0)), nnx.Param)
    want = run(exact, params)
    rounded = replace(exact, compute_dtype="bfloat16")
    auto = replace(rounded, remat="reversible")
    of_store = lambda **changes: replace(auto, store=replace(auto.store, **changes))
    cells = [
        cell(run(rounded, params), want),
        cell(run(of_store(dtype="int16", fraction_bits=9), params), want),
        f"{fixed_point.fraction_bits(auto)}: " + cell(run(of_store(dtype="int16"), params), want),
        f"{residual_dtype(auto).name}: " + cell(run(auto, params), want),
    ]
    return f"| {init_std:g} | {' | '.join(cells)} |"


def main() -> None:
    print("| init_std | bfloat16 residual | int16, 9 bits | int16, own bits | auto |")
    print("|---|---|---|---|---|")
    for init_std in sys.argv[1:] or "1e-3 3e-3 1e-2 2e-2 3e-2 1e-1 3e-1 1 3".split():
        print(row(float(init_std)), flush=True)


if __name__ == "__main__":
    main()
