"""Experiments that are computed: the RMT paper's moments and counts."""

import pytest

from rmt_tpu.experiments import counts, moments


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(
            operation,
            id=f"{operation.layer}-{operation.operation}-{operation.model}",
            # Matrices of millions of numbers take seconds to draw.
            marks=[pytest.mark.slow] if operation.model == "Transformer" else [],
        )
        for operation in moments.OPERATIONS
    ],
)
def test_simulated_moments_are_the_formulas(operation):
    found = moments.simulate(operation, draws=16)
    for (value, error), expected in zip(
        (found.mean, found.gradient_mean, found.variance, found.gradient_variance),
        (0, 0, *operation.formula()),
        strict=True,
    ):
        assert abs(value - expected) < 5 * error
        assert error < 0.1


def test_which_figures_of_table_2_are_not_its_formulas():
    wrong = [
        (operation.layer, operation.operation, operation.model)
        for operation in moments.OPERATIONS
        if operation.formula() != pytest.approx(operation.printed, abs=0.05)
    ]
    assert wrong == [("FF", "storage", "RMT"), ("FF", "retrieval", "RMT")]


def test_doubling_the_residual_in_figure_1():
    curves = counts.resource_scaling()
    growth = {}
    for name, points in curves.items():
        first, second = (p for p in points if p.residual_size in (1024, 2048))
        growth[name] = (
            second.parameters / first.parameters - 1,
            second.flops / first.flops - 1,
        )
    assert all(0 < cost < 0.01 for cost in growth["RMT"])
    assert growth["Transformer"] == (pytest.approx(1.0, abs=0.005), pytest.approx(0.94, abs=0.005))


def test_the_page_of_counts():
    page = counts.page()
    assert "| Transformer | 1024 | 405.5M | 0.861 | +100.00%, +94.08% |" in page.text
    assert "| rmt-305m | 8.45e+18 | 8.561e+18 |" in page.text
    assert "| rmt-305m | 305M | 305,128,448 | 4096 |" in page.text
    (draw,) = page.pictures.values()
    assert len(draw().axes) == 2
