"""Parameter and FLOP counts of a model, computed from its config alone.

The formulas come from appendix A of Mak and Flanigan (2025), Table 7 and sections A.1 and A.2. Two
corrections are needed to reproduce the printed results (Table 4, Figure 1). First, parameters
include the embedding and the unembedding. Second, the key vectors of a layer cost `12 R D_k D_v`
FLOPs per token, as A.2 lists them. A multiplication and an addition are two FLOPs; a backward pass
costs twice the forward pass.

For mixers the count includes matrix products, weighted sums of residuals and inner products of
residuals. It leaves out norms, activations, elementwise products with gates, and sums without
weights.
"""

import itertools
from collections.abc import Iterator

from rmt_tpu.config import RESIDUAL_PORT, Core, ModelConfig, Port


def peak_flops(device_kind: str) -> float | None:
    """Return the dense bfloat16 peak that a device's vendor states, in FLOP/s, or None if unknown.

    If a chip appears as two devices, the peak of each is half of the chip's peak.
    """
    # This import loads jax, which the other functions of this module do not need.
    from pallas_kernels.target import chip_of

    device = chip_of(device_kind)
    return device and device.peak_flops


def parameters(config: ModelConfig) -> dict[str, int]:
    """Return a dict from each part of the model to its number of parameters."""
    width, store, shape = config.width, config.store, config.data_shape
    learned = config.learned_positions
    positions = learned.max_length * width if learned else 0
    # The embedding and learned positions are also written to the residual, and the unembedding
    # reads it.
    ports = [*_ports(config), (RESIDUAL_PORT, 2), *([(RESIDUAL_PORT, 1)] if learned else [])]
    core_parameters: dict[str, int] = {}
    for core, read, count in _cores(config):
        added = count * core.parameters(width, read)
        core_parameters[core.kind] = core_parameters.get(core.kind, 0) + added
    # A norm is applied to the residual before each sublayer that reads a normed residual.
    normed = sum(core.reads.normed for core in config.sublayers)
    sites = normed + 1 if config.mixer.adds_up else 1
    return {
        "embedding": config.vocab_size * width + positions,
        "reads_and_writes": sum(n * store.parameters(port, shape) for port, n in ports),
        **{kind: weights for kind, weights in core_parameters.items() if weights},
        "norms": sites * (1 + config.norm_bias) * config.residual_size,
        "mixer": config.mixer.parameters(config),
        "unembedding": 0 if config.tied_embeddings else config.vocab_size * width,
    }


def active_parameters(config: ModelConfig) -> int:
    """Return the number of parameters that are used to process one token.

    The embedding, the unembedding, and the experts that the token does not use are not counted.
    """
    parts = parameters(config)
    idle = sum(
        count * (core.parameters(config.width, read) - core.active_parameters(config.width, read))
        for core, read, count in _cores(config)
    )
    return sum(parts.values()) - parts["embedding"] - parts["unembedding"] - idle


def forward_flops(config: ModelConfig, seq_len: int) -> dict[str, int]:
    """Return the forward FLOPs per token in a window of `seq_len` tokens, for each part of a model.

    Every token counts as attending to all `seq_len` tokens, or to a full sliding window if that is
    shorter. The causal mask is ignored, as in the RMT paper. The part "embedding" counts the
    look-up as a matrix product, as in the paper's Figure 1.
    """
    width, vocab, store, shape = config.width, config.vocab_size, config.store, config.data_shape
    parts: dict[str, int] = {}
    for core, read, count in _cores(config):
        parts[core.kind] = parts.get(core.kind, 0) + count * core.flops(width, read, seq_len)
    residual_read = store.flops(RESIDUAL_PORT, shape)
    residual_writes = (1 + (config.learned_positions is not None)) * residual_read
    return {
        "embedding": 2 * vocab * width + residual_writes,
        "reads_and_writes": sum(n * store.flops(port, shape) for port, n in _ports(config)),
        **parts,
        "mixer": config.mixer.flops(config),
        "unembedding": 2 * vocab * width + residual_read,
    }


def non_embedding_flops(config: ModelConfig, seq_len: int) -> int:
    """Return the forward FLOPs per token without embedding and unembedding.

    Tables 3 and 4 of the RMT paper give this number.
    """
    flops = forward_flops(config, seq_len)
    return sum(flops.values()) - flops["embedding"] - flops["unembedding"]


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Return the forward FLOPs of a token that attends to `seq_len` tokens, without the embedding.

    A FLOP budget counts this number of FLOPs for every token, as in the RMT paper.
    """
    return non_embedding_flops(config, seq_len) + forward_flops(config, seq_len)["unembedding"]


def causal_flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Return the mean forward FLOPs per token in a window with a causal mask.

    The model FLOPs utilisation (MFU) is computed from this number.

    The FLOPs of a token are linear in its position until a sliding window of some layer becomes
    full, and linear again after that. The mean over such a range of tokens is therefore the mean of
    its first and its last token.
    """
    windows = {core.softmax.window for core in config.cores if core.softmax is not None}
    ends = sorted({1, seq_len} | {w for w in windows if w is not None and w < seq_len})
    twice = 2 * flops_per_token(config, 1)
    for last, end in itertools.pairwise(ends):
        twice += (end - last) * (flops_per_token(config, last + 1) + flops_per_token(config, end))
    return twice // (2 * seq_len)


def train_flops(forward: int, tokens: int | float) -> int | float:
    """Return the FLOPs of training on `tokens` tokens: the forward and the backward pass.

    Args:
      forward: the forward FLOPs per token.
      tokens: the number of tokens.
    """
    return 3 * forward * tokens


def _ports(config: ModelConfig) -> list[tuple[Port, int]]:
    """Return the ports of all cores, each with the number of sublayers that use it.

    A port describes the vectors that a core reads or writes.
    """
    counts = [(core, count) for core, _, count in _cores(config)]
    return [(port, n) for core, n in counts for port in (core.reads, core.writes)]


def _cores(config: ModelConfig) -> Iterator[tuple[Core, int, int]]:
    """Yield the core and the input width of each sublayer, and how often the sublayer is repeated.

    A stack repeats a pattern of sublayers. Each sublayer of the pattern is yielded once.
    """
    first = 0
    for stack in config.stacks:
        for k, core in enumerate(stack.cores):
            widths = config.mixer.second_input if (first + k) % 2 else 1
            yield core, config.width * widths, stack.repeat
        first += stack.num_sublayers
