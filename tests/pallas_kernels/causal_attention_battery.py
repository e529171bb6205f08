"""What the kernels of causal attention have to give: each inherits the battery."""

import functools
from collections.abc import Iterable
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.causal_attention import mosaic_tpu_whole, online
from pallas_kernels.causal_attention.interface import (
    AttentionOperands,
    Cap,
    ResultsAndCotangent,
    Window,
)
from tests.closeness import assert_close, float64

# Largest error relative to the largest value. bfloat16 rounds weights, output and gradients: 2^-9
# each, of sums of both signs.
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 1e-2}


def arguments(
    batch, length, heads, size, dtype, *, alibi=False, segments=False, kv_heads=None, seed=0
):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(dtype)
    rows = heads + 2 * (kv_heads or heads)
    qkv, d_out = draw(batch, length, rows, size), draw(batch, length, heads, size)
    options = {"scale": 1.3 * size**-0.5}
    if alibi:
        options["slopes"] = rng.uniform(0.01, 0.5, heads).astype(np.float32)
    if segments:
        # Not sorted: the same number may come back after another.
        ids = np.repeat(rng.integers(0, 3, (batch, -(-length // 7))), 7, axis=1)[:, :length]
        options["segment_ids"] = ids.astype(np.int32)
    return qkv, d_out, options


def numpy_attention(
    qkv, d_out, scale, slopes=None, segment_ids=None, kv_heads=None, window=None, cap=None
):
    """Output, log sums and the cotangent of qkv in float64, one head of one row at a time."""
    qkv, d_out = float64((qkv, d_out))
    (B, N, _, D), H = qkv.shape, d_out.shape[2]
    G = kv_heads or H
    out, log_sums, d_qkv = np.empty((B, N, H, D)), np.empty((B, N, H)), np.zeros(qkv.shape)
    for b, h in np.ndindex(B, H):
        rows = h, H + h // (H // G), H + G + h // (H // G)
        q, k, v = (qkv[b, :, row] for row in rows)
        sees = np.tri(N, dtype=bool) & ~np.tri(N, k=-(window or N), dtype=bool)
        if segment_ids is not None:
            sees &= segment_ids[b, :, None] == segment_ids[b]
        logits, slope = scale * q @ k.T, 1.0
        if cap is not None:
            tanh = np.tanh(logits / cap)
            logits, slope = cap * tanh, 1 - tanh**2
        if slopes is not None:
            logits -= float(slopes[h]) * (np.arange(N)[:, None] - np.arange(N))
        weights = np.where(sees, np.exp(logits), 0)
        sums = weights.sum(1)
        weights /= sums[:, None]
        out[b, :, h], log_sums[b, :, h] = weights @ v, np.log(sums)
        d_weights = d_out[b, :, h] @ v.T
        mean = np.sum(weights * d_weights, axis=1, keepdims=True)
        d_logits = scale * slope * weights * (d_weights - mean)
        gradients = d_logits @ k, d_logits.T @ q, weights.T @ d_out[b, :, h]
        for row, gradient in zip(rows, gradients, strict=True):
            d_qkv[b, :, row] += gradient
    return out, log_sums, d_qkv


def by_kernels(module, qkv, d_out, options, kv_heads=None, window=None, cap=None, **static):
    """What `numpy_attention` gives, by the interpreted kernels, or by a module of plain JAX."""
    of_logits = {"window": window and Window(window), "cap": cap and Cap(cap)}
    given = AttentionOperands(qkv, **options, **of_logits)
    kernel = ({} if module is online else {"interpret": True}) | static
    if module is not mosaic_tpu_whole:  # which has as many heads of keys as of queries
        kernel["kv_heads"] = kv_heads or d_out.shape[2]
    out, log_sums = module.attention_forward(given, **kernel)
    gradient = module.attention_backward(given, ResultsAndCotangent(out, log_sums, d_out), **kernel)
    return out, log_sums, gradient if module is mosaic_tpu_whole else gradient[0]


class Case(NamedTuple):
    """`shape`: batch, length, heads of queries and their size; `options` of the implementation."""

    shape: tuple[int, int, int, int]
    dtype: str
    alibi: bool = False
    segments: bool = False
    kv_heads: int | None = None
    options: tuple[tuple[str, Any], ...] = ()
    window: int | None = None
    cap: float | None = None

    @property
    def name(self) -> str:
        flags = ["alibi"] * self.alibi + ["segments"] * self.segments
        flags += [f"{self.kv_heads}keys"] * (self.kv_heads is not None)
        flags += [f"window{self.window}"] * (self.window is not None)
        flags += [f"cap{self.cap}"] * (self.cap is not None)
        flags += [x for _, x in self.options if isinstance(x, str)]
        return "-".join(["x".join(map(str, self.shape)), self.dtype, *flags])


def by_tier(cases: Iterable[Case], *quick: Case) -> list:
    """All cases, of which all but the quick are for the night."""
    cases = list(cases)
    assert set(quick) <= set(cases)
    marks = lambda case: () if case in quick else pytest.mark.slow
    return [pytest.param(case, marks=marks(case)) for case in cases]


class Battery:
    """`sums` is the dtype that the log sums are as near as."""

    module: ClassVar[ModuleType]
    cases: ClassVar[list]
    sums: ClassVar[str] = "float32"

    def pytest_generate_tests(self, metafunc):
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.cases, ids=lambda case: case.name)

    def test_equals_numpy(self, case):
        static = {"kv_heads": case.kv_heads, "window": case.window, "cap": case.cap}
        flags = {"alibi": case.alibi, "segments": case.segments, "kv_heads": case.kv_heads}
        qkv, d_out, options = arguments(*case.shape, case.dtype, **flags)
        run = functools.partial(by_kernels, self.module, **static, **dict(case.options))
        out, log_sums, gradient = jax.jit(run)(qkv, d_out, options)
        assert out.dtype == gradient.dtype == case.dtype and log_sums.dtype == jnp.float32
        expected = numpy_attention(qkv, d_out, **options, **static)
        tolerance = TOLERANCE[case.dtype]
        assert_close((out, gradient), expected[::2], tolerance)
        assert_close(log_sums, expected[1], TOLERANCE[self.sums])
