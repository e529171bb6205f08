"""The decoder: against the paper's equations, unrolled, cached, masked and compiled."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rmt_tpu import Decoder, cores, cost
from rmt_tpu import config as cfg
from rmt_tpu.cores.core import causal, logit_scale
from tests import models
from tests.closeness import assert_close
from tests.rmt_tpu import plain
from tests.rmt_tpu.residual import checks
from tests.tiers import later

STORES = ["matrix", *later("vector")]
POSITIONS = [cfg.Learned(32), cfg.Alibi(), cfg.Rope(), cfg.NoPositions()]
# Positions are known to attention and the embedding alone, stores to neither.
STORES_AND_POSITIONS = [("matrix", positions) for positions in POSITIONS[1:3]]
STORES_AND_POSITIONS += [("vector", POSITIONS[0])]
STORES_AND_POSITIONS += later(
    *(("matrix", positions) for positions in (POSITIONS[0], *POSITIONS[3:])),
    *(("vector", positions) for positions in POSITIONS[1:]),
)
label = lambda x: x if isinstance(x, str) else x.kind


def narrow(config):
    """`models.random_parameters` in float32."""
    return jax.tree.map(np.float32, models.random_parameters(config))


@pytest.mark.parametrize(
    "store, norm",
    [
        ("matrix", "layernorm"),
        ("vector", "rmsnorm"),
        *later(("matrix", "rmsnorm"), ("vector", "layernorm")),
    ],
)
def test_equals_the_papers_equations_in_float64(store, norm):
    with jax.enable_x64(True):
        config = models.model(store, norm=norm, compute_dtype="float64")
        checks.assert_follows_equations(config, plain.model, tolerance=1e-12)


@pytest.mark.parametrize("store", STORES)
def test_tied_embeddings_are_one_parameter_with_both_gradients(store):
    with jax.enable_x64(True):
        config = models.model(store, num_layers=1, tied_embeddings=True, compute_dtype="float64")
        assert "unembedding" not in models.random_parameters(config)
        checks.assert_follows_equations(config, plain.model, tolerance=1e-12)
    drawn = models.split(config)[1]["embedding"]["tokens"]
    assert np.std(drawn) == pytest.approx(config.width**-0.5, rel=0.1)
    assert sum(cost.parameters(config).values()) == sum(map(np.size, leaves(config)))


def leaves(config):
    return jax.tree.leaves(models.split(config)[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "store, mixer, remat",
    [
        ("matrix", "sum", "reversible"),
        *later(("vector", "sum", "full")),
        *later(*(("vector", mixer, "full") for mixer in models.MIXERS if mixer != "sum")),
        *later(*(("matrix", mixer, "full") for mixer in ("blocks", "full", "dense"))),
    ],
)
def test_where_64_bits_are_the_default_it_computes_in_its_own_dtype(store, mixer, remat):
    config = models.model(store, mixer=models.MIXERS[mixer], num_layers=2, remat=remat)
    params, tokens = narrow(config), np.asarray(models.tokens())

    def logits_and_gradients():
        abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
        graphdef = nnx.split(abstract, nnx.Param)[0]

        def loss(params, tokens):
            logits = nnx.merge(graphdef, params)(tokens)
            return jnp.sum(jnp.sin(logits)), logits

        return jax.jit(jax.grad(loss, has_aux=True))(params, tokens)

    wanted = logits_and_gradients()
    with jax.enable_x64(True):
        found = logits_and_gradients()
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype("float32")}
    assert_close(found, wanted, 1e-4)


# The loop --------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", STORES)
def test_scanned_equals_unrolled(store):
    config = models.model(store, num_layers=2)
    graphdef, params = models.graph(config), narrow(config)
    tokens = models.tokens()
    context = cores.causal(tokens.shape[1], None, None)

    def unrolled(params):
        decoder = nnx.merge(graphdef, params)
        graph, layers = nnx.split(decoder.stacks[0])
        mixer, store = decoder.mixer, decoder.store
        embedded = decoder.embedding(tokens, context.query_positions, decoder.dtype)
        state, y = mixer.start(store, *store.start(*embedded))
        for index in range(config.num_layers):
            layer = nnx.merge(graph, jax.tree.map(lambda p, index=index: p[index], layers))
            for k, (site, core) in enumerate((one.site, one.core) for one in layer):
                state, z = mixer.advance(store, state, y, site, 2 * index + k)
                y = core(z, context, jnp.int32(2 * index + k))
        _, z = mixer.advance(store, state, y, decoder.final_site, 2 * config.num_layers)
        return decoder.unembedding(z.residual)

    def with_gradients(logits):
        def objective(params):
            found = logits(params)
            return jnp.sum(jnp.sin(found)), found

        return jax.jit(jax.grad(objective, has_aux=True))(params)

    gradients, logits = with_gradients(lambda params: nnx.merge(graphdef, params)(tokens))
    wanted_gradients, wanted = with_gradients(unrolled)
    assert_close(logits, wanted, 1e-5)
    assert_close(gradients, wanted_gradients, 1e-4)


@pytest.mark.parametrize("store", ["matrix", *later("vector")])
def test_the_program_does_not_grow_with_depth(store):
    """So that neither does the time that it takes to compile."""

    def lines(num_layers):
        config = models.model(store, num_layers=num_layers)
        graphdef, params = nnx.split(models.abstract(config), nnx.Param)
        loss = lambda p: jnp.sum(nnx.merge(graphdef, p)(models.tokens()))
        return jax.jit(jax.grad(loss)).lower(params).as_text().count("\n")

    assert lines(48) == lines(6) > 100


@pytest.mark.parametrize(
    "store, policies",
    [
        # What "full" gives is compared with the equations above.
        ("matrix", ("none", "dots", "reversible", "reversible_dots")),
        *later(("matrix", ("none", "full")), ("vector", ("none", "dots", "full"))),
    ],
)
def test_remat_policies_give_the_same_gradients(store, policies):
    gradients = {}
    for policy in policies:
        config = models.model(store, remat=policy)
        graphdef = models.graph(config)
        loss = lambda p, graphdef=graphdef: jnp.sum(nnx.merge(graphdef, p)(models.tokens()) ** 2)
        gradients[policy] = jax.jit(jax.grad(loss))(narrow(config))
    for policy in policies[1:]:
        assert_close(gradients[policy], gradients["none"], 1e-5)


@pytest.mark.parametrize(
    ("store", "mixer"),
    [("vector", "blocks"), *later(("vector", "mudd"), ("vector", "delta"), ("matrix", "blocks"))],
)
def test_a_bank_with_kept_products_gives_the_same_gradients(store, mixer):
    gradients = {}
    for policy in ("full", "dots"):
        config = models.model(store, mixer=models.MIXERS[mixer], remat=policy)
        graphdef = models.graph(config)
        loss = lambda p, graphdef=graphdef: jnp.sum(nnx.merge(graphdef, p)(models.tokens()) ** 2)
        gradients[policy] = jax.jit(jax.grad(loss))(narrow(config))
    assert_close(gradients["dots"], gradients["full"], 1e-5)


@pytest.mark.parametrize(
    ("store", "mixer", "policy"),
    [
        ("vector", "sum", "dots"),
        ("vector", "blocks", "dots"),
        ("vector", "sum", "offload"),
        ("matrix", "sum", "reversible_dots"),
        ("matrix", "blocks", "dots"),
    ],
)
def test_products_are_not_computed_again(store, mixer, policy):
    """The backward pass has what the products with weights gave.

    These are the products of feed-forward layers, and, where these are not read from a matrix, the
    queries, keys and values.
    """
    config = models.model(store, mixer=models.MIXERS[mixer], remat=policy)
    graphdef, params = nnx.split(models.abstract(config), nnx.Param)
    loss = lambda p: jnp.sum(nnx.merge(graphdef, p)(models.tokens()))
    kept = jax.tree.leaves(jax.eval_shape(lambda p: jax.vjp(loss, p)[1], params))
    tokens = models.tokens().shape
    products = [(*tokens, 9, 6)] * (store == "vector")
    for shape in [*products, (*tokens, config.stacks[0].cores[1].hidden_dim)]:
        layers = [x.size for x in kept if x.shape[-len(shape) :] == shape]
        assert sum(layers) == 3 * np.prod(shape)


@pytest.mark.parametrize(
    ("core", "shapes"),
    [
        (cfg.Mla(3, 6, kv_rank=7, rope_dim=2, query_rank=5), [(5,), (24,), (9,), (18,)]),
        (cfg.Experts(num_experts=4, top_k=2, hidden_dim=11, shared=0), [(22,)]),
        *later(
            (cfg.Mla(3, 6, kv_rank=7, rope_dim=2, output_gate=True), [(24,), (9,), (18,)]),
            (cfg.Kda(num_heads=3, head_dim=6), [(18,), (3,)]),
            (cfg.Kda(3, 6, decays="heads", gates="full"), [(3,)]),
        ),
    ],
)
def test_products_within_other_cores_are_kept(core, shapes):
    """The widths are those of products with weights that only this core has."""
    config = models.model("vector", remat="dots")
    attention, feed_forward = config.stacks[0].cores
    cores = (attention, core) if core.kind == "experts" else (core, feed_forward)
    config = config.replace(stacks=(cfg.Stack(cores, repeat=3),))
    counts = {}
    for policy in ("full", "dots"):
        graphdef, params = nnx.split(models.abstract(config.replace(remat=policy)), nnx.Param)
        loss = lambda p, graphdef=graphdef: jnp.sum(nnx.merge(graphdef, p)(models.tokens()))
        kept = jax.tree.leaves(jax.eval_shape(lambda p, loss=loss: jax.vjp(loss, p)[1], params))
        counts[policy] = [sum(x.shape[-1:] == shape for x in kept) for shape in shapes]
    assert all(d > f for d, f in zip(counts["dots"], counts["full"], strict=True))


@pytest.mark.parametrize("mixer", ["sum", "blocks", "full", "highway", "mudd", "hc"])
def test_attention_is_not_computed_again(mixer):
    """The backward pass has its output and log-sums, of all three layers."""
    config = models.model("vector", mixer=models.MIXERS[mixer], remat="full")
    graphdef, params = nnx.split(models.abstract(config), nnx.Param)
    loss = lambda p: jnp.sum(nnx.merge(graphdef, p)(models.tokens()))
    kept = jax.tree.leaves(jax.eval_shape(lambda p: jax.vjp(loss, p)[1], params))
    (batch, seq), heads, size = models.tokens().shape, 3, 6
    for shape in [(batch, seq, heads), (batch, seq, heads, size)]:
        layers = [x.size for x in kept if x.shape[-len(shape) :] == shape]
        assert sum(layers) == 3 * np.prod(shape)


def test_documents_in_a_numpy_array(unannotated):
    """Attention indexes them by traced numbers, which a NumPy array does not allow."""
    ids = np.asarray([[1, 1, 2]])
    for positions in (None, np.asarray([[0, 1, 0]])):
        context = causal(3, positions, ids)
        at = jax.jit(lambda i, context=context: context.segment_ids[:, i])(jnp.arange(3))
        np.testing.assert_array_equal(at, ids)
        assert isinstance(context.query_positions, jax.Array)


def test_a_jitted_gradient_may_close_over_documents_in_a_numpy_array(unannotated):
    """They are an array again in a backward pass of several programs."""
    config = models.model("vector", mixer=models.MIXERS["full"], remat="blocks", num_layers=1)
    graphdef, ids = models.graph(config), np.ones((2, 11), np.int32)
    loss = lambda p: nnx.merge(graphdef, p)(models.tokens(), segment_ids=ids).sum()
    jax.eval_shape(jax.grad(loss), narrow(config))


# Who sees whom ---------------------------------------------------------------------------------


@pytest.mark.parametrize("store, positions", STORES_AND_POSITIONS, ids=label)
def test_no_token_sees_the_future_or_another_document(store, positions):
    config = models.model(store, positions=positions, num_layers=2)
    graphdef, params = models.graph(config), narrow(config)
    tokens = np.asarray(models.tokens(batch=1, seq=12))
    # Documents of 4, 1, 1 and 6 tokens: two starts in a row must not see each other.
    segments = np.asarray([[1, 1, 1, 1, 2, 3, 4, 4, 4, 4, 4, 4]], np.int32)
    run = jax.jit(
        lambda p, tokens: nnx.merge(graphdef, p)(tokens, segment_ids=jnp.asarray(segments))
    )
    logits = lambda tokens: np.asarray(run(params, tokens))
    before = logits(tokens)
    for position in range(12):
        changed = tokens.copy()
        changed[0, position] = (changed[0, position] + 1) % models.VOCAB
        moved = np.any(logits(changed) != before, axis=-1)[0]
        sees = (segments[0] == segments[0, position]) & (np.arange(12) >= position)
        np.testing.assert_array_equal(moved, sees)


def at_positions(config):
    """Logits of tokens at the positions given."""
    graphdef, params = models.graph(config), narrow(config)
    run = jax.jit(lambda p, tokens, at: nnx.merge(graphdef, p)(tokens, positions=at))
    return lambda tokens, at: np.asarray(run(params, tokens, np.asarray(at, np.int32)[None]))


@pytest.mark.parametrize("positions", [cfg.Alibi(), cfg.Rope()], ids=label)
def test_relative_positions_ignore_a_shift(positions):
    logits, tokens = at_positions(models.model(positions=positions)), models.tokens()
    expected = logits(tokens, np.arange(11))
    np.testing.assert_allclose(logits(tokens, 17 + np.arange(11)), expected, atol=2e-5)
    assert np.abs(logits(tokens, 3 * np.arange(11)) - expected).max() > 1e-3


@pytest.mark.parametrize("store", STORES)
def test_what_the_tables_do_not_have_is_nan(store):
    logits = at_positions(models.model(store))
    tokens = np.asarray(models.tokens(batch=1))
    beyond = tokens.copy()
    beyond[0, 5] = models.VOCAB
    assert np.isfinite(logits(tokens, np.arange(11))).all()
    assert np.isnan(logits(beyond, np.arange(11))[0, 5:]).all()
    assert np.isnan(logits(tokens, 25 + np.arange(11))[0, 7:]).all()


# Decoding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("store, positions", STORES_AND_POSITIONS, ids=label)
def test_cached_logits_equal_uncached(store, positions):
    checks.assert_cached_equals_uncached(models.model(store, positions=positions))


def test_decoding_keeps_one_residual_matrix_and_does_one_token_of_work():
    config = models.model("matrix", num_layers=2)
    graphdef, params = nnx.split(models.abstract(config))
    step = lambda params, token, cache: nnx.merge(graphdef, params).decode(token, cache)
    capacity, token = 400, jax.ShapeDtypeStruct((1, 1), jnp.int32)
    cache = jax.eval_shape(lambda p: nnx.merge(graphdef, p).empty_cache(1, capacity), params)
    per_token = 2 * config.num_layers * config.attention.num_heads * config.attention.head_dim
    assert sum(x.size for x in jax.tree.leaves(cache)) == capacity * per_token + 1  # and its length
    flops = jax.jit(step).lower(params, token, cache).compile().cost_analysis()["flops"]
    prompt = jax.ShapeDtypeStruct((1, capacity), jnp.int32)
    whole = jax.jit(step).lower(params, prompt, cache).compile().cost_analysis()["flops"]
    assert flops < whole / (capacity / 4)
    shapes = jax.make_jaxpr(step)(params, token, cache)
    matrix = f"{config.store.key_dim},{config.attention.head_dim}]"
    assert f"[1,1,{matrix}" in str(shapes) and f"[1,{capacity},{matrix}" not in str(shapes)


# Initialisation and parametrisation ------------------------------------------------------------


@pytest.mark.parametrize("init_std", [0.02, *later(0.15, 1.0)])
@pytest.mark.parametrize("store", ["matrix", "vector"])
def test_first_residual_is_far_above_the_norms_epsilon(store, init_std):
    config = models.model(store, num_layers=2, init_std=init_std, norm_epsilon=1e-6)

    def mean_square():
        decoder = Decoder(config, rngs=nnx.Rngs(0))
        state, y = decoder.store.start(
            *decoder.embedding(models.tokens(), jnp.arange(11)[None], decoder.dtype)
        )
        graphdef, sites = nnx.split(decoder.stacks[0][0].site)
        site = nnx.merge(graphdef, jax.tree.map(lambda p: p[0], sites))
        residual, _ = decoder.store.add_and_read(state, y, site)
        return jnp.mean(jnp.square(residual))

    assert jax.jit(mean_square)() > 100 * config.norm_epsilon


@pytest.mark.parametrize("store", STORES)
def test_norms_epsilon_does_not_matter_at_the_start(store):
    config = models.model(store)
    _, params = models.split(config)
    logits = [
        checks.logits(dataclasses.replace(config, norm_epsilon=epsilon), params)
        for epsilon in (1e-6, 1e-5)
    ]
    assert np.abs(logits[1] - logits[0]).max() < 1e-3 * np.abs(logits[0]).max()


@pytest.mark.slow
def test_storage_starts_smaller_by_depth():
    config = models.model("matrix", num_layers=50, num_heads=40)
    _, params = models.split(config)
    w_E, w_FF = np.split(np.asarray(params["stacks"][0][0]["site"]["store_keys"]), [1])
    assert w_E.std() == pytest.approx(40**-0.5, rel=0.2)
    assert w_FF.std() == pytest.approx(40**-0.5 / 10, rel=0.1)
    assert params["store"]["position_keys"].std() == pytest.approx(40**-0.5, rel=0.2)
    _, params = models.split(models.model("vector", num_layers=50))
    w_O = params["stacks"][0][1]["site"]["write"]
    assert w_O.std() == pytest.approx((3 * 6) ** -0.5 / 10, rel=0.1)
    assert params["stacks"][0][1]["core"]["w_2"].std() == pytest.approx(22**-0.5 / 10, rel=0.1)


def test_mup_multipliers_act_where_they_should():
    sizes = ("attention.num_heads=2", "attention.head_dim=4")
    multipliers = {"input_multiplier": 2.0, "attention_multiplier": 0.25, "output_multiplier": 5.0}
    mup = cfg.MuP(sizes, **multipliers)
    base = models.model("matrix")
    params, positions, tokens = narrow(base), jnp.arange(11)[None], models.tokens()
    z = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 6)), jnp.float32)

    @jax.jit
    def ends(params):
        found = []
        for config in (base, dataclasses.replace(base, parametrization=mup)):
            decoder = nnx.merge(models.graph(config), params)
            found.append(
                (decoder.embedding(tokens, positions, jnp.float32), decoder.unembedding(z))
            )
        return found

    (embedded, logits), (scaled_embedded, scaled_logits) = ends(params)
    for got, plainly in zip(scaled_embedded, embedded, strict=True):
        np.testing.assert_allclose(got, 2 * plainly, rtol=1e-6)
    # width 18 over base width 8
    np.testing.assert_allclose(scaled_logits, 5 * 8 / 18 * logits, rtol=1e-6)
    scaled = dataclasses.replace(base, parametrization=mup)
    of_base = scaled.base_model.attention
    assert logit_scale(scaled, scaled.attention, of_base) == pytest.approx(0.25 * 2 / 6)
    assert logit_scale(base, base.attention, base.attention) == pytest.approx(6**-0.5)


def test_dtypes():
    config = models.model("matrix", compute_dtype="bfloat16", store=cfg.MatrixStore(5, "float32"))
    decoder = models.abstract(config)
    assert decoder.dtype == jnp.bfloat16 and decoder.store.dtype == jnp.float32
    assert {p.dtype for p in jax.tree.leaves(nnx.state(decoder))} == {jnp.dtype("float32")}
    logits, exact = checks.narrow_logits(config, plain.model)
    assert logits.dtype == jnp.float32
    assert 0 < np.abs(logits - exact).max() < 0.1
