"""GPT-2 in the hub's format, with its own names for fields and tensors.

This module does not import JAX.
"""

from collections.abc import Iterator
from typing import Any

from rmt_tpu import config as cfg
from rmt_tpu.hub.fields import Fields
from rmt_tpu.hub.pieces import Piece, Place, full, joined, places

ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_exact"}


def model_config(config_fields: Fields, most_layers: int) -> cfg.ModelConfig:
    """Convert the config.json of a GPT-2 model to a model config.

    Raises:
      UsageError: the model needs an operation that is not supported here.
    """
    config_fields.only("scale_attn_weights", True)
    config_fields.only("add_cross_attention", False)
    config_fields.only("quantization_config", None)
    width, heads = config_fields.size("n_embd"), config_fields.size("n_head")
    if width % heads:
        raise config_fields.wrong("n_head", heads, f"a divisor of n_embd={width}")
    layers = config_fields.size("n_layer")
    if layers > most_layers:
        raise config_fields.wrong("n_layer", layers, f"at most {most_layers}")
    attention = cfg.Attention(
        heads,
        width // heads,
        cfg.Learned(config_fields.size("n_positions")),
        inverse_layer_scaling=config_fields.flag("scale_attn_by_inverse_layer_idx"),
        bias=True,
        output_bias=True,
    )
    activation = config_fields.lookup("activation_function", ACTIVATIONS)
    hidden = config_fields.size("n_inner", 4 * width)
    return cfg.ModelConfig(
        (cfg.Stack((attention, cfg.FeedForward(hidden, activation, bias=True)), layers),),
        cfg.VectorStore(width),
        vocab_size=config_fields.size("vocab_size"),
        norm="layernorm",
        norm_epsilon=config_fields.positive("layer_norm_epsilon", 1e-5),
        norm_bias=True,
    )


def config_values(
    model: cfg.ModelConfig, attention: cfg.Attention, feed_forward: cfg.FeedForward, layers: int
) -> dict[str, Any]:
    """Return the fields of config.json for a model that has these two cores in every layer."""
    activations = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    positions = model.learned_positions
    return {
        "n_embd": model.store.dim,
        "n_inner": feed_forward.hidden_dim,
        "n_layer": layers,
        "n_head": attention.num_heads,
        "n_positions": positions.max_length if positions else 1,
        "activation_function": activations.get(feed_forward.activation, "gelu_new"),
        "layer_norm_epsilon": model.norm_epsilon,
        "scale_attn_by_inverse_layer_idx": attention.inverse_layer_scaling,
        "vocab_size": model.vocab_size,
    }


def pieces(model: cfg.ModelConfig) -> Iterator[Piece]:
    """Yield all tensors of a GPT-2 model, as slices of parameters.

    The stored matrices have the same layout as the parameters: [in, out].
    """
    dim, vocab = model.store.dim, model.vocab_size
    base = "transformer."
    length = model.learned_positions.max_length
    yield Piece(f"{base}wte.weight", ("embedding", "tokens"), full(vocab, dim))
    yield Piece(f"{base}wpe.weight", ("embedding", "positions"), full(length, dim))
    for end, name in (("weight", "gain"), ("bias", "bias")):
        yield Piece(f"{base}ln_f.{end}", ("final_site", name), full(dim))
    yield Piece("lm_head.weight", ("unembedding", "kernel"), full(dim, vocab), True)
    sublayers = list(places(model))
    for layer, (attention, mlp) in enumerate(zip(sublayers[::2], sublayers[1::2], strict=True)):
        yield from _layer(f"{base}h.{layer}.", attention, mlp, dim)


def _layer(name: str, attention: Place, mlp: Place, dim: int) -> Iterator[Piece]:
    def piece(place: Place, ours: str, theirs: str, *sizes: int) -> Piece:
        return place.piece(f"{name}{theirs}", ours, *full(*sizes), transposed=False)

    for place, norm in ((attention, "ln_1"), (mlp, "ln_2")):
        yield piece(place, "site/gain", f"{norm}.weight", dim)
        yield piece(place, "site/bias", f"{norm}.bias", dim)
    heads, size = attention.core.num_heads, attention.core.head_dim
    hidden = mlp.core.hidden_dim
    queries_keys_values = [
        attention.piece(
            f"{name}attn", "site/read", (k, k + 1), *full(dim, heads * size), transposed=False
        )
        for k in range(3)
    ]
    yield from joined(f"{name}attn.c_attn.weight", queries_keys_values, axis=1)
    yield piece(attention, "core/bias", "attn.c_attn.bias", 3 * heads, size)
    yield piece(attention, "core/w_out", "attn.c_proj.weight", heads * size, dim)
    yield piece(attention, "core/output_bias", "attn.c_proj.bias", dim)
    yield piece(mlp, "core/w_1", "mlp.c_fc.weight", dim, hidden)
    yield piece(mlp, "core/b_1", "mlp.c_fc.bias", hidden)
    yield piece(mlp, "core/w_2", "mlp.c_proj.weight", hidden, dim)
    yield piece(mlp, "core/b_2", "mlp.c_proj.bias", dim)
