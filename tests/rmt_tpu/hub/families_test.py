"""Kinds of models of the hub: random tiny ones against their equations, in and out.

Their config.json and tensors are the oracle's, not of the writer here.
"""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file

import rmt_tpu
from rmt_tpu import config as cfg
from rmt_tpu.errors import UsageError
from rmt_tpu.hub.folder import export
from rmt_tpu.hub.models import config_values, describe, model_config
from tests.rmt_tpu.hub import oracle
from tests.rmt_tpu.hub.configs import COMMON, CONFIGS, GPT2, LAYER_TYPES, TOGETHER
from tests.rmt_tpu.hub.folders import TOKENS, exact_logits, logits, same, written
from tests.tiers import later

# Kinds whose models are also models of another kind.
EXPLICIT = ("qwen3_5_moe_text",)
# Where a row is `kind, key`: that key is left out.
SIZES = (
    "n_embd",
    "n_layer",
    "n_head",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
OPTIONAL = [
    (kind, key)
    for kind, values in CONFIGS.items()
    for key in values
    if key not in ("model_type", "vocab_size", *SIZES) and (kind, key) not in TOGETHER
]


def config_of(kind, left_out=None):
    return {key: value for key, value in CONFIGS[kind].items() if key != left_out}


# What other kinds have too: the layers of qwen3_next are those of qwen3_5_moe_text, for example.
AT_NIGHT = ("gemma2", "ministral", "mistral", "olmo2", "qwen2", "qwen3_5_text", "qwen3_next")


@pytest.mark.parametrize(
    "kind", [*(kind for kind in CONFIGS if kind not in AT_NIGHT), *later(*AT_NIGHT)]
)
def test_in_and_out(kind, tmp_path):
    """The logits of the equations, and bit for bit the same ones after a way out and in."""
    config, tensors = CONFIGS[kind], oracle.drawn(CONFIGS[kind])
    decoder, tokenizer = rmt_tpu.load(written(tmp_path / "hub", config, tensors))
    wanted = oracle.logits(tensors, config, TOKENS)
    np.testing.assert_allclose(logits(decoder), wanted, atol=1e-4)
    explicit = kind if kind in EXPLICIT else None
    export(decoder, tokenizer, tmp_path / "out", max_length=64, kind=explicit)
    out = json.loads((tmp_path / "out/config.json").read_text())
    again = load_file(tmp_path / "out/model.safetensors")
    assert (
        out["model_type"] == kind
        and out["tie_word_embeddings"] == decoder.config.tied_embeddings
        and set(again) == set(oracle.shapes(out))
    )
    np.testing.assert_array_equal(oracle.logits(again, out, TOKENS), wanted)
    reloaded, _ = rmt_tpu.load(tmp_path / "out")
    assert reloaded.config == decoder.config
    same(reloaded, decoder)
    first = "expert" if {"num_experts", "n_routed_experts"} & set(config) else "data"
    placed, _ = rmt_tpu.load(tmp_path / "hub", mesh=f"{first}=2,fsdp=2,tensor=2")
    same(placed, decoder)


@pytest.mark.parametrize("kind, key", OPTIONAL)
def test_what_config_json_lacks_is_as_its_kind_has_it(kind, key, tmp_path):
    config = config_of(kind, key)
    given = {name: x for name, x in oracle.filled(config).items() if x is not None}
    assert model_config(config, "x") == model_config(given, "x")
    (tmp_path / "config.json").write_text(json.dumps(config))
    described = describe(tmp_path)
    lengths = {"gpt2": "n_positions", "kimi_linear": "model_max_length"}
    assert described.max_length == given[lengths.get(kind, "max_position_embeddings")]
    assert described.model.tied_embeddings == given["tie_word_embeddings"]
    assert described.default_end == ENDS[kind]


ENDS = dict.fromkeys(CONFIGS) | {
    "deepseek_v3": 1,
    "gpt2": 50_256,
    "gemma2": 1,
    "gemma3_text": 1,
    "kimi_linear": 163_586,
    "mistral": 2,
    "ministral": 2,
    "olmo2": 50_279,
    "olmo3": 50_279,
    "phi3": 32_000,
    "smollm3": 128_001,
}


@pytest.mark.parametrize("kind, key", later(*OPTIONAL))
def test_the_equations_of_what_config_json_lacks(kind, key, tmp_path):
    config = config_of(kind, key)
    tensors = oracle.drawn(config)
    decoder, _ = rmt_tpu.load(written(tmp_path / "hub", config, tensors))
    wanted = oracle.logits(tensors, config, TOKENS)
    np.testing.assert_allclose(exact_logits(decoder), wanted, atol=1e-8)


REFUSED = {
    "switches": (
        {"model_type": "smollm3", "no_rope_layers": [1, 0]},
        r"no_rope_layers=\[1, 0\] is not supported; legal: a list of 5 zeros and ones",
    ),
    "window": (
        {"model_type": "olmo2", "sliding_window": 8},
        "sliding_window=8 is not supported; legal: null$",
    ),
    "window of no size": (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 0},
        "sliding_window=0 is not supported; legal: a whole number, at least 1$",
    ),
    "layers without a window": (
        {"model_type": "qwen3", "layer_types": LAYER_TYPES},
        "layer_types=.* is not .*; legal: full_attention for every layer, or a config with a sl",
    ),
    "layers of a kind that lists none": (
        {"model_type": "mistral", "layer_types": LAYER_TYPES},
        "layer_types=.* is not .*; legal: null, or the model type.s own choice: .'sliding_att",
    ),
    "too few layers": (
        {"model_type": "olmo3", "layer_types": LAYER_TYPES[1:]},
        "layer_types=.* is not .*; legal: null, or a list of 5 values, one per layer: 'full_a",
    ),
    "a gate of attention over depth": (
        CONFIGS["qwen3_attnres"] | {"attnres_gate_type": "sigmoid_scalar"},
        "attnres_gate_type='sigmoid_scalar' is not supported; legal: \"bias\"$",
    ),
    "a bias of attention over depth": (
        CONFIGS["qwen3_attnres"] | {"attnres_recency_bias_init": -(10**400)},
        "attnres_recency_bias_init=-1000.* is not supported; legal: a number$",
    ),
    "a mode of attention over depth": (
        CONFIGS["qwen3_attnres"] | {"attnres_mode": "delta"},
        "attnres_mode 'delta' is unknown; legal: block, full",
    ),
    "late layers": (
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": -1},
        "max_window_layers=-1 is not supported; legal: a whole number, at least 0$",
    ),
    "rope of no kind of layer": (
        {"model_type": "olmo3", "rope_parameters": {"rope_type": "default"}},
        "rope_parameters=.* legal: null, or an object with full_attention and sliding_attention$",
    ),
    "caps of logits": (
        {"model_type": "gemma3_text", "final_logit_softcapping": 0.0},
        "final_logit_softcapping=0.0 is not supported; legal: a positive number$",
    ),
    "caps that transformers does not compute": (
        {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
        "attn_logit_softcapping=50.0 is not supported; legal: null$",
    ),
    "later tokens": (
        {"model_type": "gemma3_text", "use_bidirectional_attention": True},
        "use_bidirectional_attention=True is not supported; legal: false or null$",
    ),
    "values of another size": (
        CONFIGS["qwen3_next"] | {"linear_value_head_dim": 8, "hidden_act": "silu"},
        "linear_value_head_dim=8 is not supported; legal: linear_key_head_dim=6$",
    ),
    "keys of values": (
        CONFIGS["qwen3_next"] | {"linear_num_key_heads": 3, "hidden_act": "silu"},
        "linear_num_key_heads=3 is not supported; legal: a divisor of the 8 value heads$",
    ),
    "a shared expert of no whole number": (
        CONFIGS["qwen3_next"] | {"shared_expert_intermediate_size": 12, "hidden_act": "silu"},
        "shared_expert_intermediate_size=12 is .* a multiple of moe_intermediate_size=8$",
    ),
    "layers of another kind": (
        CONFIGS["qwen3_next"] | {"layer_types": LAYER_TYPES, "hidden_act": "silu"},
        "layer_types=.* legal: null, or a list of .*: 'full_attention' or 'linear_attention'",
    ),
    "magnitudes of yarn": (
        {"model_type": "llama", "rope_scaling": {"rope_type": "yarn", "mscale": -1.0}},
        "rope_scaling: mscale=-1.0 is not supported; legal: a number, at least 0$",
    ),
    "turns of yarn": (
        {"model_type": "llama", "rope_scaling": {"rope_type": "yarn", "beta_slow": 40}},
        "rope_scaling: beta_slow=40.0 is not supported; legal: below beta_fast=32.0$",
    ),
    "heads of gpt2": (
        GPT2 | {"model_type": "gpt2", "n_head": 3},
        "n_head=3 is not supported; legal: a divisor of n_embd=16$",
    ),
    "scale of gpt2": (
        GPT2 | {"model_type": "gpt2", "scale_attn_weights": False},
        "scale_attn_weights=False is not supported; legal: true$",
    ),
    "activation of gpt2": (
        GPT2 | {"model_type": "gpt2", "activation_function": "relu"},
        "activation_function 'relu' is unknown; did you mean 'gelu'",
    ),
    "bias of olmo2": (
        {"model_type": "olmo2", "attention_bias": True},
        "attention_bias=True is not supported; legal: false$",
    ),
    "too few experts": (
        CONFIGS["qwen3_moe"] | {"num_experts": 2},
        "num_experts_per_tok=3 is not supported; legal: at most num_experts=2$",
    ),
    "another expert": (
        CONFIGS["qwen3_moe"] | {"hidden_act": "gelu_pytorch_tanh"},
        "hidden_act='gelu_pytorch_tanh' is not supported; legal: \"silu\"$",
    ),
    "no layers": (
        CONFIGS["qwen3_moe"] | {"mlp_only_layers": ["first"]},
        "mlp_only_layers=\\['first'\\] is not supported; legal: a list of layers, from 0 to 4$",
    ),
    "long rope": (
        {"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
        """rope_scaling: type='longrope' is not supported; legal: "default"$""",
    ),
    "odd part": (
        {"model_type": "phi3", "rope_parameters": {"partial_rotary_factor": 0.5}},
        "rope_parameters: partial_rotary_factor=0.5 is not supported; legal: a number up to 1",
    ),
    "a part that is no part": (
        {"model_type": "phi3", "partial_rotary_factor": 1e308},
        r"partial_rotary_factor=1e\+308 is not supported; legal: a number up to 1",
    ),
    "a factor that is not finite": (
        CONFIGS["deepseek_v3"]
        | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 1e308}},
        r"rope_scaling: mscale_all_dim=1e\+308 is not supported; legal: a number whose factor",
    ),
    "layers": (
        {"model_type": "llama", "num_hidden_layers": 10**6},
        "num_hidden_layers=1000000 is not supported; legal: at most 1000$",
    ),
    "near": (
        {"model_type": "smollm2"},
        "model_type 'smollm2' is unknown; did you mean 'smollm3'",
    ),
}


@pytest.mark.parametrize("changes, message", REFUSED.values(), ids=REFUSED)
def test_what_is_not_computed_is_refused_with_its_field(changes, message):
    with pytest.raises(UsageError, match=f"^x: {message}"):
        model_config(COMMON | changes, "x")


# Fields that some kinds do not compute with: a value, and the kinds that refuse it. The others do
# not have the field, or compute with it.
LATENT = "kimi_linear deepseek_v3"
NEXT = "qwen3_next qwen3_5_text qwen3_5_moe_text"
NOT_COMPUTED = {
    "add_cross_attention": (True, "gpt2 deepseek_v3"),
    "attention_bias": (True, set(CONFIGS) - {"gpt2", "qwen2"}),
    "attn_logit_softcapping": (9.0, f"gemma3_text {LATENT}"),
    "attnres_gate_type": ("sigmoid", f"qwen3_attnres {LATENT}"),
    "hidden_act": ("relu", set(CONFIGS) - {"gpt2", "gemma2", "gemma3_text"}),
    "mla_use_nope": (False, LATENT),
    "mlp_bias": (True, set(CONFIGS) - {"gpt2", *NEXT.split()}),
    "moe_router_activation_func": ("softmax", LATENT),
    "partial_rotary_factor": (0.5, set(CONFIGS) - {"gpt2", "phi3", *NEXT.split()}),
    "quantization_config": ({"bits": 4}, set(CONFIGS)),
    "rope_scaling": ({"rope_type": "longrope"}, set(CONFIGS) - {"gpt2"}),
    "scale_attn_weights": (False, f"gpt2 {LATENT}"),
    "scoring_func": ("softmax", LATENT),
    "topk_method": ("greedy", LATENT),
    "use_bidirectional_attention": (True, f"gemma2 gemma3_text {LATENT}"),
}


@pytest.mark.parametrize("field", NOT_COMPUTED)
def test_kinds_refuse_what_they_would_not_compute(field):
    value, refusing = NOT_COMPUTED[field]
    refused = set()
    for kind in CONFIGS:
        try:
            model_config(config_of(kind) | {field: value}, "x")
        except UsageError:
            refused.add(kind)
    assert refused == (set(refusing.split()) if isinstance(refusing, str) else refusing)


def test_early_files_of_gpt2_have_shorter_names_and_masks(tmp_path):
    config = config_of("gpt2", "tie_word_embeddings")
    tensors = oracle.drawn(config)
    decoder, tokenizer = rmt_tpu.load(written(tmp_path / "hub", config, tensors))
    short = {name.removeprefix("transformer."): x for name, x in tensors.items()}
    short["h.0.attn.bias"] = np.ones((1, 1, 64, 64), np.float32)
    early, _ = rmt_tpu.load(written(tmp_path / "early", config, short))
    same(early, decoder)
    export(decoder, tokenizer, tmp_path / "out", max_length=7)
    assert json.loads((tmp_path / "out/config.json").read_text())["n_positions"] == 64


@pytest.mark.parametrize("base", ["language_model.model.", "model.language_model."])
def test_the_text_model_of_a_model_of_images(base, tmp_path):
    """Its fields are in an object of their own, and its tensors among others."""
    config = CONFIGS["gemma3_text"] | {"tie_word_embeddings": True}
    tensors = oracle.drawn(config)
    text, tokenizer = rmt_tpu.load(written(tmp_path / "text", config, tensors))
    inside = {key: x for key, x in config.items() if key != "tie_word_embeddings"}
    outside = {"model_type": "gemma3", "text_config": inside, "vision_config": {"hidden_size": 8}}
    images = {
        "vision_tower.vision_model.post_layernorm.weight": np.ones(8, np.float32),
        "model.multi_modal_projector.mm_soft_emb_norm.weight": np.ones(8, np.float32),
    }
    renamed = {base + name.removeprefix("model."): x for name, x in tensors.items()}
    found, _ = rmt_tpu.load(written(tmp_path / "both", outside, renamed | images))
    assert found.config == text.config
    same(found, text)
    assert model_config({"model_type": "gemma3", "text_config": {}}, "x").width == 2304
    with pytest.raises(UsageError, match="vision.weight .8. is not a tensor of this model"):
        more = {"vision.weight": np.ones(8, np.float32)}
        rmt_tpu.load(written(tmp_path / "other", outside, renamed | more))
    export(found, tokenizer, tmp_path / "out", max_length=64)
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "gemma3_text"


def test_later_files_of_phi3_have_the_rotated_part_elsewhere():
    """And of 30 numbers of 44, where the rounded quotient would lose one."""
    config = config_of("phi3", "partial_rotary_factor")
    later_config = config | {"rope_parameters": {"partial_rotary_factor": 0.7, "rope_theta": 500.0}}
    assert model_config(later_config, "x") == model_config(CONFIGS["phi3"], "x")
    for size, dims in ((12, 8), (44, 30), (1000, 6)):
        values = CONFIGS["phi3"] | {"head_dim": size, "partial_rotary_factor": (dims + 0.3) / size}
        model = model_config(values, "x")
        assert model.cores[0].positions.dims == dims
        written = config_values(model, max_length=1, bos=0, ends=[0])
        assert model_config(written, "x") == model


@pytest.mark.parametrize("ropes", [(cfg.Rope(), cfg.Rope(dims=4)), (cfg.Rope(dims=4), cfg.Rope())])
def test_layers_that_rotate_different_parts_are_refused(ropes):
    second = cfg.FeedForward(8, "swiglu")
    layers = [(cfg.Attention(2, 8, positions, False), second) for positions in ropes]
    vectors = cfg.VectorStore(8)
    model = cfg.ModelConfig(cfg.stacks(layers), vectors, vocab_size=9, norm="rmsnorm")
    with pytest.raises(UsageError, match="dims=.* cannot be written"):
        config_values(model, max_length=8, bos=0, ends=(0,))


def test_later_files_of_experts_have_another_name_of_their_number():
    config = config_of("qwen3_moe", "num_experts") | {"num_local_experts": 10}
    assert model_config(config, "x") == model_config(CONFIGS["qwen3_moe"], "x")


def test_later_files_of_olmo3_have_rope_of_each_kind_of_layer():
    """Both forms are written, so that older and newer versions of transformers read one."""
    older = CONFIGS["olmo3"]
    model = model_config(older, "x")
    written = config_values(model, max_length=64, bos=0, ends=[0])
    ropes = written["rope_parameters"]
    assert ropes["sliding_attention"] == {"rope_type": "default", "rope_theta": 500.0}
    assert ropes["full_attention"].items() >= older["rope_scaling"].items()
    for left_out in (("rope_theta", "rope_scaling"), ("rope_parameters",)):
        fewer = {name: x for name, x in written.items() if name not in left_out}
        assert model_config(fewer, "x") == model
    ropes = {name: rope | {"rope_theta": 700.0} for name, rope in ropes.items()}
    ropes["sliding_attention"]["rope_theta"] = 900.0
    found = model_config(older | {"rope_parameters": ropes, "layer_types": None}, "x")
    bases = [core.positions.base for core in list(found.sublayers)[::2]]
    assert bases == [900.0, 900.0, 900.0, 700.0, 900.0]


def test_rope_scaling_replaces_rope_parameters_as_in_transformers():
    """Its base too; and the length before scaling may be a field of the model."""

    def rope(kind, **more):
        found = model_config(COMMON | {"model_type": kind} | more, "x")
        return [core.positions for core in found.sublayers if core.kind == "attention"]

    linear = {"rope_type": "linear", "factor": 2.0}
    newer = {"rope_type": "linear", "factor": 3.0, "rope_theta": 50.0}
    scaled = cfg.Rope(70.0, scaling=cfg.LinearScaling(2.0))
    for base in ({}, {"rope_parameters": newer}):
        given = base | {"rope_scaling": linear | {"rope_theta": 70.0}}
        assert set(rope("llama", **given)) == {scaled}
    both = {"rope_parameters": newer, "rope_scaling": {"rope_type": "default"}, "rope_theta": 90.0}
    assert set(rope("llama", **both)) == {cfg.Rope(90.0)}
    of_full = {"rope_scaling": linear | {"rope_theta": 70.0}, "sliding_window_pattern": 2}
    assert rope("gemma3_text", **of_full)[:2] == [cfg.Rope(), scaled]
    yarn = {"rope_type": "yarn", "factor": 2.0}
    for inside in ({}, {"original_max_position_embeddings": 32}):
        length = {"original_max_position_embeddings": 16, "rope_scaling": yarn | inside}
        assert {each.scaling.original_length for each in rope("llama", **length)} == {16}


def test_gemma3_is_written_for_transformers_4_too():
    """There, windows have RoPE of the base in `rope_local_base_freq`, which is 10,000 if absent."""
    model = model_config(CONFIGS["gemma3_text"], "x")
    written = config_values(model, max_length=64, bos=0, ends=[0])
    assert written["rope_parameters"]["sliding_attention"]["rope_theta"] == 50.0
    older = {name: x for name, x in written.items() if name != "rope_parameters"}
    assert older["rope_local_base_freq"] == 50.0 and model_config(older, "x") == model


@pytest.mark.parametrize("kind", ["mistral", "ministral", "phi3", "olmo3", "gemma2"])
def test_a_switch_of_other_kinds_does_not_disable_windows(kind):
    config = CONFIGS[kind] | {"sliding_window": 7}
    assert 7 in {getattr(core, "window", None) for core in model_config(config, "x").cores}
    off = config | {"use_sliding_window": False}
    assert model_config(off, "x") == model_config(config, "x")


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "olmo3", "ministral", "mistral"])
def test_no_window_is_written_where_the_kind_has_one_by_default(kind):
    config = CONFIGS[kind] | {"layer_types": ["full_attention"] * 5}
    if kind == "mistral":
        config = CONFIGS[kind] | {"sliding_window": None}
    model = model_config(config, "x")
    assert not any(getattr(core, "window", None) for core in model.cores)
    written = config_values(model, max_length=64, bos=0, ends=[0], kind=kind)
    assert model_config(written, "x") == model
    if kind.startswith("gemma"):
        assert config_values(model, max_length=64, bos=0, ends=[0]) == written


@pytest.mark.parametrize(
    "window", [(7,) * 5, (None, 7, 7, 7, 7), (7, None, 7, 7, 7), (7, 7, 5, 7, 7)]
)
def test_windows_are_written_as_a_kind_that_has_them(window):
    """Mistral has one in all layers, Ministral in those that it lists; no kind has two sizes."""
    llama = model_config(COMMON | {"model_type": "llama"}, "x")
    cores = list(llama.sublayers)
    layers = zip(window, cores[::2], cores[1::2], strict=True)
    layers = [(dataclasses.replace(core, window=w), second) for w, core, second in layers]
    model = llama.replace(stacks=cfg.stacks(layers))
    if len({*window} - {None}) > 1:
        with pytest.raises(UsageError, match="model.attention.window=5 cannot be .* legal: 7, or"):
            config_values(model, max_length=64, bos=0, ends=[0])
        return
    written = config_values(model, max_length=64, bos=0, ends=[0])
    assert written["model_type"] == ("mistral" if all(window) else "ministral")
    assert model_config(written, "x") == model


def test_what_qwen3_next_has_not_is_refused():
    """A model of one kind of layer, of other gates, and of KDA, whose decays are of channels."""
    model = model_config(CONFIGS["qwen3_next"], "x")
    net, dense, experts, attention = (
        next(core for core in model.cores if core.kind == kind and core.reads.residual == whole)
        for kind, whole in (
            ("kda", True), ("feed_forward", True), ("experts", True), ("attention", False)
        )
    )  # fmt: skip
    fields = {"max_length": 1, "bos": 0, "ends": [0]}
    of = lambda *layers: model.replace(stacks=cfg.stacks(layers))
    assert config_values(of((net, experts), (attention, dense)), **fields)["num_hidden_layers"] == 2
    with pytest.raises(
        UsageError, match="without attention cannot be written as qwen3_next or qwen3_5; legal"
    ):
        config_values(of((net, experts)), **fields)
    other = dataclasses.replace(net, gate_activation="sigmoid")
    with pytest.raises(UsageError, match="model.kda.gate_activation=sigmoid cannot be .* silu, or"):
        config_values(of((other, experts), (attention, dense)), **fields)
    with pytest.raises(
        UsageError, match="model.stacks=kda, experts, .* legal: layers of attention"
    ):
        config_values(of((net, experts), (dense, attention)), **fields)
    alike = dataclasses.replace(net, num_heads=4, num_key_heads=None)
    assert config_values(of((alike, experts), (attention, dense)), **fields)


def test_factors_that_a_kind_does_not_have_are_refused():
    llama = model_config(COMMON | {"model_type": "llama"}, "x")
    with pytest.raises(UsageError, match="model.embedding_scale=2.0 cannot be .* legal: 1.0, or"):
        config_values(llama.replace(embedding_scale=2.0), max_length=1, bos=0, ends=[0])
    with pytest.raises(UsageError, match="model.logit_cap=2.0 cannot be .* legal: None, or"):
        config_values(llama.replace(logit_cap=2.0), max_length=1, bos=0, ends=[0])
    layer = [dataclasses.replace(core, scale=2.0) for core in llama.cores[:1]] + [llama.cores[1]]
    with pytest.raises(UsageError, match="model.attention.scale=2.0 cannot be .* legal: None, or"):
        model = llama.replace(stacks=(cfg.Stack(tuple(layer), 5),))
        config_values(model, max_length=1, bos=0, ends=[0])


MODEL_CHANGES = {
    "norm": {"norm": "layernorm", "norm_bias": True},
    "epsilon": {"norm_epsilon": 0.25},
    "scale": {"embedding_scale": 3.0},
    "cap": {"logit_cap": 7.0},
    "words": {"vocab_size": 300},
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_no_field_of_a_model_is_dropped(kind):
    """Each is written or refused, whatever the kind: a norm, for example, is not exchanged."""
    model = model_config(CONFIGS[kind], "x")
    changes = MODEL_CHANGES | {"tied": {"tied_embeddings": not model.tied_embeddings}}
    refused = []
    for name, fields in changes.items():
        changed = model.replace(**fields)
        try:
            found = model_config(config_values(changed, max_length=1, bos=0, ends=[0]), "x")
        except UsageError as error:
            assert "cannot be written" in str(error)
            refused.append(name)
        else:
            assert all(getattr(found, field) == value for field, value in fields.items())
    assert ("norm" in refused) == (kind != "gpt2")
    assert not {"words", "tied"} & set(refused)


def test_what_one_kind_has_and_no_other_is_not_mixed():
    model = model_config(CONFIGS["smollm3"], "x")
    biased = lambda core: dataclasses.replace(core, bias=True) if hasattr(core, "bias") else core
    cores = lambda stack: tuple(map(biased, stack.cores))
    stacks = tuple(dataclasses.replace(stack, cores=cores(stack)) for stack in model.stacks)
    with pytest.raises(UsageError, match="model.attention=bias and layers without rope cannot be"):
        config_values(model.replace(stacks=stacks), max_length=1, bos=0, ends=[0])
