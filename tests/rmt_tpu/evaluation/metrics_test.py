"""Values with their errors, and differences on the same documents."""

import dataclasses
import math

import numpy as np
import pytest

from rmt_tpu.evaluation.metrics import Metric, difference


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def share(values):
    return Metric("acc", "document", "share", np.array(values, float), np.ones(len(values)))


def test_the_error_of_a_share_is_that_of_a_mean(rng):
    values = rng.random(50) < 0.3
    metric = share(values)
    assert metric.value == pytest.approx(values.mean())
    assert metric.error == pytest.approx(np.std(values, ddof=1) / math.sqrt(50))
    assert share([1.0]).error is None


def test_the_errors_of_ratios_are_those_of_drawing_documents_again(rng):
    nats, words = rng.gamma(3.0, 40.0, 400), rng.integers(5, 60, 400).astype(float)
    nats += 3 * words
    drawn = rng.integers(0, 400, (4000, 400))
    rates = nats[drawn].sum(1) / words[drawn].sum(1)
    for told, values in {"perplexity": np.exp(rates), "bits": rates / math.log(2)}.items():
        metric = Metric("x", "word", told, nats, words)
        assert metric.error == pytest.approx(np.std(values), rel=0.06)
        assert metric.value == pytest.approx(np.median(values), rel=0.01)


def test_a_difference_is_of_the_same_documents(rng):
    right = rng.random(300) < 0.4
    flipped = right ^ (rng.random(300) < 0.05)
    apart = difference(share(right), share(flipped))
    assert apart.value == pytest.approx(right.mean() - flipped.mean())
    each = np.subtract(right, flipped, dtype=float)
    assert apart.error == pytest.approx(np.std(each, ddof=1) / math.sqrt(300))
    errors = share(right).error, share(flipped).error
    assert apart.unpaired == pytest.approx(math.hypot(*errors)) and apart.error < apart.unpaired / 2
    with pytest.raises(ValueError, match="same metric over the same documents"):
        difference(share(right), share(right[1:]))


def test_a_difference_of_bits_is_in_bits(rng):
    words = rng.integers(5, 60, 40).astype(float)
    one, other = (Metric("x", "byte", "bits", rng.gamma(3.0, 40.0, 40), words) for _ in range(2))
    in_nats = lambda metric: dataclasses.replace(metric, display="perplexity")
    nats = difference(in_nats(one), in_nats(other))
    bits = difference(one, other)
    assert bits.value == pytest.approx(one.value - other.value)
    for name in ("value", "error", "unpaired"):
        assert getattr(bits, name) * math.log(2) == pytest.approx(getattr(nats, name))
    assert bits.p == pytest.approx(nats.p)


def test_a_difference_of_other_documents_has_only_the_unpaired_error(rng):
    one, other = share(rng.random(300) < 0.4), share(rng.random(200) < 0.5)
    apart = difference(one, other, paired=False)
    assert apart.value == one.rate - other.rate and apart.error is apart.p is None
    assert apart.unpaired == pytest.approx(math.hypot(one.error, other.error))
    assert difference(one, share([1.0]), paired=False).unpaired is None


def test_p_of_shares_is_mcnemar_s_exact_test():
    """Of 10 documents that differ, 9 are better: 2 (C(10, 9) + C(10, 10)) / 2^10."""
    one, other = [1] * 9 + [0] + [1] * 20, [0] * 9 + [1] + [1] * 20
    assert difference(share(one), share(other)).p == pytest.approx(2 * 11 / 1024)
    assert difference(share(one), share(one)).p == 1.0


def test_p_of_nats_is_a_t_test_s(rng):
    """The p-value of 2 documents, which have one degree of freedom, is 1 - 2 atan(t) / pi."""
    totals = np.array([3.0, 6.0]), np.zeros(2)
    few = [Metric("x", "word", "perplexity", total, np.ones(2)) for total in totals]
    assert difference(*few).p == pytest.approx(1 - 2 * math.atan(4.5 / 1.5) / math.pi)
    nats, words = rng.normal(300, 40, 200), np.full(200, 60.0)
    moved = nats + 1.96 * 2.0 / math.sqrt(200) + (noise := rng.normal(0, 1, 200)) * 0
    noise = (noise - noise.mean()) / np.std(noise, ddof=1) * 2.0
    one, other = (Metric("x", "word", "perplexity", n, words) for n in (moved + noise, nats))
    apart = difference(one, other)
    assert apart.value == pytest.approx(1.96 * 2.0 / math.sqrt(200) / 60)
    assert apart.p == pytest.approx(0.0514, abs=1e-4)
