"""Losses against plain loops, and the mistakes that would go unnoticed."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.losses import TrustRegion, entropy, kl_to_reference, policy_loss, value_loss

REGION = TrustRegion(0.3, 5.0)
PRECISION = [(torch.float64, 1e-9), (torch.float32, 1e-5)]


def random_tokens(seed: int, num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Policy and behaviour log-probabilities that fall on every side of the region, and advantages."""
    rng = np.random.default_rng(seed)
    behaviour = -rng.random(num_tokens) * 4
    policy = np.minimum(behaviour + rng.normal(0, 1.2, num_tokens), 0)
    arrays = (policy, behaviour, rng.normal(size=num_tokens))
    policy_G, behaviour_G, advantages_G = (torch.tensor(array, dtype=dtype) for array in arrays)
    return policy_G, behaviour_G, advantages_G


def loop_policy_loss(policy: list[float], behaviour: list[float], advantages: list[float], denominator: int) -> float:
    total = 0.0
    for p, b, a in zip(policy, behaviour, advantages, strict=True):
        ratio = math.exp(p - b)
        if 1 - 0.3 < ratio < 1 + 5.0:
            total += ratio * a * p
    return -total / denominator


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISION)
def test_policy_loss_and_gradient_equal_a_scalar_loop(dtype: torch.dtype, tolerance: float) -> None:
    for seed in range(20):
        policy_G, behaviour_G, advantages_G = random_tokens(seed, 37, dtype)
        policy_G.requires_grad_()
        result = policy_loss(policy_G, behaviour_G, advantages_G, 50, REGION)
        expected = loop_policy_loss(policy_G.detach().tolist(), behaviour_G.tolist(), advantages_G.tolist(), 50)
        assert float(result.loss.detach()) == pytest.approx(expected, abs=tolerance)
        result.loss.backward()
        # f is a constant: the gradient is -f * A / denominator and has no term of f's own derivative.
        for t in range(37):
            ratio = math.exp(float(policy_G.detach()[t]) - float(behaviour_G[t]))
            inside = 0.7 < ratio < 6.0
            gradient = -ratio * float(advantages_G[t]) / 50 if inside else 0.0
            assert float(policy_G.grad[t]) == pytest.approx(gradient, abs=tolerance * 10)
        assert 0 < int(result.too_low_G.sum()) < 37


def test_trust_region_does_not_depend_on_the_advantage_and_its_ends_are_outside() -> None:
    policy_G = torch.tensor([REGION.log_low, math.log(0.71), math.log(5.99), REGION.log_high], dtype=torch.float64)
    for sign in (1.0, -1.0):
        advantages_G = torch.full((4,), sign, dtype=torch.float64)
        result = policy_loss(policy_G, torch.zeros_like(policy_G), advantages_G, 4, REGION)
        assert result.accepted_G.tolist() == [False, True, True, False]
        assert result.too_low_G.tolist() == [True, False, False, False]
        assert result.too_high_G.tolist() == [False, False, False, True]


def test_policy_loss_never_forms_an_infinity_and_rejects_nan() -> None:
    policy_G = torch.tensor([-1.0, -1.0, math.nan, -1.0], requires_grad=True)
    behaviour_G = torch.tensor([-1000.0, -1.0, -1.0, 0.0])
    result = policy_loss(policy_G, behaviour_G, torch.ones(4), 4, REGION)
    result.loss.backward()
    assert math.isfinite(float(result.loss.detach()))
    assert policy_G.grad.isfinite().all()
    assert result.accepted_G.tolist() == [False, True, False, False]


def test_differentiating_the_ratio_too_is_another_gradient() -> None:
    """The mistake: no stopgrad on f. It shows, so the test above would see it."""
    policy_G, behaviour_G, advantages_G = random_tokens(3, 30, torch.float64)
    correct_G = policy_G.clone().requires_grad_()
    policy_loss(correct_G, behaviour_G, advantages_G, 30, REGION).loss.backward()
    wrong_G = policy_G.clone().requires_grad_()
    ratio_G = torch.exp(wrong_G - behaviour_G)
    inside_G = (ratio_G > 0.7) & (ratio_G < 6)
    (-(torch.where(inside_G, ratio_G, 0.0) * advantages_G * wrong_G).sum() / 30).backward()
    assert float((correct_G.grad - wrong_G.grad).abs().max()) > 1e-3


def test_log_probabilities_recomputed_by_the_trainer_switch_the_correction_off() -> None:
    """The mistake: 'old' log-probabilities from the learner itself; then nothing is ever rejected."""
    policy_G, behaviour_G, advantages_G = random_tokens(5, 200, torch.float64)
    assert not policy_loss(policy_G, behaviour_G, advantages_G, 200, REGION).accepted_G.all()
    assert policy_loss(policy_G, policy_G, advantages_G, 200, REGION).accepted_G.all()


@given(seed=st.integers(0, 1000), cuts=st.lists(st.integers(1, 39), max_size=5))
def test_micro_batches_add_up_to_the_whole_and_order_does_not_matter(seed: int, cuts: list[int]) -> None:
    policy_G, behaviour_G, advantages_G = random_tokens(seed, 40, torch.float64)
    whole = policy_loss(policy_G, behaviour_G, advantages_G, 40, REGION).loss
    values = value_loss(policy_G, advantages_G, 40)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(40))
    edges = [0, *sorted(set(cuts)), 40]
    parts = [order[low:high] for low, high in itertools.pairwise(edges)]
    in_parts = sum(policy_loss(policy_G[i], behaviour_G[i], advantages_G[i], 40, REGION).loss for i in parts)
    assert float(in_parts) == pytest.approx(float(whole), abs=1e-12)
    assert float(sum(value_loss(policy_G[i], advantages_G[i], 40) for i in parts)) == pytest.approx(float(values))


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISION)
def test_value_loss_kl_and_entropy_equal_scalar_loops(dtype: torch.dtype, tolerance: float) -> None:
    rng = np.random.default_rng(1)
    values_G, returns_G = (torch.tensor(rng.normal(size=23), dtype=dtype) for _ in range(2))
    expected = sum(0.5 * (v - r) ** 2 for v, r in zip(values_G.tolist(), returns_G.tolist(), strict=True)) / 31
    assert float(value_loss(values_G, returns_G, 31)) == pytest.approx(expected, abs=tolerance)
    policy_GV, reference_GV = (
        torch.log_softmax(torch.tensor(rng.normal(size=(6, 11)) * 2, dtype=dtype), -1) for _ in range(2)
    )
    for g in range(6):
        pairs = list(zip(policy_GV[g].tolist(), reference_GV[g].tolist(), strict=True))
        kl = sum(math.exp(p) * (p - q) for p, q in pairs)
        assert float(kl_to_reference(policy_GV, reference_GV)[g]) == pytest.approx(kl, abs=tolerance)
        assert float(entropy(policy_GV)[g]) == pytest.approx(-sum(math.exp(p) * p for p, _ in pairs), abs=tolerance)
    assert kl_to_reference(policy_GV, policy_GV).abs().max() == 0
