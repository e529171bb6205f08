"""The features that Kimi K3 adds to Kimi Linear, in the hub's format.

The text model of a `kimi_k3` is a `kimi_linear` with additional fields. They describe attention
over depth, output gates, bounded decays, the activation SiTU and latent experts. The matrices of
experts may be packed as MXFP4 (see `rmt_tpu.hub.packed`). This package accepts these fields in any
`kimi_linear`. Only the text model of a `kimi_k3` is opened, and it is exported as `kimi_linear`.

This module does not import JAX.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from rmt_tpu import config as cfg
from rmt_tpu.errors import UsageError
from rmt_tpu.hub.fields import Fields
from rmt_tpu.hub.pieces import Piece, Place, full

FIELDS = """
    activation_situ_beta activation_situ_linear_beta attn_res_block_size latent_moe_use_norm
    mla_use_output_gate routed_expert_hidden_size
""".split()
# The transformers library may write these fields for any model. Kimi models do not use them.
FIELDS += """
    add_cross_attention bad_words_ids begin_suppress_tokens chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label is_decoder is_encoder_decoder label2id
    length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores prefix problem_type
    pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss
    tie_encoder_decoder tokenizer_class top_k top_p torchscript typical_p use_bfloat16
""".split()
LINEAR_FIELDS = ("gate_lower_bound", "use_full_rank_gate")
_PACKED = "mxfp4-pack-quantized"
_ACTIVATIONS = {"silu": "swiglu", "situ": "situ"}


# Reading fields of a config.json -------------------------------------------------------------


def read_activation(fields: Fields) -> dict[str, Any]:
    """Read the activation options of feed-forward layers and experts.

    If SiTU's bounds are missing or null, `situ_beta` is 1 and `situ_linear_beta` is None (no
    bound), as in the model's own code.
    """
    activation = fields.lookup("hidden_act", _ACTIVATIONS)
    if activation != "situ":
        return {"activation": activation}
    linear = "activation_situ_linear_beta"
    return {
        "activation": activation,
        "situ_beta": fields.positive_or("activation_situ_beta", 1.0),
        "situ_linear_beta": fields.positive(linear) if fields.has(linear) else None,
    }


def read_latent(fields: Fields) -> dict[str, Any]:
    """Read the options of latent experts; {} if the experts have no latent size."""
    if not fields.has("routed_expert_hidden_size"):
        return {}
    return {
        "latent_dim": fields.size("routed_expert_hidden_size"),
        "latent_norm": fields.flag("latent_moe_use_norm"),
    }


def read_linear(inside: Fields) -> dict[str, Any]:
    """Read the options of Kimi Delta Attention from `linear_attn_config`.

    Raises:
      UsageError: the lower bound of log decays is less than -100, or not negative.
    """
    gates = "full" if inside.flag("use_full_rank_gate") else "low_rank"
    if not inside.has("gate_lower_bound"):
        return {"gates": gates}
    bound = inside.number("gate_lower_bound")
    if not -100 <= bound < 0:
        raise inside.wrong("gate_lower_bound", bound, "null, or a negative number, at least -100")
    return {"gates": gates, "lower_bound": bound}


def read_mixer(fields: Fields, layers: int) -> cfg.Sum | cfg.BlockAttention:
    """Return the config of attention over depth, or `Sum` if the fields have no block size."""
    if not fields.has("attn_res_block_size"):
        return cfg.Sum()
    size = fields.size("attn_res_block_size")
    if size > layers:
        raise fields.wrong("attn_res_block_size", size, f"at most num_hidden_layers={layers}")
    return cfg.BlockAttention(layers_per_block=size, epsilon=fields.positive("rms_norm_eps"))


def is_packed(fields: Fields) -> bool:
    """Return whether the matrices of the routed experts are packed as MXFP4.

    Raises:
      UsageError: the config names a different quantization.
    """
    if not fields.has("quantization_config"):
        return False
    whole = fields.inside("quantization_config")
    groups = whole.inside("config_groups")
    if len(groups.names()) != 1:
        raise whole.wrong("config_groups", groups.names(), "a single group")
    group = groups.inside(groups.names()[0])
    (group if group.has("format") else whole).only("format", _PACKED)
    weights = group.inside("weights")
    for name, legal in (("num_bits", 4), ("group_size", 32), ("type", "float")):
        weights.only(name, legal)
    return True


# Writing fields of a config.json -------------------------------------------------------------


def config_values(
    model: cfg.ModelConfig, latent: cfg.Mla, experts: cfg.Experts, dense: cfg.FeedForward
) -> dict[str, Any]:
    """Return the config.json fields for the features that Kimi K3 adds to Kimi Linear.

    Args:
      model: the model.
      latent, experts, dense: the model's first latent attention, experts and feed-forward core.

    Raises:
      UsageError: the fields cannot express the model's mixer; the message names the option.
    """
    values: dict[str, Any] = {}
    situ = next((core for core in (dense, experts) if core.activation == "situ"), None)
    if situ is not None:
        values |= {
            "hidden_act": "situ",
            "activation_situ_beta": situ.situ_beta,
            "activation_situ_linear_beta": situ.situ_linear_beta,
        }
    if experts.latent_dim is not None:
        values["routed_expert_hidden_size"] = experts.latent_dim
        values["latent_moe_use_norm"] = experts.latent_norm
    if latent.output_gate:
        values["mla_use_output_gate"] = True
    return values | _mixer_values(model)


def _mixer_values(model: cfg.ModelConfig) -> dict[str, Any]:
    mixer = model.mixer
    if isinstance(mixer, cfg.Sum):
        return {}
    if not isinstance(mixer, cfg.BlockAttention):
        raise _not_expressed("model.mixer", mixer.kind, "sum, block_attention")
    found = cfg.BlockAttention(epsilon=model.norm_epsilon)
    sizes = ("num_blocks", "sublayers_per_block", "layers_per_block")
    for name in (field.name for field in dataclasses.fields(mixer)):
        value, legal = getattr(mixer, name), getattr(found, name)
        if name not in sizes and value != legal:
            raise _not_expressed(f"model.mixer.{name}", value, legal)
    block = mixer.sublayers_a_block(model.num_sublayers)
    if block % 2:
        raise _not_expressed("model.mixer.sublayers_per_block", block, "an even number")
    return {"attn_res_block_size": block // 2}


def _not_expressed(name: str, value: object, legal: object) -> UsageError:
    return UsageError(
        f"{name}={value} cannot be written as kimi_linear; legal: {legal}, or this "
        "package's own kind, rmt_tpu (recipes.export --kind=rmt_tpu)"
    )


def linear_values(net: cfg.Kda) -> dict[str, Any]:
    """Return the fields that Kimi K3 adds to `linear_attn_config`."""
    values: dict[str, Any] = {} if net.gates == "low_rank" else {"use_full_rank_gate": True}
    return values if net.lower_bound is None else values | {"gate_lower_bound": net.lower_bound}


# Mapping tensors to parameters ---------------------------------------------------------------


def site_pieces(layer: str, place: Place, sublayer: str, dim: int) -> Iterator[Piece]:
    """Yield the query and the key gain of attention over depth before a sublayer."""
    name = f"{layer}{sublayer}_res_"
    query = place.piece(f"{name}proj.weight", "site/mix/query", (0, dim), transposed=False)
    yield query
    yield place.piece(f"{name}norm.weight", "site/mix/key_gain", (0, dim))


def output_pieces(dim: int) -> Iterator[Piece]:
    """Yield the query and the key gain of attention over depth before the unembedding."""
    path = ("final_site", "mix")
    yield Piece("model.output_attn_res_proj.weight", (*path, "query"), full(dim))
    yield Piece("model.output_attn_res_norm.weight", (*path, "key_gain"), full(dim))


def latent_pieces(name: str, place: Place, dim: int) -> Iterator[Piece]:
    """Yield the two projections of latent experts and, if they have a norm, its gain."""
    size = place.core.latent_dim
    if size is None:
        return
    yield place.piece(f"{name}routed_expert_down_proj.weight", "core/w_down", *full(dim, size))
    yield place.piece(f"{name}routed_expert_up_proj.weight", "core/w_up", *full(size, dim))
    if place.core.latent_norm:
        yield place.piece(f"{name}routed_expert_norm.weight", "core/latent_gain", (0, size))
