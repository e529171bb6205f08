"""Plans: what is trained at either scale."""

import jax
import pytest

from rmt_tpu.config import overrides, presets
from rmt_tpu.experiments import catalog, depth, plan, residual_size, trained, wide_residuals
from rmt_tpu.experiments.catalog import EXPERIMENTS
from rmt_tpu.training import run
from tests import models

TRAINED = [e.name for e in EXPERIMENTS.values() if e.plan]


@pytest.mark.parametrize("scale", ["tiny", "paper"])
def test_arms_of_one_name_are_one_run(scale):
    """Experiments share run folders, and the folders of searches."""
    arms, searches = {}, {}
    for name in TRAINED:
        of = EXPERIMENTS[name].plan(scale)
        for arm in of.arms:
            known = arms.setdefault(arm.name, arm)
            assert (known.config, known.grows_from) == (arm.config, arm.grows_from), arm.name
        for system, search in of.searches.items():
            known = searches.setdefault(system, search)
            assert known == search or scale == "paper", "of the same folder"


@pytest.mark.parametrize("scale", ["tiny", "paper"])
@pytest.mark.parametrize("name", TRAINED)
def test_a_plan_is_whole(name, scale):
    of = EXPERIMENTS[name].plan(scale)
    names = [arm.name for arm in of.arms]
    assert len(set(names)) == len(names)
    assert len(names) > 1 or not names and len(of.searches) > 1
    assert {arm.against for arm in of.arms} - {None} <= set(names)
    # Differences are of the same tokens, but where the paper gives each its own number.
    by_name = {arm.name: arm for arm in of.arms}
    if (name, scale) != ("rmt-scaling", "paper") and not name.startswith(("ladder", "cores")):
        for arm in of.arms:
            other = by_name.get(arm.against, arm)
            assert plan.tokens(arm.config) == plan.tokens(other.config)
    used = {search for arm in of.arms for search in of.searches_of(arm)}
    assert used == set(of.searches) or not names
    fixed = scale == "paper" or name in ("cores", "depth-other-text")
    assert all(of.searches_of(arm) for arm in of.arms) or fixed
    for search in of.searches.values():
        assert len(search.points) > 2
        assert not {*search.seeds} & {*of.seeds}, "recipes.experiment refuses such a plan"
    assert {*of.registered} <= {arm.name for arm in of.arms if arm.against}
    if of.x:
        assert any(arm.x is not None for arm in of.arms)


def test_a_tiny_ladder_reads_twenty_tokens_a_weight():
    of = trained.ladder("tiny")
    for arm in of.arms:
        if arm.system == "transformer":
            width, layers = arm.config.model.width, arm.config.model.num_layers
            assert plan.tokens(arm.config) == pytest.approx(20 * 12 * layers * width**2, rel=0.01)
        if arm.system == "rmt":
            assert arm.config.model.residual_size == 4 * arm.config.model.width


@pytest.mark.slow
def test_rates_are_carried_over_from_the_size_where_they_are_searched():
    of = trained.ladder("tiny")
    for system, search in of.searches.items():
        assert not [rate for rate in rates(search.config) if rate != 1]
        arms = [arm.config for arm in of.arms if arm.system == system]
        largest = [max(rates(config)) for config in arms]
        assert largest == sorted(largest, reverse=True) and largest[0] > 1 > min(rates(arms[-1]))


def rates(config):
    """Of each weight's learning rate what muP makes of it."""
    return jax.tree.leaves(run._rates(config.model, models.abstract(config.model)))


def test_what_comes_before_growth():
    arms = [a for a in residual_size.growth("tiny").arms if a.grows_from]
    held, grown = arms
    first = plan.before_growth(grown.config, grown.grows_from)
    assert first.model.store.key_dim == grown.grows_from == grown.config.model.store.key_dim // 4
    assert first == plan.before_growth(held.config, held.grows_from), "up to there they are one"
    assert held.searches == grown.searches and grown.against == held.name
    schedule, whole = first.train, grown.config.train
    assert schedule.steps == whole.steps // 4 and schedule.optimizer.final_fraction == 1
    warm = lambda train: round(train.steps * train.optimizer.warmup_fraction)
    assert warm(schedule) == warm(whole)


def test_slots_between_two_searches_have_both():
    of = residual_size.rmt_key_dim("tiny")
    slots = {arm.config.model.store.key_dim: of.searches_of(arm) for arm in of.arms[1:]}
    name = "rmt-32-slots-{}".format
    assert slots == {
        2: (name(4),), 4: (name(4),), 8: (name(4), name(16)), 16: (name(16),),
        32: (name(16), name(64)), 64: (name(64),),
    }  # fmt: skip


def test_what_the_papers_rows_cost():
    """Table 4's FLOPs of its largest two, which read 6.04e9 tokens, without the unembedding's."""
    arms = {arm.name: arm.config for arm in trained.rmt_scaling("paper").arms}
    for name, printed in {"gpt2-405m-mup": 1.18e19, "rmt-305m-mup": 8.45e18}.items():
        config = arms[name]
        tokens = plan.tokens(config)
        unembedding = 3 * tokens * 2 * config.model.vocab_size * config.model.width
        assert plan.flops(config) - unembedding == pytest.approx(printed, rel=0.015)


def test_hours_are_by_the_share_of_the_peak_that_was_measured(monkeypatch):
    largest = {"rmt-largest": EXPERIMENTS["rmt-largest"]}
    monkeypatch.setattr(catalog, "EXPERIMENTS", largest)
    total = sum(map(plan.flops, plan.all_runs(largest["rmt-largest"].plan("paper"))))
    hours = total / (989e12 * 0.23) / 3600  # docs/guides/reproduce.md has an eighth, for 8 GPUs
    assert hours == pytest.approx(8 * 11.1, rel=0.01)
    assert f"{hours:.1f} h on H100 |" in catalog.table()
    assert "40% of the peak of v5p and 23% of the peak of H100" in catalog.table()


def test_arms_of_a_depth_differ_in_what_mixes_alone():
    of = depth.plan("tiny")
    by_name = {arm.name: arm.config for arm in of.arms}
    for arm in of.arms:
        if arm.against and "attnres" in arm.system and "again" not in arm.name:
            plain = by_name[arm.against]
            mixed = arm.config.model.replace(mixer=plain.model.mixer, remat=plain.model.remat)
            assert (mixed, arm.config.train) == (plain.model, plain.train)
    blocks = {
        layers: by_name[f"attnres-{layers}-layers"].model.mixer.sublayers_per_block
        for layers in (4, 8, 16, 32)
    }
    assert {layers: 2 * layers // size for layers, size in blocks.items()} == {
        4: 4, 8: 8, 16: 8, 32: 8,
    }  # fmt: skip


@pytest.mark.parametrize("scale", ["tiny", "paper"])
def test_another_text_is_read_by_the_same_models_at_rates_that_were_searched(scale):
    of, first = depth.other_text(scale), depth.plan(scale)
    searched = {arm.name: arm for arm in first.arms}
    assert len(of.arms) == 4 and not of.searches and len(of.registered) == 3
    for arm in of.arms:
        same = searched[arm.name.removesuffix("-other-text")]
        assert (arm.config.model, arm.config.data) == (same.config.model, same.config.data)
        assert arm.against in (None, f"{same.against}-other-text") and of.seeds == first.seeds
        tried = [overrides.apply(same.config, p) for p in first.searches[same.name].points]
        assert arm.config in tried


def test_rate_factors_are_searched_at_two_depths_and_two_batch_sizes():
    of, shared = depth.rates("tiny"), depth.plan("tiny").searches
    tried = {name: s for name, s in of.searches.items() if name.startswith("attnres")}
    assert {(s.config.model.num_layers, s.config.train.batch_size) for s in tried.values()} == {
        (4, 16), (4, 64), (16, 16), (16, 64),
    }  # fmt: skip
    for search in tried.values():
        assert {point[plan.DEPTH_RATE] for point in search.points} == {1, 0.3, 0.1, 0.03, 0.01}
    others = {name for name in of.searches if "large" not in name} - {*shared}
    assert others == {"transformer-32-layers"}  # `plan` gives it the rate of 16 layers
    assert all(shared[name] == s for name, s in of.searches.items() if name in shared)
    assert len({*of.searches} & {*shared}) == 4


@pytest.mark.parametrize("scale", ["tiny", "paper"])
def test_wide_residuals_are_equal_in_what_their_names_say(scale):
    """Bytes exactly; weights and FLOPs to what half of a hidden unit per layer changes."""
    of = wide_residuals.plan(scale)
    by_name = {arm.name: arm for arm in of.arms}
    for width in wide_residuals.WIDTHS:
        name = f"{{}}-{width}x-8-layers".format
        wide = by_name[name("wide")].config
        streams = wide.model.mixer.streams * wide.model.residual_size
        assert streams == width * wide.model.width
        rmts = {n: by_name[name(n)] for n in ("rmt", "rmt-equal-weights", "rmt-equal-flops")}
        assert {arm.against for arm in rmts.values()} == {name("wide")}
        for arm in rmts.values():
            assert arm.config.model.residual_size == streams
            assert arm.config.train == wide.train and arm.config.data == wide.data
        a_unit = 2 * 8 * wide.model.width  # the weights of a hidden unit in every layer
        weights, flops = (
            {n: size(arm.config) - size(wide) for n, arm in rmts.items()}
            for size in (wide_residuals.weights, wide_residuals.flops)
        )
        assert abs(weights["rmt-equal-weights"]) <= a_unit / 2
        assert abs(flops["rmt-equal-flops"]) <= 2 * a_unit / 2
        assert weights["rmt"] < -0.2 * wide_residuals.weights(wide)
        assert flops["rmt-equal-weights"] > 0
    plain = by_name["transformer-8-layers"]
    assert plain.config == next(a.config for a in depth.plan(scale).arms if a.name == plain.name)
    assert of.registered == tuple(f"rmt-equal-flops-{k}x-8-layers" for k in (1, 2, 4, 8))


def test_between_two_searches_is_their_geometric_mean():
    found = plan.geometric_mean([{"a": 0.01, "b": 1.0}, {"a": 0.04, "b": 0.01}])
    assert found == pytest.approx({"a": 0.02, "b": 0.1})
    assert plan.geometric_mean([{"a": 0.0123456}]) == {"a": 0.0123456}


def test_no_such_experiment():
    with pytest.raises(catalog.UsageError, match="'rmt-scale' is unknown.*rmt-scaling"):
        catalog.experiment("rmt-scale")


def test_ablations_are_searched_along_both_axes():
    search = trained.attnres_ablations("tiny").searches["ablation-full"]
    found = {(point[plan.RATE], point[plan.DEPTH_RATE]) for point in search.points}
    factors = {(0.028, factor) for factor in (1, 0.3, 0.1, 0.03, 0.01)}
    assert found == factors | {(0.012, 0.1), (0.067, 0.1)} and len(search.points) == 7
    assert search.config.train.eval_every == 0  # text is held out for the final loss alone


@pytest.mark.parametrize("name", ["rmt-step", "attnres-overheads"])
def test_reports_on_one_page_are_of_the_same_models(name):
    """Preflight's own vocabulary would be that of bytes."""
    commands = EXPERIMENTS[name].reports("tiny", str)
    preflights = [flags for recipe, *flags in commands if recipe == "preflight"]
    assert len(preflights) == {"rmt-step": 2, "attnres-overheads": 4}[name]
    for flags in preflights:
        (preset,) = [f.partition("=")[2] for f in flags if f.startswith("--preset=")]
        words = presets.run(preset).model.vocab_size
        assert words == 50257 and f"--set=model.vocab_size={words}" in flags
