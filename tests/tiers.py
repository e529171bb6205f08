"""Which tests run when: see the markers in pyproject.toml."""

import pytest


def later(*cases):
    """Cases for the night alone; a case of several arguments is a tuple."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
