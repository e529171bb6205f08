"""A mixer and a core in the fewest lines, as docs/guides/add_*.md tells how to add them.

`FILES` is all that is touched: a new file, or what is there once and what takes its place.
"""

CORE_CONFIG = '''@dataclass(frozen=True)
class Average(Computes):
    """A token gets the mean of what the tokens up to it have read, over the whole window."""

    kind: ClassVar[str] = "average"
    letter: ClassVar[str] = "V"
    reads: ClassVar[Port] = RESIDUAL_PORT
    writes: ClassVar[Port] = RESIDUAL_PORT
    divided_heads: ClassVar[dict[str, int]] = {}

    def parameters(self, width: int, read_width: int) -> int:
        """None."""
        return 0

    def flops(self, width: int, read_width: int, seq_len: int) -> int:
        """Of one token: a sum and a division of each number."""
        return 2 * read_width


'''

CORE = '''"""The mean of all tokens so far: `y_n = sum over m <= n of z_m / n`."""

from typing import ClassVar

import jax.numpy as jnp

from rmt_tpu import config as cfg
from rmt_tpu.cores.core import Context, Core, Index
from rmt_tpu.layers.data_vectors import Read


class Average(Core):
    """The core of `config.Average`. Decoding keeps the sum of the tokens so far."""

    name: ClassVar[str] = "average"

    def __init__(self, config: cfg.ModelConfig):
        self.data_shape = config.data_shape

    def __call__(self, z: Read, context: Context, index: Index):
        return self._mean(jnp.cumsum(z.residual, axis=1), context)

    def empty_cache(self, repeat, batch, capacity, dtype):
        return jnp.zeros((repeat, batch, *self.data_shape), dtype)

    def step(self, z: Read, context: Context, index: Index, cache, layer):
        sums = cache[layer][:, None] + jnp.cumsum(z.residual, axis=1)
        last = sums[:, -1]
        if context.lengths is not None:
            last = sums[jnp.arange(len(sums)), context.lengths - 1]
        return self._mean(sums, context), cache.at[layer].set(last)

    def _mean(self, sums, context):
        return sums / (1 + context.query_positions[..., None, None]).astype(sums.dtype)
'''

MIXER_CONFIG = '''@dataclass(frozen=True)
class Damped(System):
    """The standard residual, of which every write leaves `kept`."""

    kind: ClassVar[str] = "damped"
    on_matrix: ClassVar[bool] = True
    kept: Share = 0.9


'''

MIXER = '''"""A residual that forgets: `h <- kept * h + write(y)`."""

from flax import nnx

from rmt_tpu import config as cfg


class Damped(nnx.Module):
    """The mixer of `config.Damped`."""

    def __init__(self, config: cfg.ModelConfig):
        self.kept = config.mixer.kept

    def start(self, store, state, y):
        return store.hold(state), y

    def advance(self, store, state, y, site, index):
        state = store.write(self.kept * state, y, site.writer)
        return state, store.read(state, site, y.dtype)
'''


def _before(line: str, text: str) -> tuple[str, str]:
    return line, text + line


FILES = {
    # A core.
    "rmt_tpu/config/cores.py": [
        _before("Core = Attention | ", CORE_CONFIG),
        ("Core = Attention | ", "Core = Average | Attention | "),
    ],
    "rmt_tpu/cores/average.py": CORE,
    "rmt_tpu/cores/__init__.py": [
        _before("from rmt_tpu.cores.core", "from rmt_tpu.cores.average import Average\n"),
        _before(
            "        case cfg.FeedForward():",
            "        case cfg.Average():\n            return Average(config)\n",
        ),
    ],
    # A mixer.
    "rmt_tpu/config/mixers.py": [
        _before("Mixer = (\n", MIXER_CONFIG),
        _before("    | FullAttention\n", "    | Damped\n"),
        _before("from rmt_tpu.config.depth_mixers", "from rmt_tpu.config.checks import Share\n"),
    ],
    "rmt_tpu/residual/damped.py": MIXER,
    "rmt_tpu/residual/__init__.py": [
        _before("from rmt_tpu.residual.dense", "from rmt_tpu.residual.damped import Damped\n"),
        _before(
            "        case cfg.Dense():",
            "        case cfg.Damped():\n            return Damped(config)\n",
        ),
    ],
    # Both by their short names.
    "rmt_tpu/config/__init__.py": [
        _before("    Attention,\n", "    Average,\n"),
        _before("    Dense,\n", "    Damped,\n"),
    ],
}
