"""muP's rates and starts, as numbers: nothing is drawn or compiled."""

from dataclasses import replace

import pytest

from rmt_tpu import config as cfg
from rmt_tpu.errors import UsageError
from rmt_tpu.hub import own
from rmt_tpu.layers.parameters import key_init_scale
from rmt_tpu.training import run
from tests import models


def test_queries_over_depth_learn_by_the_size_of_the_residual():
    mixer = cfg.BlockAttention(sublayers_per_block=2)
    for kind, base, ratio in (("vector", "store.dim=5", 4), ("matrix", "store.key_dim=1", 5)):
        model = models.model(kind, mixer=mixer, parametrization=cfg.MuP((base,)))
        rates = run._rates(model, models.abstract(model))
        assert rates["final_site"]["mix"]["query"] == pytest.approx(1 / ratio)
        assert rates["final_site"]["mix"]["key_gain"] == 1.0
        assert rates["embedding"]["tokens"] == rates["unembedding"]["kernel"] == 1.0


GROUPED = cfg.Attention(8, 6, cfg.Rope(), False, num_kv_heads=4)
SHARED = cfg.Kda(8, 6, num_key_heads=4)


@pytest.mark.parametrize(
    "core, base, own",
    [
        (GROUPED, "attention.num_heads=4", ("site", "read_fewer")),  # the base's heads are alike
        (SHARED, "kda.num_heads=4", ("core", "value_taps")),
        (replace(GROUPED, num_kv_heads=8), "attention.num_kv_heads=4", ("site", "read")),
    ],
)
def test_rates_do_not_depend_on_which_model_has_fewer_key_heads(core, base, own):
    model = models.model("vector").replace(
        stacks=(cfg.Stack((core, cfg.FeedForward(10)), 2),),
        parametrization=cfg.MuP((base, "store.dim=5")),
    )
    rates = run._rates(model, models.abstract(model))
    layer = rates["stacks"][0][0]
    assert layer["site"]["read"] == 1 / 4
    assert layer[own[0]][own[1]] == (1.0 if own[0] == "core" else 1 / 4)
    heads = 1.0 if "kv_heads" in base else 1 / 2
    assert rates["stacks"][0][1]["site"]["write"] == heads


def test_a_base_without_a_parameter_of_the_model_is_refused():
    experts = cfg.Experts(4, 2, 10, shared=1)
    stack = cfg.Stack((cfg.Attention(3, 6), experts), 2)
    parametrization = cfg.MuP(("experts.shared=0", "store.dim=5"))
    model = models.model("vector", stacks=(stack,), parametrization=parametrization)
    with pytest.raises(UsageError, match=r"parametrization.base has no .*shared.*; legal: changes"):
        run._rates(model, models.abstract(model))


def test_keys_start_smaller_where_one_size_grows_alone():
    config = models.model("matrix")  # R 3, D_k 5
    start = lambda *base, writes: key_init_scale(
        replace(config, parametrization=cfg.MuP(base)), 3, 3, writes=writes
    )
    assert key_init_scale(config, 3, 3, writes=False) == 1.0
    # What reads takes in D_k and gives R, of 1 and 3 in the base; what writes the other way round.
    largest = lambda taken, given: 1 + (taken / given) ** 0.5
    reads, writes = largest(1, 3) / largest(5, 3), largest(3, 1) / largest(3, 5)
    assert start("store.key_dim=1", writes=False) == pytest.approx(reads)
    assert start("store.key_dim=1", writes=True) == pytest.approx(writes)
    both = replace(config, store=cfg.MatrixStore(15))
    base = cfg.MuP(("store.key_dim=5", "attention.num_heads=1"))
    scaled = replace(both, parametrization=base)
    assert key_init_scale(scaled, 3, 1, writes=False) == pytest.approx(1.0)


def test_logits_are_scaled_by_the_core_at_the_same_place_in_the_base():
    """Two equal cores have other cores in the base, and so does the config of an export."""
    layer = (cfg.Attention(2, 16, cfg.Rope(), False), cfg.FeedForward(8))
    parametrization = cfg.MuP(("stacks.0.cores.2.head_dim=4", "stacks.0.repeat=1"))
    stacks = (cfg.Stack((*layer, *layer), 2),)
    config = models.model("vector", stacks=stacks, parametrization=parametrization)
    (period,) = models.abstract(config).stacks
    expected = [16**0.5 / 16, 4**0.5 / 16]
    assert [sublayer.core.scale for sublayer in period[::2]] == expected
    exported = own.config_values(config, 8)["factors"]["attention"]
    assert exported == 2 * [expected[0], None, expected[1], None]


def first_deviations(**changes):
    """A new model's keys of its first two sites and of its positions, relative to `1 / sqrt(in)`.

    These are the standard deviations of what writes the embedding, of what attention reads, and of
    what writes attention's output and the positions. D_k is 64.
    """
    attention = cfg.Attention(**({"num_heads": 96, "head_dim": 2} | changes.pop("attention", {})))
    options = {"vocab_size": 5, "norm": "rmsnorm"} | changes
    store = cfg.MatrixStore(64, vectors=options.pop("vectors", None))
    config = cfg.ModelConfig((cfg.Stack((attention, cfg.FeedForward(2))),), store, **options)
    decoder = models.decoder(config)
    (first, second), positions = decoder.stacks[0], decoder.store.position_keys
    keys = (first.site.store_keys, first.site.read_keys, second.site.store_keys, positions)
    fan_in = (keys[0].shape[-2], 64, 2 * keys[2].shape[-2], keys[0].shape[-2])
    return [float(k[...].std()) * n**0.5 for k, n in zip(keys, fan_in, strict=True)]


# The factor of keys, which depends on their number and on D_k, 64.
spread = lambda keys, writes=False: 1 / (1 + (keys / 64 if writes else 64 / keys) ** 0.5)
OF_BASE = cfg.MuP(("attention.num_heads=4",))
GROWN = spread(96, True) / spread(4, True)


def test_keys_of_as_many_key_heads_start_by_their_own_number_in_the_base():
    found = first_deviations(attention={"num_kv_heads": 4}, parametrization=OF_BASE)
    expected = [GROWN, spread(104) / spread(12), GROWN, GROWN]
    assert found == pytest.approx(expected, rel=0.05)


@pytest.mark.slow
def test_keys_of_as_many_vectors_start_as_in_the_base():
    found = first_deviations(vectors=96, parametrization=OF_BASE)
    assert found == pytest.approx([1.0, spread(288) / spread(12), GROWN, 1.0], rel=0.05)
