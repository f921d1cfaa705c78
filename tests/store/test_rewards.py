"""One reward out of several judgements."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.rewards import Aggregation, Judgement, aggregate, counted

judgements = st.builds(
    Judgement,
    reward=st.floats(-1, 1),
    source_kind=st.sampled_from(["human", "verifier", "reward_model", "something_else"]),
    weight=st.floats(0, 100),
)
modes: st.SearchStrategy[Aggregation] = st.sampled_from(["priority", "mean", "weighted_mean"])


def test_priority_takes_the_mean_of_the_strongest_kind() -> None:
    human = [Judgement(1.0, "human"), Judgement(0.0, "human", weight=9)]
    machine = [Judgement(-1.0, "verifier"), Judgement(-1.0, "reward_model"), Judgement(-1.0, "unheard_of")]
    assert aggregate(human + machine, "priority") == 0.5
    assert aggregate(machine, "priority") == -1.0
    assert aggregate([Judgement(0.25, "reward_model"), Judgement(-1.0, "unheard_of")], "priority") == 0.25


def test_mean_counts_every_source_once() -> None:
    assert aggregate([Judgement(1.0, "human", 5), Judgement(0.0, "reward_model", 0)], "mean") == 0.5


def test_weighted_mean_follows_the_weights() -> None:
    assert aggregate([Judgement(1.0, "human", 3), Judgement(-1.0, "reward_model", 1)], "weighted_mean") == 0.5


@pytest.mark.parametrize("mode", ["priority", "mean", "weighted_mean"])
def test_no_judgement_is_no_reward(mode: Aggregation) -> None:
    assert aggregate([], mode) is None


def test_weights_of_zero_are_no_reward() -> None:
    assert aggregate([Judgement(1.0, "human", 0.0)], "weighted_mean") is None


def test_unknown_mode_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="median"):
        aggregate([Judgement(1.0, "human")], "median")  # type: ignore[arg-type]


@given(st.lists(judgements, min_size=1, max_size=8), modes, st.integers(0, 100))
def test_reward_ignores_order_and_stays_within_what_counts(
    given_judgements: list[Judgement], mode: Aggregation, seed: int
) -> None:
    reward = aggregate(given_judgements, mode)
    shuffled = given_judgements.copy()
    random.Random(seed).shuffle(shuffled)
    assert aggregate(shuffled, mode) == pytest.approx(reward, abs=1e-12)
    counting = [given_judgements[index].reward for index in counted(given_judgements, mode)]
    if reward is None:
        assert not counting
    else:
        assert min(counting) <= reward <= max(counting)


@given(st.lists(judgements, min_size=1, max_size=8))
def test_weighted_mean_matches_a_scalar_loop(given_judgements: list[Judgement]) -> None:
    total, weights = 0.0, 0.0
    for judgement in given_judgements:
        total += judgement.weight * judgement.reward
        weights += judgement.weight
    reward = aggregate(given_judgements, "weighted_mean")
    if weights < 1e-300:
        return
    assert reward == pytest.approx(total / weights, abs=1e-9)
