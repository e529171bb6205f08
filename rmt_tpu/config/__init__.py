"""What a run is: frozen dataclasses, nested. A choice between systems is a choice between classes.

Every class of a choice carries a `kind`, the name it has in JSON and on the command line
(`--set=model.store=vector`, `--set=model.attention.positions=rope`).
"""

from rmt_tpu.config.core import WHOLE, Port
from rmt_tpu.config.cores import (
    Alibi,
    Attention,
    Core,
    FeedForward,
    Kda,
    Learned,
    Llama3Scaling,
    Mla,
    NoPositions,
    Positions,
    Rope,
    Stack,
    stacks,
)
from rmt_tpu.config.experts import (
    HISTOGRAM_BINS,
    Balance,
    BalanceLoss,
    Experts,
    Quantiles,
    SignRule,
)
from rmt_tpu.config.mixers import (
    BlockAttention,
    Dense,
    DepthLstm,
    FullAttention,
    Hierarchical,
    Highway,
    HyperConnections,
    Mhc,
    MhcLite,
    Mixer,
    Sum,
)
from rmt_tpu.config.model import (
    Kernels,
    ModelConfig,
    MuP,
    Parametrization,
    RematPolicy,
    Standard,
)
from rmt_tpu.config.resume import (
    resume_rule,
)
from rmt_tpu.config.run import (
    COUNTED,
    AdamW,
    DataConfig,
    Muon,
    Role,
    RunConfig,
    TrainConfig,
)
from rmt_tpu.config.stores import (
    DType,
    MatrixStore,
    StateDType,
    Store,
    VectorStore,
)

__all__ = [
    "COUNTED",
    "HISTOGRAM_BINS",
    "WHOLE",
    "AdamW",
    "Muon",
    "Alibi",
    "Attention",
    "Balance",
    "BalanceLoss",
    "BlockAttention",
    "Core",
    "DType",
    "DataConfig",
    "Dense",
    "DepthLstm",
    "Experts",
    "FeedForward",
    "FullAttention",
    "Hierarchical",
    "Highway",
    "HyperConnections",
    "Kda",
    "Learned",
    "Llama3Scaling",
    "MatrixStore",
    "Mhc",
    "MhcLite",
    "Mla",
    "Mixer",
    "ModelConfig",
    "MuP",
    "NoPositions",
    "Parametrization",
    "Port",
    "Positions",
    "Kernels",
    "Quantiles",
    "RematPolicy",
    "Role",
    "Rope",
    "RunConfig",
    "SignRule",
    "Standard",
    "Stack",
    "StateDType",
    "Store",
    "Sum",
    "TrainConfig",
    "VectorStore",
    "resume_rule",
    "stacks",
]
