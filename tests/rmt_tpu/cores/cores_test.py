"""Cores of any kind in one model: against their equations, in every schedule, from caches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rmt_tpu
from pallas_kernels.platform import collecting_calls, interpreting
from pallas_kernels.target import lowering_for
from rmt_tpu import config as cfg
from rmt_tpu.analysis import depth
from rmt_tpu.errors import UsageError
from tests import models
from tests.closeness import assert_close
from tests.rmt_tpu import plain
from tests.rmt_tpu.residual import checks, over_depth
from tests.tiers import later

GROUPED = cfg.Attention(
    4, 4, cfg.Rope(dims=2), False, num_kv_heads=2, query_key_norm=True, bias=True
)
LATENT = cfg.Mla(
    num_heads=2, head_dim=4, kv_rank=6, rope_dim=2, query_rank=5, scale=0.7, latent_epsilon=0.1
)
UNTURNED = cfg.Mla(num_heads=2, head_dim=4, kv_rank=6, rope_dim=2, positions=cfg.NoPositions())
GATED, SQUARED = cfg.FeedForward(10, "swiglu"), cfg.FeedForward(7, "relu2")
STACKS = (
    cfg.Stack((GROUPED, GATED), repeat=2),
    cfg.Stack((LATENT, SQUARED, UNTURNED, cfg.FeedForward(6, "geglu")), repeat=2),
)
DELTA = cfg.Kda(num_heads=2, head_dim=4, conv_size=3)
BOUNDED = cfg.Kda(num_heads=2, head_dim=4, gate_rank=3, lower_bound=-5.0)
LINEAR = (cfg.Stack((DELTA, GATED), repeat=2), cfg.Stack((UNTURNED, GATED, BOUNDED, SQUARED)))
# Gated DeltaNet, with heads of queries that several heads of values share; and full gates alone.
NET = cfg.Kda(4, 4, num_key_heads=2, decays="heads", gates="full", gate_activation="silu")
FULL = cfg.Kda(num_heads=2, head_dim=4, gates="full", lower_bound=-5.0)
NETS = (cfg.Stack((NET, GATED, FULL, SQUARED), repeat=2),)
# The attention and the feed-forward layers of Kimi K3. Hidden values exceed the bounds.
K3 = (
    cfg.Mla(
        2, 4, kv_rank=6, rope_dim=2, query_rank=5, positions=cfg.NoPositions(), output_gate=True
    ),
    cfg.FeedForward(10, "situ", situ_beta=0.5, situ_linear_beta=0.3),
    FULL,
    cfg.FeedForward(7, "situ", situ_linear_beta=None),
)
# Biases everywhere, as in GPT-2; norms of what is written, as in OLMo 2; and both norms.
BIASED = (
    cfg.Attention(4, 4, cfg.Learned(11), bias=True, output_bias=True, output_gate=True),
    cfg.FeedForward(7, bias=True),
    cfg.Attention(2, 6, cfg.Rope(), False, num_kv_heads=1, output_bias=True, normed="both"),
    cfg.FeedForward(9, "geglu", bias=True, normed="both"),
)
# Stacks of a single layer, which begin and end with outputs of different shapes.
EDGES = (cfg.Stack((SQUARED, GROUPED)), cfg.Stack((GATED, LATENT)))
OVER_HEADS = {"query_key_norm": True, "query_key_norm_over": "heads"}
AFTER = (
    cfg.Attention(4, 4, cfg.Rope(), False, num_kv_heads=2, normed="output", **OVER_HEADS),
    cfg.FeedForward(10, "swiglu", normed="output"),
)
# A window in two layers of three, shorter than the texts here. Two layers have soft caps on logits.
WINDOWED = (
    cfg.Attention(4, 4, cfg.Rope(), False, num_kv_heads=2, window=4, logit_cap=0.8),
    GATED,
    cfg.Attention(
        4, 4, cfg.NoPositions(), num_kv_heads=1, query_key_norm=True, window=1, scale=0.7
    ),
    GATED,
    dataclasses.replace(GROUPED, output_gate=True, logit_cap=0.9),
    SQUARED,
)
STORES = {
    "vector": cfg.VectorStore(12),
    "matrix": cfg.MatrixStore(6, vectors=3, vector_dim=4),
}
MIXERS = {
    "sum": (cfg.Sum(), "full"),
    "reversible": (cfg.Sum(), "reversible"),
    "reversible, kept": (cfg.Sum(), "reversible_dots"),
    "blocks of a period": (cfg.BlockAttention(sublayers_per_block=4), "full"),
    "blocks of 5": (cfg.BlockAttention(sublayers_per_block=5), "blocks"),
    "blocks of 3": (cfg.BlockAttention(sublayers_per_block=3), "full"),
    "blocks of 3, kept": (cfg.BlockAttention(sublayers_per_block=3), "dots"),
    "full": (cfg.FullAttention(), "full"),
    "dense": (cfg.Dense(), "full"),
    "input query": (cfg.BlockAttention(sublayers_per_block=5, query="input"), "blocks"),
}


ON_MATRICES = ("reversible", "reversible, kept")


def model(store, name, **changes):
    mixer, remat = MIXERS[name]
    given = {"store": STORES[store], "mixer": mixer, "remat": remat, "norm": "rmsnorm"}
    given |= {"stacks": STACKS, "compute_dtype": "float64"}
    return cfg.ModelConfig(vocab_size=models.VOCAB, **given | changes)


def reference(params, tokens, config):
    if config.mixer.kind == "sum":
        return plain.model(params, tokens, config)
    return over_depth.reference(params, tokens, config)


@pytest.mark.parametrize(
    "store, name",
    [
        ("vector", "sum"),
        *later(
            ("matrix", "blocks of 5"),
            *[("vector", name) for name in MIXERS if name not in (*ON_MATRICES, "sum")],
            *[("matrix", name) for name in MIXERS if name != "blocks of 5"],
        ),
    ],
)
def test_a_model_of_many_cores_follows_their_equations(store, name):
    with jax.enable_x64(True):
        checks.assert_follows_equations(model(store, name), reference)


@pytest.mark.parametrize(
    "store, name",
    [
        ("matrix", "reversible"),
        *later(
            *[("vector", name) for name in ("sum", "blocks of 5", "full")],
            *[("matrix", name) for name in ("sum", "blocks of 3", "dense", "reversible, kept")],
        ),
    ],
)
def test_linear_attention_follows_its_equations(store, name):
    with jax.enable_x64(True):
        checks.assert_follows_equations(model(store, name, stacks=LINEAR), reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    "store, name",
    [("matrix", "sum"), ("vector", "sum"), ("vector", "full"), ("matrix", "reversible")],
)
def test_gated_delta_net_follows_its_equations(store, name):
    with jax.enable_x64(True):
        checks.assert_follows_equations(model(store, name, stacks=NETS), reference)


@pytest.mark.parametrize(
    "store, name",
    [
        ("vector", "sum"),
        *later(("vector", "blocks of 3"), ("matrix", "reversible"), ("matrix", "reversible, kept")),
    ],
)
def test_gated_latent_attention_and_situ_follow_their_equations(store, name):
    with jax.enable_x64(True):
        config = model(store, name, stacks=(cfg.Stack(K3, 2),))
        checks.assert_follows_equations(config, reference)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sum", "full", "blocks of 3"])
def test_stacks_that_begin_and_end_differently_follow_their_equations(name):
    with jax.enable_x64(True):
        config = model("vector", name, stacks=EDGES)
        # The first site has one source, whatever its query.
        checks.assert_follows_equations(config, reference, unused=("query", "key_gain"))


@pytest.mark.parametrize("mixer", [cfg.Dense(), *later(cfg.FullAttention(), cfg.DeltaAttention())])
def test_stacks_begin_and_end_with_outputs_of_different_shapes(mixer):
    config = model("vector", "full", stacks=EDGES, mixer=mixer, compute_dtype="float32")
    graphdef = models.graph(config)
    loss = lambda params: nnx.merge(graphdef, params)(models.tokens()).sum()
    params = nnx.to_pure_dict(nnx.state(models.abstract(config), nnx.Param))
    shapes = lambda tree: jax.tree.map(jnp.shape, tree)
    assert shapes(jax.eval_shape(jax.grad(loss), params)) == shapes(params)


@pytest.mark.parametrize(
    "stacks, changes",
    [
        ((*BIASED, *AFTER), {"norm": "layernorm", "norm_bias": True}),
        *later(
            (AFTER, {}),
            (BIASED, {"norm": "layernorm", "norm_bias": True, "mixer": MIXERS["blocks of 5"][0]}),
            (BIASED, {"norm": "layernorm", "norm_bias": True, "mixer": MIXERS["full"][0]}),
            (BIASED, {"norm": "layernorm", "norm_bias": True, "mixer": cfg.Dense()}),
        ),
    ],
)
def test_biases_and_norms_of_outputs_follow_their_equations(stacks, changes):
    with jax.enable_x64(True):
        config = model("vector", "sum", stacks=(cfg.Stack(stacks, 2),), **changes)
        checks.assert_follows_equations(config, reference)


@pytest.mark.parametrize(
    "store, name",
    [
        ("matrix", "reversible"),
        *later(("vector", "sum"), ("matrix", "sum"), ("vector", "blocks of 5"), ("matrix", "full")),
    ],
)
def test_windows_and_caps_in_some_layers_follow_their_equations(store, name):
    with jax.enable_x64(True):
        options = {"embedding_scale": 1.5, "logit_cap": 0.7}
        config = model(store, name, stacks=(cfg.Stack(WINDOWED, 2),), **options)
        checks.assert_follows_equations(config, reference)


# Gemma 2's layers: every other one has a window; all have a soft cap, and norms on both sides.
GEMMA = (
    cfg.Attention(4, 8, cfg.Rope(), False, 2, window=4, scale=0.3, logit_cap=0.8, normed="both"),
    cfg.FeedForward(10, "geglu", normed="both"),
    cfg.Attention(4, 8, cfg.Rope(), False, 2, scale=0.3, logit_cap=0.8, normed="both"),
    cfg.FeedForward(10, "geglu", normed="both"),
)


@pytest.mark.slow
def test_a_tiny_gemma2_with_kernels_is_the_one_without():
    """TPU kernels are interpreted, forward and backward; so are those of a prompt."""
    options = {"embedding_scale": 12**0.5, "logit_cap": 0.7, "norm": "rmsnorm"}
    options |= {"tied_embeddings": True, "compute_dtype": "float32"}
    config = cfg.ModelConfig(
        (cfg.Stack(GEMMA, 2),), STORES["vector"], vocab_size=models.VOCAB, **options
    )
    params = jax.tree.map(np.float32, models.random_parameters(config))
    plain_gradients, logits = checks.gradients_and_logits(config)(params)
    with lowering_for("TPU v5 lite"), interpreting(), collecting_calls() as calls:
        got = checks.gradients_and_logits(config)(params)
        checks.assert_cached_equals_uncached(config)
    attended = [call for call in calls if call.name == "causal_attention"]
    assert {call.op for call in attended} == {"attention_forward", "attention_backward"}
    assert {call.args[0].cap for call in attended} == {0.8}
    assert_close(got, (plain_gradients, logits), 1e-5)


def test_output_gates_are_not_computed_in_the_compute_dtype():
    config = model("vector", "sum", stacks=NETS, compute_dtype="bfloat16")
    graphdef, params = nnx.split(models.abstract(config), nnx.Param)
    run = lambda params: nnx.merge(graphdef, params)(models.tokens())
    program, (batch, seq) = str(jax.make_jaxpr(run)(params)), models.tokens().shape
    for core in (NET, FULL):
        gate = f"[{batch},{seq},{core.num_heads},{core.head_dim}] = logistic"
        assert f"f32{gate}" in program and f"bf16{gate}" not in program


@pytest.mark.slow
@pytest.mark.parametrize("stacks", [LINEAR, NETS, (cfg.Stack(WINDOWED, 2),)])
def test_documents_in_one_row(stacks):
    """No state, convolution or window reaches from one document into the next."""
    with jax.enable_x64(True):
        config = cfg.ModelConfig(
            stacks, STORES["vector"], vocab_size=models.VOCAB, compute_dtype="float64"
        )
        graphdef, tokens = models.graph(config), models.tokens()

        @jax.jit
        def both(params):
            decoder = nnx.merge(graphdef, params)
            ids = jnp.broadcast_to(jnp.arange(11) >= 4, tokens.shape).astype(jnp.int32)
            alone = [decoder(tokens[:, :4]), decoder(tokens[:, 4:])]
            return decoder(tokens, segment_ids=ids), jnp.concatenate(alone, axis=1)

        assert_close(*both(models.random_parameters(config)), 1e-12)


@pytest.mark.parametrize("stacks", [(cfg.Stack((*K3, *WINDOWED), 2),), *later((LINEAR,), (NETS,))])
def test_prompts_of_two_lengths_go_on_from_their_caches(stacks):
    """A prompt of two lengths in parts, then token by token; and one that takes a used cache."""
    with jax.enable_x64(True):
        config = cfg.ModelConfig(
            stacks,
            STORES["vector"],
            vocab_size=models.VOCAB,
            compute_dtype="float64",
            logit_cap=0.7,
        )
        graphdef, tokens = models.graph(config), models.tokens()

        @jax.jit
        def both(params, lengths):
            decoder = nnx.merge(graphdef, params)
            logits, cache = decoder.prefill(tokens[:, :6], lengths, decoder.empty_cache(2, 11))
            again, _ = decoder.extend(tokens[:, :6], lengths, cache._replace(length=0 * lengths))
            rows = jax.vmap(jnp.roll)(tokens, -lengths)
            second, cache = decoder.extend(rows[:, :3], jnp.array([3, 2]), cache)
            rows = jax.vmap(jnp.roll)(rows, -jnp.array([3, 2]))
            third, cache = decoder.decode(rows[:, :1], cache)
            return decoder(tokens), jnp.stack([logits, again, second, third[:, 0]], axis=1)

        whole, decoded = both(models.random_parameters(config), jnp.array([6, 4]))
        places = np.array([[5, 5, 8, 9], [3, 3, 5, 6]])
        assert_close(decoded, np.take_along_axis(whole, places[..., None], axis=1), 1e-12)


@pytest.mark.slow
def test_a_tiny_kimi_k3_goes_on_from_its_caches():
    checks.assert_cached_equals_uncached(rmt_tpu.preset("k3-tiny"))


def test_windows_are_read_from_a_long_cache():
    """A query sees the tokens of its window of 130 alone, in two rows of 300 tokens."""
    with jax.enable_x64(True):
        core = cfg.Attention(4, 4, cfg.Rope(), False, num_kv_heads=2, window=130)
        config = model("vector", "sum", stacks=(cfg.Stack((core, GATED), 2),))
        graphdef, tokens = models.graph(config), models.tokens(seq=300)

        @jax.jit
        def whole(params):
            return nnx.merge(graphdef, params)(tokens)

        @functools.partial(jax.jit, static_argnums=3)
        def on(params, cache, start, count):
            """Logits of the next `count` tokens of both rows, which begin at `start`."""
            decoder, rows = nnx.merge(graphdef, params), jax.vmap(jnp.roll)(tokens, -start)
            return decoder.decode(rows[:, :count], cache._replace(length=start))

        params = jax.tree.map(jnp.asarray, models.random_parameters(config))
        wanted = whole(params)
        cache = nnx.merge(graphdef, params).empty_cache(2, 600)
        _, cache = on(params, cache, jnp.array([0, 0]), 300)
        for count in (1, 7):
            for start in ([0, 293], [129, 130], [131, 255], [256, 257]):
                got, _ = on(params, cache, jnp.array(start), count)
                places = np.array(start)[:, None] + np.arange(count)
                assert_close(got, np.take_along_axis(wanted, places[..., None], 1), 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("cores", [(GROUPED, SQUARED, LATENT), K3, (*BIASED, *AFTER), WINDOWED])
def test_decoding_in_two_pieces_is_the_model(cores):
    """MLA decodes with W_kvb absorbed, and is expanded without a cache.

    The last core writes heads, where the first site is given the embedding.
    """
    with jax.enable_x64(True):
        config = model("vector", "sum", stacks=(cfg.Stack(cores),))
        graphdef, tokens = models.graph(config), models.tokens()

        @jax.jit
        def both(params):
            decoder = nnx.merge(graphdef, params)
            first, cache = decoder.decode(tokens[:, :7], decoder.empty_cache(2, 11))
            second, _ = decoder.decode(tokens[:, 7:], cache)
            return decoder(tokens), jnp.concatenate([first, second], axis=1)

        whole, decoded = both(models.random_parameters(config))
        assert_close(decoded, whole, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["matrix", "vector"])
def test_decoding_and_unrolled_layers_are_the_model(store):
    """In float64: MLA decodes with W_kvb absorbed, and is expanded without a cache."""
    with jax.enable_x64(True):
        config = model(store, "blocks of 5")
        graphdef, tokens = models.graph(config), models.tokens()

        @jax.jit
        def three_ways(params):
            decoder = nnx.merge(graphdef, params)
            cache, pieces = decoder.empty_cache(2, 13), []
            for start, end in [(0, 4), (4, 5), (5, 11)]:
                logits, cache = decoder.decode(tokens[:, start:end], cache)
                pieces.append(logits)
            unrolled = decoder.unembedding(depth.unrolled(decoder, tokens).z)
            return decoder(tokens), jnp.concatenate(pieces, axis=1), unrolled

        whole, decoded, unrolled = three_ways(models.random_parameters(config))
        assert_close(decoded, whole, 1e-12)
        assert_close(unrolled, whole, 1e-12)


def test_a_caller_s_positions_are_those_that_are_rotated():
    """Moved all alike they change nothing, for heads see only how far tokens are apart."""
    with jax.enable_x64(True):
        config = model("vector", "sum", stacks=(*STACKS, cfg.Stack(WINDOWED)))
        graphdef, tokens, order = models.graph(config), models.tokens(), jnp.arange(11)[None]

        @jax.jit
        def logits(params, positions):
            return nnx.merge(graphdef, params)(tokens, positions=positions)

        params = models.random_parameters(config)
        params = jax.tree.map(jnp.asarray, params)
        whole = logits(params, order)
        assert_close(logits(params, order + 7), whole, 1e-10)
        assert np.abs(logits(params, 2 * order) - whole).max() > 1e-3


@pytest.mark.slow
def test_a_feed_forward_layer_s_products_come_in_turn_where_that_is_faster():
    config = models.model(positions=cfg.Rope())
    graphdef, params = models.graph(config), models.random_parameters(config)

    def barriers(kind, length):
        tokens = jnp.zeros((1, length), jnp.int32)
        with lowering_for(kind):
            traced = jax.make_jaxpr(lambda p: nnx.merge(graphdef, p)(tokens))(params)
        return str(traced).count("optimization_barrier")

    assert barriers("TPU v5 lite", 128) > barriers("TPU v5 lite", 127)
    assert barriers("TPU v6 lite", 128) == barriers("TPU v6 lite", 127)


# Configs ---------------------------------------------------------------------------------------


def test_a_list_of_layers_becomes_stacks():
    a, b, c = (GROUPED, GATED), (LATENT, GATED), (UNTURNED, SQUARED)
    found = cfg.stacks([a, *3 * [b, b, c], b])
    assert found == (cfg.Stack(a), cfg.Stack((*b, *b, *c), 3), cfg.Stack(b))
    assert cfg.stacks(5 * [a]) == (cfg.Stack(a, 5),)
    assert cfg.stacks([a, b, c]) == (cfg.Stack(a), cfg.Stack(b), cfg.Stack(c))


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: cfg.Attention(4, 4, num_kv_heads=3),
            "num_kv_heads=3 does not divide num_heads=4; legal: 1, 2, 4",
        ),
        (
            lambda: cfg.Attention(4, 4, cfg.Rope(dims=6)),
            "positions.dims=6 must be even and at most head_dim=4",
        ),
        (lambda: cfg.Mla(2, 4, 6, 3), "Mla.rope_dim=3 must be even for rope positions"),
        (
            lambda: cfg.Mla(2, 4, 6, 2, None, cfg.Rope(dims=4)),
            "positions.dims=4 must be rope_dim=2",
        ),
        (
            lambda: cfg.Attention(4, 4, query_key_norm_over="heads"),
            "query_key_norm_over='heads' requires query_key_norm; set query_key_norm=true",
        ),
        (lambda: cfg.Stack(()), "Stack.cores is empty"),
        (
            lambda: cfg.FeedForward(4, "swiglu", situ_beta=2.0),
            "situ_beta=2.0 requires activation='situ', not 'swiglu'; set activation=situ, or set",
        ),
        (
            lambda: cfg.Kda(4, 4, num_key_heads=3),
            "Kda.num_key_heads=3 does not divide num_heads=4; legal: 1, 2, 4",
        ),
        (
            lambda: model("vector", "sum", stacks=(cfg.Stack(WINDOWED),), mixer=cfg.Mudd()),
            "mixer=mudd does not support attention.output_gate=True; legal: false",
        ),
        (
            lambda: model(
                "vector", "sum", stacks=(cfg.Stack(WINDOWED),), parametrization=cfg.MuP()
            ),
            "attention.scale sets the factor of attention logits, which muP sets itself; legal: nu",
        ),
        (
            lambda: model("vector", "sum", stacks=STACKS[1:], parametrization=cfg.MuP()),
            "mla.scale sets the factor of attention logits, which muP sets itself; legal: null, or",
        ),
        (
            lambda: model("matrix", "sum", stacks=(cfg.Stack(BIASED[:2]),)),
            "ModelConfig.attention.output_bias=True needs a vector store; legal: vector",
        ),
        (
            lambda: model("matrix", "sum", stacks=(cfg.Stack((GROUPED, AFTER[1])),)),
            "ModelConfig.feed_forward.normed=output needs a vector store; legal: vector",
        ),
        (
            lambda: model("matrix", "sum", norm_bias=True),
            "ModelConfig.norm_bias=True needs a vector store; legal: vector",
        ),
        (
            lambda: model("vector", "full", stacks=(cfg.Stack(AFTER),)),
            "mixer=full_attention needs a norm before every core, but a core has normed='output'",
        ),
        (
            lambda: cfg.ModelConfig(STACKS, cfg.MatrixStore(6, vectors=3, vector_dim=8)),
            "attention.head_dim=4 must be the size of the residual's data vectors, store.vec",
        ),
        (
            lambda: cfg.ModelConfig((cfg.Stack((GROUPED,), 2),), STORES["vector"]),
            "stacks.0 cannot repeat: its last core writes other vectors than the core before the s",
        ),
        (
            lambda: cfg.ModelConfig(
                (cfg.Stack((GROUPED, GATED, GATED), 2),), STORES["vector"], cfg.Dense()
            ),
            "mixer=dense needs layers of two sublayers",
        ),
        (
            lambda: model("vector", "sum", mixer=cfg.DepthLstm()),
            "mixer=depth_lstm needs a feed-forward layer without a gate",
        ),
        (
            lambda: cfg.ModelConfig(
                (cfg.Stack((cfg.Kda(2**16, 2**16), GATED)),), cfg.MatrixStore(4)
            ),
            r"ModelConfig.kda.num_heads \* kda.head_dim = 4294967296 must be at most 2147483647",
        ),
        (
            lambda: cfg.ModelConfig((cfg.Stack((GATED,)),), cfg.MatrixStore(6)),
            "MatrixStore.vectors=None and MatrixStore.vector_dim=None must be set, because no core",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize("mixer", [cfg.Dense(), cfg.Mudd()])
def test_weighted_sums_over_depth_need_no_norm_before_cores(mixer):
    assert model("vector", "sum", mixer=mixer, stacks=(cfg.Stack(AFTER, 2),)).mixer == mixer
