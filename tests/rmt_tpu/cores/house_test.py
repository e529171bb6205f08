"""Who may ask which core, store or mixer one is: its config, and where one is made."""

import re
from pathlib import Path
from typing import get_args

from rmt_tpu import config as cfg

ROOT = Path(__file__).parents[3]
MADE = {"rmt_tpu/cores/__init__.py", "rmt_tpu/residual/__init__.py"}
MADE |= {"rmt_tpu/residual/hyper_connections.py"}  # whose kinds share a module
# Formats of the hub are those of some stores, mixers and cores.
MADE |= {f"rmt_tpu/hub/{name}.py" for name in ("attnres", "kimi_k3", "latent_pieces", "models")}
# The PyTorch code of exported folders reads config.json, and cannot import this package.
MADE |= {f"rmt_tpu/hub/torch/{name}.py" for name in ("modeling_rmt_tpu", "modeling_rmt_tpu_more")}
CHOICES = get_args(cfg.Core | cfg.Store | cfg.Mixer)
CLASSES = "|".join(choice.__name__ for choice in CHOICES)
KINDS = "|".join(choice.kind for choice in CHOICES)
ASKS = re.compile(
    rf"""(isinstance\(.*|case\ )(cfg\.)?\b({CLASSES})\b  # by its class
    | \bmatch\ [\w.]*\b(core|store|mixer)(\.kind)?:
    | \bkind\b[^"]*["']({KINDS})["']  # by its name: compared, or in a tuple
    | ["']({KINDS})["']\ *[!=]=
    | \bcase\ .*["']({KINDS})["']""",
    re.VERBOSE,
)


def askers(root):
    return {
        str(path.relative_to(root))
        for package in ("rmt_tpu", "recipes", "sharding", "pallas_kernels")
        for path in (root / package).rglob("*.py")
        if path.parent != root / "rmt_tpu" / "config"
        and any(map(ASKS.search, path.read_text(encoding="utf-8").splitlines()))
    }


def test_nobody_else_asks():
    assert askers(ROOT) == MADE


def test_who_asks_is_found(tmp_path):
    (tmp_path / "rmt_tpu").mkdir()
    asks = [
        "if isinstance(x.store, cfg.MatrixStore):",
        "case Mla():",
        "match config.mixer.kind:",
        "match store:",
        "return model.mixer.kind == 'sum'",
        'if kind in ("mla", "highway"):',
        'if "dense" != system:',
        'case "none" | "full_attention":',
    ]
    for number, line in enumerate(asks):
        (tmp_path / "rmt_tpu" / f"{number}.py").write_text(line)
    no = ["store = cfg.MatrixStore(8)", "match mixer.form:", 'if work.kind == "matmul":']
    (tmp_path / "rmt_tpu" / "not.py").write_text("\n".join(no))
    assert askers(tmp_path) == {f"rmt_tpu/{number}.py" for number in range(len(asks))}
