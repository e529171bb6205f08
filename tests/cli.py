"""Recipes as a person runs them: each in a process of its own."""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rmt_tpu.training.metrics import read_metrics, series

ROOT = Path(__file__).parents[1]

# What the runs of one session share: the text, and what was compiled for an earlier run.
_SCRATCH = Path(tempfile.mkdtemp(prefix="rmt-cli-"))
atexit.register(shutil.rmtree, _SCRATCH, ignore_errors=True)

STEPS = 48
TEXT = _SCRATCH / "text.txt"
TEXT.write_text("the quick brown fox jumps over the lazy dog.\n" * 200, encoding="utf-8")

# Small enough for seconds, and the same everywhere, so that it is compiled once.
TINY = (
    "--set=model.num_layers=2",
    "--set=model.feed_forward.hidden_dim=32",
    "--set=model.attention.num_heads=2",
    "--set=model.attention.head_dim=8",
    "--set=model.attention.positions=learned",
    "--set=model.attention.positions.max_length=64",
    "--set=train.sample_tokens=8",
    "--seq_len=16",
    "--batch_size=4",
    f"--steps={STEPS}",
    f"--data={TEXT}",
)

# The numbers of a run that must not depend on how often it was interrupted.
CURVES = ("train/loss", "train/z_loss", "optim/grad_norm", "optim/learning_rate", "eval/loss")

_RUN = """
import runpy, sys
recipe = sys.argv.pop(1)
exec(sys.argv.pop(1))
runpy.run_module(f"recipes.{recipe}", run_name="__main__", alter_sys=True)
"""


def environment(*, devices: int = 1, read_only_cache: bool = False) -> dict[str, str]:
    """Of a recipe's process: warnings are errors, and programs are compiled once a session."""
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f]
    flags.append(f"--xla_force_host_platform_device_count={devices}")
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(flags),
        "JAX_COMPILATION_CACHE_DIR": str(_SCRATCH / "cache"),
        # A killed process would leave half an entry for the next one.
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9" if read_only_cache else "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONWARNINGS": "error",
    }


def run(
    recipe: str, *flags: str, env: dict[str, str] | None = None, devices: int = 1, timeout=300
) -> subprocess.CompletedProcess[str]:
    """The outcome of a recipe; `env` is set beside what `environment` sets."""
    return subprocess.run(
        [sys.executable, "-m", f"recipes.{recipe}", *flags],
        cwd=ROOT,
        env=environment(devices=devices) | (env or {}),
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
    )


def start(recipe: str, *flags: str, first: str = "") -> subprocess.Popen[str]:
    """A recipe that a test interrupts; `first` is Python that its process runs before it."""
    return subprocess.Popen(
        [sys.executable, "-c", _RUN, recipe, first, *flags],
        cwd=ROOT,
        env=environment(read_only_cache=True),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def succeed(recipe: str, *flags: str, **options) -> subprocess.CompletedProcess[str]:
    """A run that must end well."""
    done = run(recipe, *flags, **options)
    assert done.returncode == 0, done.stderr
    return done


def train(workdir: Path, *flags: str, preset: str = "rmt-tiny", **options) -> Path:
    """Trains the tiny model; returns its run folder."""
    succeed("train", f"--preset={preset}", *TINY, *flags, f"--workdir={workdir}", **options)
    return workdir


def fail(recipe: str, *flags: str, code: int = 2, **options) -> str:
    """The line that a run which must fail ends with; there is nothing else but progress."""
    done = run(recipe, *flags, **options)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr, done.stderr
    lines = done.stderr.splitlines()
    errors = [line for line in lines if line.startswith("error:")]
    assert len(errors) == 1 and errors[0] == lines[-1], done.stderr
    return errors[0]


def curves(workdir: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Steps and values of each of CURVES."""
    rows = read_metrics(workdir)
    return {name: series(rows, name) for name in CURVES}


def damage(workdir: Path, step: int) -> None:
    """Flips a bit of the unembedding in a checkpoint."""
    (chunk,) = workdir.glob(f"checkpoints/{step}/*/arrays/params/unembedding/kernel/c/0/0")
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 1
    chunk.write_bytes(content)
