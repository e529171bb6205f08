"""Which implementations of the ops a model runs: `ModelConfig.kernels`."""

import contextlib

from pallas_kernels.platform import preferring
from rmt_tpu import config as cfg


def preferred(config: cfg.ModelConfig) -> contextlib.AbstractContextManager[None]:
    """Within, ops that are asked for no implementation take the config's; "auto" changes nothing.

    A backward pass is traced where the gradient is taken, and takes it where that is within too.
    """
    return contextlib.nullcontext() if config.kernels == "auto" else preferring(config.kernels)
