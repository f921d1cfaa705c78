"""Explained variance and effective sample size against plain formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.metrics import ExplainedVariance, effective_sample_size_fraction


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=30))
def test_effective_sample_size_equals_its_formula(log_ratios: list[float]) -> None:
    ratios = [math.exp(x) for x in log_ratios]
    expected = sum(ratios) ** 2 / (len(ratios) * sum(r * r for r in ratios))
    assert effective_sample_size_fraction(torch.tensor(log_ratios)) == pytest.approx(expected, rel=1e-4)


def test_effective_sample_size_of_huge_ratios_does_not_overflow() -> None:
    assert effective_sample_size_fraction(torch.tensor([1000.0, -1000.0])) == pytest.approx(0.5)


def test_explained_variance_is_pooled_over_the_last_trajectories() -> None:
    rng = np.random.default_rng(0)
    rows = [(rng.normal(size=length), rng.normal(size=length)) for length in (3, 7, 1, 5, 4)]
    window = ExplainedVariance(3)
    for returns, values in rows:
        window.add(torch.tensor(returns), torch.tensor(values))
    returns = np.concatenate([row[0] for row in rows[-3:]])
    values = np.concatenate([row[1] for row in rows[-3:]])
    expected = 1 - np.var(returns - values) / np.var(returns)
    assert window.value() == pytest.approx(expected)
    assert ExplainedVariance(3, map(tuple, window.rows())).value() == window.value()


def test_explained_variance_of_equal_returns_is_undefined() -> None:
    window = ExplainedVariance(8)
    assert window.value() is None
    window.add(torch.ones(4), torch.rand(4))
    assert window.value() is None
    window.add(torch.zeros(4), torch.zeros(4))
    assert window.value() is not None
