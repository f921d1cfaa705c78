"""The replay statistics, held against scalar loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.replay import replay_statistics

logprobs = st.lists(st.tuples(st.floats(-8, 0), st.floats(-8, 0)), min_size=1, max_size=30)


@given(pairs=logprobs)
def test_replay_statistics_equal_a_scalar_loop(pairs: list[tuple[float, float]]) -> None:
    policy, behaviour = zip(*pairs, strict=True)
    result = replay_statistics(np.array(policy), np.array(behaviour))
    log_ratios = [p - b for p, b in pairs]
    ratios = [math.exp(x) for x in log_ratios]
    assert result.num_tokens == len(pairs)
    assert result.mean_log_ratio == pytest.approx(sum(log_ratios) / len(pairs), abs=1e-9)
    assert result.mean_absolute_log_ratio == pytest.approx(sum(map(abs, log_ratios)) / len(pairs), abs=1e-9)
    expected = sum(ratios) ** 2 / (len(pairs) * sum(r * r for r in ratios))
    assert result.effective_sample_size_fraction == pytest.approx(expected)


def test_replay_of_itself_passes_and_huge_ratios_do_not_overflow() -> None:
    same = np.linspace(-5, -0.1, 50, dtype=np.float32)
    assert replay_statistics(same, same).passes
    far = replay_statistics(np.array([0.0, -2000.0]), np.array([-1000.0, 0.0]))
    assert far.effective_sample_size_fraction == pytest.approx(0.5)
    assert not far.passes


def test_replay_refuses_what_does_not_describe_the_same_tokens() -> None:
    with pytest.raises(ValueError, match="do not match"):
        replay_statistics(np.zeros(3), np.zeros(4))
    with pytest.raises(ValueError, match="do not match"):
        replay_statistics(np.zeros(0), np.zeros(0))
    with pytest.raises(ValueError, match="not finite"):
        replay_statistics(np.array([0.0, np.nan]), np.zeros(2))
