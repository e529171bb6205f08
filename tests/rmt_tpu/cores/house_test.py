"""Who may ask what class a core, a store or a mixer is: its config, and where one is made."""

import re
from pathlib import Path
from typing import get_args

from rmt_tpu import config as cfg

ROOT = Path(__file__).parents[3]
MADE = {"rmt_tpu/cores/__init__.py", "rmt_tpu/residual/__init__.py"}
MADE |= {"rmt_tpu/residual/hyper_connections.py"}  # whose kinds share a module
CHOICES = [choice.__name__ for choice in get_args(cfg.Core | cfg.Store | cfg.Mixer)]
ASKS = re.compile(rf"(isinstance\(.*|case )(cfg\.)?\b({'|'.join(CHOICES)})\b")


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
    for number, line in enumerate(["if isinstance(x.store, cfg.MatrixStore):", "case Mla():"]):
        (tmp_path / "rmt_tpu" / f"{number}.py").write_text(line)
    (tmp_path / "rmt_tpu" / "not.py").write_text("store = cfg.MatrixStore(8)")
    assert askers(tmp_path) == {"rmt_tpu/0.py", "rmt_tpu/1.py"}
