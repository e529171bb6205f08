"""Text on a mesh of eight devices is that of one: any store, mixer and core, each axis."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from flax import nnx

import sharding
from rmt_tpu import config as cfg
from rmt_tpu.cores.experts import Experts
from rmt_tpu.generation import Adjustment, Engine, Request, Sampling, mesh_of, programs
from rmt_tpu.generation.key_heads import repeated_model
from rmt_tpu.generation.placement import parameter_shardings
from tests import generated, models
from tests.generated import EXPERTS, GROUPED, LATENT, NEW, plain
from tests.tiers import later

LENGTHS, PART = (29, 5, 12), 12
HEADS_4 = plain(cfg.NoPositions())


def made(model, spec=None):
    """A decoder with the same parameters on any mesh."""
    placed = spec and parameter_shardings(models.abstract(model), mesh_for(spec))
    return generated.decoder(model, placed)


def mesh_for(spec):
    sizes = sharding.parse_mesh(spec).values()
    return sharding.make_mesh(spec, jax.devices()[: math.prod(sizes)])


@pytest.mark.slow
def test_greedy_text_on_a_mesh_is_that_of_no_cache():
    """A prompt in parts and prompts at once, on three axes; another text compiles nothing."""
    model = generated.config("matrix", cfg.BlockAttention(num_blocks=2), plain(cfg.Learned(40)))
    decoder = made(model, "data=2,key=2,tensor=2")
    engine = Engine(decoder, stop=models.VOCAB + 7, slots=2, steps=3, part=PART)
    tokens, logs = generated.said(engine, generated.prompts(LENGTHS), temperature=0.0)
    forward = jax.jit(lambda tokens: jax.nn.log_softmax(made(model)(tokens)[0]))
    for n, prompt in enumerate(generated.prompts(LENGTHS)):
        whole = np.zeros((1, 40), np.int32)
        whole[0, : len(prompt) + NEW] = [*prompt, *tokens[n]]
        wanted = np.asarray(forward(whole))[len(prompt) - 1 :][:NEW]
        assert tokens[n] == np.argmax(wanted, -1).tolist()
        np.testing.assert_allclose(logs[n], wanted[np.arange(NEW), tokens[n]], atol=2e-5)
    compiled = [p._cache_size() for p in (programs.prefill, programs.extend, programs.steps)]
    again, _ = generated.said(engine, generated.prompts(LENGTHS), temperature=0.0)
    drawn, _ = generated.said(engine, generated.prompts(LENGTHS), seed=3, top_k=40)
    assert again == tokens != drawn
    assert compiled == [1, 1, 2]  # steps in caches of 32 and 64
    assert compiled == [
        p._cache_size() for p in (programs.prefill, programs.extend, programs.steps)
    ]
    # Nothing is whole on a device: W_1 is divided by columns, the cache by rows and heads.
    w_1 = decoder.stacks[0][1].core.w_1[...]
    assert w_1.addressable_shards[0].data.size == w_1.size // 2
    keys = engine.rows.cache.cores[0][0].keys
    assert keys.addressable_shards[0].data.shape == (2, 1, engine.capacity, 6)


BIASED = dataclasses.replace(
    GROUPED, output_bias=True, output_gate=True, normed="both", query_key_norm_over="heads"
)
NET = cfg.Kda(8, 6, num_key_heads=4, decays="heads", gates="full", gate_activation="silu")
GATES = dataclasses.replace(GROUPED, output_gate=True)
GATED_LATENT = dataclasses.replace(LATENT, output_gate=True)
NARROW = dataclasses.replace(EXPERTS, activation="situ", latent_dim=8, latent_norm=True)
SYSTEMS = [
    ("vector", cfg.Sum(), BIASED, "sequence=2,tensor=2"),
    ("vector", cfg.Sum(), BIASED, "tensor=8"),  # two devices share a head of keys
    ("vector", cfg.Sum(), plain(cfg.Alibi()), "fsdp=2,sequence=2,tensor=2"),
    ("vector", cfg.BlockAttention(num_blocks=2), GROUPED, "sequence=2,tensor=2"),
    ("vector", cfg.Sum(), dataclasses.replace(GROUPED, window=7), "data=2,sequence=2,tensor=2"),
    ("vector", cfg.FullAttention(), LATENT, "data=2,sequence=2,tensor=2"),
    ("vector", cfg.MhcLite(streams=2), plain(cfg.Learned(40)), "data=2,tensor=4"),
    ("vector", cfg.ResidualScalars(), GROUPED, "tensor=8"),  # two devices share a head of keys
    ("matrix", cfg.Sum(), plain(cfg.Learned(40)), "key=2,sequence=2"),
    ("matrix", cfg.Sum(), LATENT, "key=2,tensor=2"),
    ("matrix", cfg.FullAttention(), GROUPED, "fsdp=2,sequence=4"),
    ("matrix", cfg.Sum(), GATES, "key=2,sequence=2,tensor=2"),
    ("matrix", cfg.Dense(), plain(cfg.NoPositions()), "tensor=4"),
    ("vector", cfg.Mudd(), GROUPED, "fsdp=2,tensor=2"),
    ("matrix", cfg.Mudd(), GROUPED, "key=2,tensor=2"),
    ("matrix", cfg.ResidualScalars(), GROUPED, "key=2,tensor=2"),
    ("vector", cfg.Sum(), cfg.Kda(num_heads=4, head_dim=6), "data=2,sequence=2,tensor=2"),
    ("matrix", cfg.BlockAttention(num_blocks=2), cfg.Kda(4, 6), "key=2,tensor=2"),
    ("vector", cfg.Sum(), NET, "data=2,sequence=2,tensor=2"),
    ("matrix", cfg.Sum(), NET, "key=2,tensor=2"),
    ("vector", cfg.BlockAttention(num_blocks=2), EXPERTS, "expert=2,tensor=2"),
    ("matrix", cfg.Sum(), dataclasses.replace(EXPERTS, capacity=0.5), "expert=2,key=2"),
    ("vector", cfg.BlockAttention(num_blocks=2), GATED_LATENT, "data=2,sequence=2,tensor=2"),
    ("vector", cfg.BlockAttention(num_blocks=2), NARROW, "expert=2,tensor=2"),
]


def test_experts_drop_no_tokens_of_a_text():
    limited = dataclasses.replace(EXPERTS, capacity=0.5)
    decoder = models.abstract(generated.config("vector", cfg.Sum(), limited))
    spec = parameter_shardings(decoder, mesh_for("expert=2"))
    placed = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        nnx.to_pure_dict(nnx.state(decoder, nnx.Param)),
        spec,
    )
    model, params = programs.ModelSpec.of(nnx.merge(nnx.graphdef(decoder), placed))
    run = nnx.merge(model.graphdef, params)
    cores = [layer.core for stack in run.stacks for layer in stack]
    assert [core.core.capacity for core in cores if isinstance(core, Experts)] == [None]


@pytest.mark.slow
@pytest.mark.parametrize("store, mixer, core, spec", SYSTEMS, ids=lambda x: getattr(x, "kind", x))
def test_drawn_text_on_a_mesh_is_that_of_one_device(store, mixer, core, spec):
    model, found = generated.config(store, mixer, core), []
    for mesh in (None, spec):
        engine = Engine(made(model, mesh), models.VOCAB + 7, slots=4, steps=3, part=PART)
        found.append(
            generated.said(engine, generated.prompts(LENGTHS), seed=3, repetition_penalty=1.3)
        )
        scored = Request(
            generated.prompts(LENGTHS)[0], Sampling(max_tokens=1), scored=True, ranked=True
        )
        (one,) = engine.run([scored])
        found[-1][1][3] = one.prompt.log_probabilities
    (tokens, logs), (wanted, wanted_logs) = found
    assert tokens == wanted and {len(x) for x in tokens.values()} == {NEW}
    for n, log in logs.items():
        np.testing.assert_allclose(log, wanted_logs[n], atol=2e-5)


@pytest.mark.slow
def test_changed_logits_on_a_mesh_are_those_of_one_device():
    """Where devices divide rows too, and beside rows that nothing changes."""
    model = generated.config("matrix", cfg.Sum(), plain(cfg.Learned(40)))
    how = {"presence_penalty": 2.0, "logit_bias": {3: 4.0}, "min_tokens": 3}
    adjusted = [Adjustment(), Adjustment(**how), Adjustment(frequency_penalty=-1.5)]
    told = []
    for spec in (None, "data=2,key=2,tensor=2"):
        engine = Engine(made(model, spec), stop=1, slots=2, steps=3, part=PART)
        prompts = zip(generated.prompts(LENGTHS), adjusted, strict=True)
        sampling = Sampling(max_tokens=NEW, temperature=0.0)
        requests = [Request(p, sampling, adjustment=adjustment) for p, adjustment in prompts]
        texts = [[] for _ in requests]
        for new in engine.run(requests):
            texts[new.number] += new.tokens
        told.append(texts)
    assert told[0] == told[1] and min(map(len, told[0])) > 2
    assert told[0][1] != told[0][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "store, heads, spec, lengths",
    [
        ("vector", 2, "tensor=8", (5,)),
        *later(
            ("vector", 1, "sequence=2,tensor=2", LENGTHS),
            ("vector", 2, "sequence=4,tensor=2", LENGTHS),
            ("matrix", 2, "key=2,sequence=2,tensor=2", LENGTHS),
            ("matrix", 2, "sequence=2,tensor=4", LENGTHS),
        ),
    ],
)
def test_devices_share_a_head_of_keys(store, heads, spec, lengths):
    """Fewer heads of keys than devices, as many as these or as queries: each has whole ones."""
    check_shared_heads(store, dataclasses.replace(GROUPED, num_kv_heads=heads), spec, lengths)


@pytest.mark.slow
def test_devices_share_a_head_of_keys_without_parameters_of_its_own():
    """Llama's attention has neither biases nor norms of queries and keys."""
    plain = {"query_key_norm": False, "bias": False}
    core = dataclasses.replace(GROUPED, num_kv_heads=2, **plain)
    check_shared_heads("vector", core, "tensor=4", (5,))


@pytest.mark.parametrize("stacks", [1, 3])  # the short form of a model, and the long form
def test_copies_of_key_heads_leave_the_base_of_mup(stacks):
    """Its 2 query heads cannot have the 4 key heads that devices need."""
    alike = cfg.Attention(8, 6, cfg.Rope())
    cores = [dataclasses.replace(alike, num_kv_heads=2), alike] * 2
    model = cfg.ModelConfig(
        tuple(cfg.Stack((core, cfg.FeedForward(8))) for core in cores[:stacks]),
        cfg.VectorStore(12),
        vocab_size=models.VOCAB,
        parametrization=cfg.MuP(("attention.num_heads=2",)),
    )
    repeated = repeated_model(model, mesh_for("tensor=4"))
    assert [stack.cores[0].kv_heads for stack in repeated.stacks] == [4, 8, 4][:stacks]
    assert repeated.base_model.stacks == model.base_model.stacks


def check_shared_heads(store, core, spec, lengths):
    model, found = generated.config(store, cfg.Sum(), core), []
    for mesh in (None, spec):
        engine = Engine(made(model, mesh), models.VOCAB + 7, slots=2, steps=3, part=PART)
        found.append(generated.said(engine, generated.prompts(lengths), temperature=0.0))
    (wanted, wanted_logs), (tokens, logs) = found
    assert tokens == wanted and {len(x) for x in tokens.values()} == {NEW}
    for n, log in logs.items():
        np.testing.assert_allclose(log, wanted_logs[n], atol=2e-5)
    devices = math.prod(sharding.parse_mesh(spec).values())
    keys = engine.rows.cache.cores[0][0].keys
    assert (
        keys.addressable_shards[0].data.shape[-1]
        == max(1, core.kv_heads // devices) * core.head_dim
    )


@pytest.mark.parametrize(
    "store, core, spec, message",
    [
        ("vector", HEADS_4, "tensor=8", "attention.num_heads.; legal products: 1, 2, 4"),
        ("vector", LATENT, "sequence=8", "the 4 heads of a cache .model.mla.num_heads"),
        ("vector", GROUPED, "key=2", "key=2 divides D_k, which a vector store does not have"),
        ("matrix", GROUPED, "stage=2", "stage=2 divides layers, which only training"),
        ("matrix", GROUPED, "fsdp=8", "fsdp=8 does not divide .* 'embed' of size 36"),
    ],
)
def test_meshes_that_cannot_be(store, core, spec, message):
    with pytest.raises(sharding.MeshError, match=message):
        decoder = models.abstract(generated.config(store, cfg.Sum(), core))
        parameter_shardings(decoder, mesh_for(spec))


@pytest.mark.parametrize(
    "mixer, message",
    [
        (cfg.FullAttention(num_heads=2), "with num_heads=2; legal: num_heads=1, or key=1"),
        (cfg.BlockAttention(query="input"), "with query='input'; legal: query=static, scalars"),
    ],
)
def test_meshes_that_cannot_divide_a_mixer_over_keys(mixer, message):
    decoder = models.abstract(generated.config("matrix", mixer, GROUPED))
    with pytest.raises(sharding.MeshError, match=message):
        parameter_shardings(decoder, mesh_for("key=2"))


def test_slots_divide_over_the_devices_of_rows():
    decoder = made(generated.config("matrix", cfg.Sum(), GROUPED), "data=4,tensor=2")
    assert mesh_of(decoder).shape["data"] == 4 and mesh_of(made(decoder.config)) is None
    with pytest.raises(sharding.MeshError, match="slots=6 .* data=4; nearest legal: 4 or 8"):
        Engine(decoder, 0, slots=6)
