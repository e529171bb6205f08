"""Kimi Linear and DeepSeek-V3 of the hub: released configs, other forms of files, and refusals.

`families_test` compares both kinds with their equations.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, safe_open

import rmt_tpu
from rmt_tpu import config as cfg
from rmt_tpu import cost
from rmt_tpu.data import ByteTokenizer
from rmt_tpu.errors import UsageError
from rmt_tpu.hub.folder import export
from rmt_tpu.hub.models import config_values, kind_of, model_config
from tests import models
from tests.rmt_tpu.hub import oracle
from tests.rmt_tpu.hub.configs import CONFIGS
from tests.rmt_tpu.hub.folders import TOKENS, logits, parameters, same, written
from tests.tiers import later

KIMI, DEEPSEEK = CONFIGS["kimi_linear"], CONFIGS["deepseek_v3"]
LISTED = KIMI["linear_attn_config"]
# What the released files of Kimi-Linear-48B-A3B have.
KIMI_48B = {
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"},
    "bos_token_id": 163_584,
    "eos_token_id": 163_586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [n for n in range(1, 27) if n % 4],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1_048_576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 163_839,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10_000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163_840,
}
# And those of Moonlight-16B-A3B.
MOONLIGHT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 163_584,
    "eos_token_id": 163_585,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11_264,
    "kv_lora_rank": 512,
    "max_position_embeddings": 8192,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 50_000.0,
    "routed_scaling_factor": 2.446,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 163_840,
}
WRITTEN = {"max_length": 64, "bos": 0, "ends": [0]}


def changed(model, kind, **changes):
    """The model, with other fields in its cores of a kind."""
    new = lambda core: dataclasses.replace(core, **changes) if core.kind == kind else core
    stacks = (dataclasses.replace(s, cores=tuple(map(new, s.cores))) for s in model.stacks)
    return model.replace(stacks=tuple(stacks))


def test_released_models():
    """The preset of Kimi Linear is the released model."""
    preset = rmt_tpu.preset("kimi-linear-48b-a3b")
    assert model_config(KIMI_48B, "x") == preset and kind_of(preset) == "kimi_linear"
    for released, parameters_printed in ((KIMI_48B, 49.1e9), (MOONLIGHT, 16e9)):
        model = model_config(released, "x")
        count = sum(cost.parameters(model).values())
        tensors = sum(map(np.prod, oracle.shapes(released).values()))
        assert count == tensors == pytest.approx(parameters_printed, rel=0.005)
        out = config_values(model, **WRITTEN)
        same_fields = {name for name in released if out.get(name) == released[name]}
        others = {"bos_token_id", "eos_token_id", "model_max_length", "max_position_embeddings"}
        assert set(released) & set(out) - others - {"pad_token_id"} <= same_fields


MOONLIKE = DEEPSEEK | {
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": None,
    "rope_interleave": True,
    "rope_scaling": None,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
INTERLEAVED = DEEPSEEK | {"rope_interleave": True}
WITHOUT_RANK = KIMI | {"q_lora_rank": None, "moe_renormalize": True, "tie_word_embeddings": False}


@pytest.mark.slow
@pytest.mark.parametrize("config", [INTERLEAVED, MOONLIKE, WITHOUT_RANK])
def test_the_equations_of_other_forms(config, tmp_path):
    """The parameters are the same, bit for bit, after an export and a reload."""
    tensors = oracle.drawn(config)
    decoder, tokenizer = rmt_tpu.load(written(tmp_path / "hub", config, tensors))
    np.testing.assert_allclose(logits(decoder), oracle.logits(tensors, config, TOKENS), atol=1e-4)
    export(decoder, tokenizer, tmp_path / "out", max_length=64)
    reloaded, _ = rmt_tpu.load(tmp_path / "out")
    assert reloaded.config == decoder.config
    same(reloaded, decoder)


def test_files_of_transformers_have_the_dense_layers_under_another_name(tmp_path):
    tensors = oracle.drawn(KIMI)
    decoder, _ = rmt_tpu.load(written(tmp_path / "hub", KIMI, tensors))
    renamed = {name.replace(".mlp.", ".block_sparse_moe."): x for name, x in tensors.items()}
    assert set(renamed) != set(tensors)
    found, _ = rmt_tpu.load(written(tmp_path / "renamed", KIMI, renamed))
    same(found, decoder)


@pytest.mark.parametrize("config", [DEEPSEEK, *later(KIMI)])
def test_layers_that_predict_further_tokens_are_ignored(config, tmp_path):
    """They are numbered after the model's own layers, as many as the config has."""
    tensors = oracle.drawn(config)
    more = {f"model.layers.{n}.eh_proj.weight": np.ones((16, 32), np.float32) for n in (5, 6)}
    found, _ = rmt_tpu.load(written(tmp_path / "hub", config, tensors | more))
    plain, _ = rmt_tpu.load(written(tmp_path / "plain", config, tensors))
    same(found, plain)
    fewer = config | {"num_nextn_predict_layers": 1}
    with pytest.raises(UsageError, match="model.layers.6.eh_proj.weight .* is not a tensor of"):
        rmt_tpu.load(written(tmp_path / "fewer", fewer, tensors | more))


def test_biases_of_experts_stay_exact_in_narrow_files(tmp_path):
    """So do the rates and biases of decays; all other tensors have the given dtype."""
    tensors = oracle.drawn(KIMI)
    decoder, tokenizer = rmt_tpu.load(written(tmp_path / "hub", KIMI, tensors))
    export(decoder, tokenizer, tmp_path / "out", max_length=64, dtype="bfloat16")
    exact = ("e_score_correction_bias", "A_log", "dt_bias")
    with safe_open(tmp_path / "out/model.safetensors", framework="numpy") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}
    assert {n for n, dtype in dtypes.items() if dtype == "F32"} == {
        name for name in tensors if name.endswith(exact)
    }
    for name, x in load_file(tmp_path / "out/model.safetensors").items():
        if name.endswith(exact):
            np.testing.assert_array_equal(x, tensors[name])


def made(config):
    params = jax.tree.map(jnp.float32, models.random_parameters(config))
    return nnx.merge(models.graph(config), params)


def test_a_run_s_biases_go_out_at_the_rate_of_the_run(tmp_path):
    """A bias is the rate times the number of steps. The file has the bias."""
    model = changed(model_config(KIMI, "x"), "experts", balance=cfg.SignRule(0.01))
    decoder = made(model)
    export(decoder, ByteTokenizer(), tmp_path / "out", max_length=64)
    tensors, steps = load_file(tmp_path / "out/model.safetensors"), loads(decoder)
    names = [n for n in tensors if n.endswith("correction_bias")]
    biases = np.concatenate([tensors[name] for name in sorted(names)])
    np.testing.assert_array_equal(biases, np.float32(0.01) * steps)
    again, _ = rmt_tpu.load(tmp_path / "out")
    np.testing.assert_array_equal(loads(again) / 1024, biases)
    assert again.config.stacks == model_config(KIMI, "x").stacks and np.abs(biases).max() > 0


def loads(decoder):
    """The steps that biases of experts stand for, layer after layer."""
    cores = [sublayer.core for stack in decoder.stacks for sublayer in stack]
    found = [np.asarray(core.load[...]) for core in cores if hasattr(core, "load")]
    return np.concatenate(found).reshape(-1)


def test_fields_have_other_names_in_transformers():
    """Kimi Linear also has other fields for which layers are of which kind."""
    renamed = {
        "max_position_embeddings": "model_max_length",
        "n_group": "num_expert_group",
        "n_shared_experts": "num_shared_experts",
        "norm_topk_prob": "moe_renormalize",
        "num_experts_per_tok": "num_experts_per_token",
        "num_local_experts": "num_experts",
    }
    names = {ours: name for name, ours in renamed.items()}
    config = {names.get(key, key): value for key, value in KIMI.items()}
    assert model_config(config, "x") == model_config(KIMI, "x")
    flat = {
        key: x for key, x in config.items() if key not in ("linear_attn_config", "moe_layer_freq")
    }
    types = [
        f"{'full' if n in LISTED['full_attn_layers'] else 'linear'}_attention" for n in range(1, 6)
    ]
    flat |= {
        "layer_types": types,
        "linear_conv_kernel_dim": 3,
        "linear_head_dim": 6,
        "linear_num_heads": 4,
        "mlp_layer_types": ["dense", "dense", "sparse", "dense", "sparse"],
    }
    assert model_config(flat, "x") == model_config(KIMI, "x")
    out = config_values(model_config(flat, "x"), **WRITTEN)
    assert out["mlp_layer_types"] == flat["mlp_layer_types"]
    other = {key: x for key, x in DEEPSEEK.items() if key != "n_routed_experts"}
    assert model_config(other | {"num_local_experts": 16}, "x") == model_config(DEEPSEEK, "x")


def test_both_scales_of_yarn_give_a_magnitude_in_any_kind():
    """One of them alone gives none: the factor of what is turned is then YaRN's own."""
    values = CONFIGS["qwen3"] | {"layer_types": None}
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    for scales, magnitude in (
        ({"mscale": 0.7, "mscale_all_dim": 1.3}, (1 + 0.07 * np.log(4)) / (1 + 0.13 * np.log(4))),
        ({"mscale": 0.7}, None),
    ):
        core = model_config(values | {"rope_scaling": yarn | scales}, "x").cores[0]
        assert core.positions.scaling.magnitude == (magnitude and pytest.approx(magnitude))
        assert core.scale is None


REFUSED = {
    "unknown": (KIMI | {"index_topk": 64}, "index_topk=64 is .* unknown field$"),
    "unknown of deepseek": (DEEPSEEK | {"index_topk": 64}, "index_topk=64 is .* unknown field$"),
    "unknown of linear layers": (
        KIMI | {"linear_attn_config": LISTED | {"chunk_size": 64}},
        "linear_attn_config: chunk_size=64 is not supported; legal: null, or a config without",
    ),
    "unknown of rope": (
        DEEPSEEK | {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "short": 1}},
        "rope_scaling: short=1 is not supported; legal: null, or a config without this unknown fi",
    ),
    "fp8": (
        DEEPSEEK | {"quantization_config": {"quant_method": "fp8"}},
        "quantization_config=.* is not supported; legal: null$",
    ),
    "biases": (DEEPSEEK | {"attention_bias": True}, "attention_bias=True is .* legal: false$"),
    "activation": (
        KIMI | {"hidden_act": "gelu"},
        "hidden_act 'gelu' is .* legal: silu, situ$",
    ),
    "scores": (
        DEEPSEEK | {"scoring_func": "softmax"},
        "scoring_func='softmax' is .*: \"sigmoid\"$",
    ),
    "scores of kimi": (
        KIMI | {"moe_router_activation_func": "softmax"},
        "moe_router_activation_func='softmax' is not supported; legal: \"sigmoid\"$",
    ),
    "choice": (DEEPSEEK | {"topk_method": "greedy"}, "topk_method='greedy' is .*: \"noaux_tc\"$"),
    "positions": (KIMI | {"mla_use_nope": False}, "mla_use_nope=False is .* legal: true$"),
    "long rope of kimi": (
        KIMI | {"rope_scaling": {"type": "yarn"}},
        "rope_scaling=.* is not supported; legal: null$",
    ),
    "values": (KIMI | {"v_head_dim": 8}, "v_head_dim=8 is .* legal: qk_nope_head_dim=6$"),
    "groups of queries": (
        DEEPSEEK | {"num_key_value_heads": 2},
        "num_key_value_heads=2 is not supported; legal: num_attention_heads=4$",
    ),
    "odd rope": (
        DEEPSEEK | {"qk_rope_head_dim": 3},
        "qk_rope_head_dim=3 is not supported; legal: an even number, because RoPE rotates pairs$",
    ),
    "factor without yarn": (
        DEEPSEEK | {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}},
        "rope_scaling: mscale_all_dim=1.0 is not supported; legal: null or 0$",
    ),
    "a layer of no kind": (
        KIMI | {"linear_attn_config": LISTED | {"full_attn_layers": [2]}},
        r"linear_attn_config: full_attn_layers=\[2\] is .* the layers from 1 to 5 that are not in "
        r"kda_layers=\[1, 3, 4\]$",
    ),
    "layers from 0": (
        KIMI | {"linear_attn_config": LISTED | {"kda_layers": "all"}},
        "linear_attn_config: kda_layers='all' is .* legal: a list of layers, from 1 to 5$",
    ),
    "layers of two kinds": (
        KIMI | {"layer_types": 5 * ["full_attention"]},
        "layer_types=.* is not supported; legal: null, or the layers as in linear_attn_config$",
    ),
    "too few experts": (
        KIMI | {"num_experts_per_token": 17},
        "num_experts_per_token=17 is not supported; legal: at most num_experts=16$",
    ),
    "groups": (
        DEEPSEEK | {"n_group": 5},
        "n_group=5 is .* legal: a number of groups of at least 2 of the n_routed_experts=16$",
    ),
    "too few groups": (
        DEEPSEEK | {"topk_group": 1, "num_experts_per_tok": 5},
        "topk_group=1 is .* at most n_group=4, and enough for num_experts_per_tok=5$",
    ),
    "too many groups": (
        KIMI | {"topk_group": 5},
        "topk_group=5 is .* at most num_expert_group=4, and enough for num_experts_per_token=3$",
    ),
    "further layers": (
        KIMI | {"num_nextn_predict_layers": -1},
        "num_nextn_predict_layers=-1 is not supported; legal: a whole number, at least 0$",
    ),
}


@pytest.mark.parametrize("config, message", REFUSED.values(), ids=REFUSED)
def test_what_is_not_computed_is_refused_with_its_field(config, message):
    with pytest.raises(UsageError, match=f"^x: {message}"):
        model_config(config, "x")


ATTENTION = cfg.Attention(4, 4, cfg.Rope(), inverse_layer_scaling=False)
NOT_WRITTEN = {
    "epsilon": (
        KIMI,
        {"mla": {"latent_epsilon": None}},
        "model.mla.latent_epsilon=None cannot be .* legal: 1e-06, or",
    ),
    "scale": (DEEPSEEK, {"mla": {"scale": 0.3}}, "model.mla.scale=0.3 cannot be .* legal: 0.3000"),
    "balance": (
        KIMI,
        {"experts": {"balance": cfg.BalanceLoss()}},
        "model.experts.balance=loss cannot be written .* legal: sign, or",
    ),
    "gates": (
        KIMI,
        {"kda": {"gate_activation": "silu"}},
        "model.kda.gate_activation=silu cannot be .* sigmoid,",
    ),
    "dense": (
        DEEPSEEK,
        {"feed_forward": {"activation": "geglu"}},
        "model.feed_forward.activation=geglu cannot be .* legal: swiglu, or",
    ),
}


@pytest.mark.parametrize("config, changes, message", NOT_WRITTEN.values(), ids=NOT_WRITTEN)
def test_what_these_kinds_have_not_is_refused(config, changes, message):
    model = model_config(config, "x")
    for kind, fields in changes.items():
        model = changed(model, kind, **fields)
    with pytest.raises(UsageError, match=message):
        config_values(model, **WRITTEN)


def test_other_layers_are_refused():
    """Other attention, delta attention in DeepSeek-V3, and experts in irregular layers."""
    kimi, deepseek = model_config(KIMI, "x"), model_config(DEEPSEEK, "x")
    latent, dense = list(deepseek.sublayers)[:2]
    experts = next(core for core in deepseek.sublayers if core.kind == "experts")
    of = lambda *layers: deepseek.replace(stacks=cfg.stacks(layers))
    with pytest.raises(
        UsageError, match="a model with mla and attention cannot be .* legal: mla, or"
    ):
        config_values(of((latent, dense), (ATTENTION, dense)), **WRITTEN)
    linear = next(core for core in kimi.sublayers if core.kind == "kda")
    with pytest.raises(UsageError, match="model.mla.positions=rope cannot be .* legal: none, or"):
        config_values(of((latent, dense), (linear, dense)), **WRITTEN)
    layers = [(latent, core) for core in (dense, experts, dense, dense, experts)]
    with pytest.raises(
        UsageError, match="model.stacks=layers with feed_forward cannot be .* experts"
    ):
        config_values(of(*layers), **WRITTEN)
    alone = of((dataclasses.replace(latent, positions=cfg.NoPositions(), scale=None), dense))
    assert kind_of(alone) == "kimi_linear" and config_values(alone, **WRITTEN)


def test_a_tiny_preset_goes_out_and_in(tmp_path):
    decoder = made(rmt_tpu.preset("kimi-tiny"))
    export(decoder, ByteTokenizer(), tmp_path / "out", max_length=64)
    found, _ = rmt_tpu.load(tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "kimi_linear"
    own, other = parameters(decoder), parameters(found)
    # Files have biases of experts and not their rate, which is 0.01 in this preset.
    for stack in own["stacks"].values():
        for sublayer in stack.values():
            if "load" in sublayer["core"]:
                sublayer["core"]["load"] = sublayer["core"]["load"] * np.float32(0.01) * 1024
    jax.tree.map(np.testing.assert_array_equal, own, other)
