"""Kimi K3 of the hub: a random tiny one against its equations, in and out, with packed experts."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

import rmt_tpu
from rmt_tpu import config as cfg
from rmt_tpu.errors import RunError, UsageError
from rmt_tpu.hub import packed, weights
from rmt_tpu.hub.folder import export
from rmt_tpu.hub.models import describe, model_config
from tests.rmt_tpu.hub import oracle_k3
from tests.rmt_tpu.hub.folders import TOKENS, exact_logits, same, written

QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "group_size": 32, "type": "float", "symmetric": True},
        }
    },
    "ignore": ["lm_head"],
}
TEXT = {
    "model_type": "kimi_linear",
    "vocab_size": 257,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_experts": 6,
    "num_experts_per_token": 3,
    "num_shared_experts": 2,
    "moe_intermediate_size": 64,
    "routed_expert_hidden_size": 96,
    "latent_moe_use_norm": True,
    "hidden_act": "situ",
    "activation_situ_beta": 0.7,
    "activation_situ_linear_beta": 1.2,
    "routed_scaling_factor": 1.3,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "attn_res_block_size": 2,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "q_lora_rank": 6,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 8,
        "short_conv_kernel_size": 3,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
        "kda_layers": [1, 3, 4],
        "full_attn_layers": [2, 5],
    },
    "rms_norm_eps": 1e-3,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "chunk_size_feed_forward": 0,
    "quantization_config": QUANTIZATION,
}
CONFIG = {"model_type": "kimi_k3", "text_config": TEXT, "vision_config": {"vt_hidden_size": 8}}


def test_in_and_out(tmp_path):
    """The logits of the equations; and out as a kimi_linear without packed experts, and in."""
    tensors = oracle_k3.drawn(CONFIG)
    folder = written(tmp_path / "hub", CONFIG, tensors)
    decoder, tokenizer = rmt_tpu.load(folder)
    assert decoder.config.mixer == cfg.BlockAttention(layers_per_block=2, epsilon=1e-3)
    wanted = oracle_k3.logits(tensors, TEXT, TOKENS)
    np.testing.assert_allclose(exact_logits(decoder), wanted, rtol=0, atol=1e-10)
    export(decoder, tokenizer, tmp_path / "out", max_length=64)
    out = json.loads((tmp_path / "out/config.json").read_text())
    again = load_file(tmp_path / "out/model.safetensors")
    assert out["model_type"] == "kimi_linear" and "quantization_config" not in out
    others = "quantization_config max_position_embeddings topk_method chunk_size_feed_forward"
    for name in TEXT.keys() - set(others.split()):
        assert out[name] == TEXT[name], name
    np.testing.assert_array_equal(oracle_k3.logits(again, out, TOKENS, ""), wanted)
    reloaded, _ = rmt_tpu.load(tmp_path / "out")
    assert reloaded.config == decoder.config
    same(reloaded, decoder)


def test_layers_that_predict_further_tokens_are_ignored(tmp_path):
    """Their tensors have the prefix of the text model's other tensors."""
    tensors = oracle_k3.drawn(CONFIG)
    tensors["language_model.model.layers.5.eh_proj.weight"] = np.ones((3, 2), np.float32)
    config = CONFIG | {"text_config": TEXT | {"num_nextn_predict_layers": 1}}
    for name, values in (("one", config), ("none", CONFIG)):
        folder = written(tmp_path / name, values, tensors)
        described, found = describe(folder), weights.Tensors(folder)
        if name == "one":
            assert weights.pieces_by_parameter(found, described)
            continue
        with pytest.raises(UsageError, match="layers.5.eh_proj.weight .* is not a tensor of"):
            weights.pieces_by_parameter(found, described)


def test_shards_are_read_alone(tmp_path):
    """Halves of experts, of their hidden neurons, and of their inputs, in the middle of groups."""
    folder = written(tmp_path / "hub", CONFIG, oracle_k3.drawn(CONFIG))
    whole, _ = rmt_tpu.load(folder)
    placed, _ = rmt_tpu.load(folder, mesh="expert=2,fsdp=2,tensor=2")
    same(placed, whole)


def test_packed_bytes_are_numbers():
    codes = np.arange(256, dtype=np.uint8).reshape(16, 1, 16)
    scales = np.array([0, 1, 60, 120, 126, 127, 128, 250] * 2, np.uint8)[:, None]
    wanted = oracle_k3.unpacked(codes[:, 0], scales)
    np.testing.assert_array_equal(packed.unpack(codes, scales)[:, 0], np.float32(wanted))
    assert np.isnan(packed.unpack(codes, scales * 0 + 255)).all()


@pytest.mark.parametrize("memory", [2**30, 16 * 8 * 100, 16 * 8 * 16, 1])
def test_parts_of_packed_matrices(tmp_path, memory):
    """Any part of a parameter, read in blocks of many rows, of a few, and of a group."""
    tensors = oracle_k3.drawn(CONFIG)
    found = weights.Tensors(written(tmp_path / "hub", CONFIG, tensors))
    found.memory = memory
    by_path = weights.pieces_by_parameter(found, describe(tmp_path / "hub"))
    for matrix, path, at in (("w3", "w_1", 1), ("w2", "w_2", None)):
        place = ("stacks", 1, 1, "core", path)
        name = f"language_model.model.layers.1.block_sparse_moe.experts.2.{matrix}.weight"
        stored = oracle_k3.unpacked(tensors[f"{name}_packed"], tensors[f"{name}_scale"])
        begin, sizes = (0, 2, 17, 3), (1, 1, 40, 9)
        index = (slice(3, 12), slice(17, 57))
        if at is not None:
            begin, sizes = (0, 2, 17, at, 3), (1, 1, 40, 1, 9)
        target = weights.Target(begin, np.zeros(sizes, np.float32))
        weights.fill(found, by_path[place], [target])
        np.testing.assert_array_equal(target.values.reshape(40, 9), np.float32(stored[index].T))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"attn_res_block_size": 6}, "attn_res_block_size=6 is not supported; legal: at most num_"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is unknown"),
        ({"latent_size": 4}, "latent_size=4 is not supported; legal: null, or a config without"),
        (
            {"linear_attn_config": TEXT["linear_attn_config"] | {"gate_lower_bound": 1}},
            "gate_lower_bound=1.0 is not .*; legal: null, or a negative number, at least -100",
        ),
        (
            {"quantization_config": QUANTIZATION | {"format": "pack-quantized"}},
            "format='pack-quantized' is not supported; legal: \"mxfp4-pack-quantized\"",
        ),
        ({"quantization_config": {"bits": 4}}, "config_groups=None is not supported; legal: an ob"),
    ],
)
def test_fields_of_other_models_are_refused(change, message):
    with pytest.raises(UsageError, match=message):
        model_config(CONFIG | {"text_config": TEXT | change}, "x")


@pytest.mark.parametrize("broken", ["missing", "scale", "float"])
def test_experts_that_are_not_packed_as_they_should_be_are_refused(tmp_path, broken):
    tensors = oracle_k3.drawn(CONFIG)
    name = "language_model.model.layers.1.block_sparse_moe.experts.5.w2.weight"
    if broken == "missing":
        del tensors[f"{name}_scale"]
        error, message = UsageError, r"experts.5.w2.weight_scale \[96, 2\] is missing"
    elif broken == "scale":
        tensors[f"{name}_scale"][3, 1] = 255
        error, message = RunError, "experts.5.w2.weight has values that are not finite"
    else:
        tensors[f"{name}_packed"] = np.float32(tensors[f"{name}_packed"])
        error, message = UsageError, "experts.5.w2.weight_packed has dtype F32; legal: U8"
    with pytest.raises(error, match=message):
        rmt_tpu.load(written(tmp_path / "hub", CONFIG, tensors))
