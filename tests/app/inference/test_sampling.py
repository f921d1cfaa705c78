"""Log-probabilities of what was sampled, held against scalar loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.inference.transformers_engine.sampling import Sampling, draw, processed_logprobs, truncate

logits = st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=12)


@given(logits=logits, temperature=st.floats(0.05, 5))
def test_processed_logprobs_is_the_temperature_scaled_log_softmax(logits: list[float], temperature: float) -> None:
    sampling = Sampling(max_tokens=1, temperature=temperature)
    result = processed_logprobs(torch.tensor([logits]), [sampling])[0].tolist()
    scaled = [value / temperature for value in logits]
    top = max(scaled)
    log_normaliser = top + math.log(sum(math.exp(value - top) for value in scaled))
    assert result == pytest.approx([value - log_normaliser for value in scaled], abs=1e-3)


def test_processed_logprobs_scales_each_row_by_its_own_temperature() -> None:
    row = [0.0, 1.0, 3.0]
    samplings = [Sampling(1, temperature=0.5), Sampling(1, temperature=2.0), Sampling(1, temperature=0.0)]
    result = processed_logprobs(torch.tensor([row] * 3), samplings)
    for index, temperature in enumerate((0.5, 2.0, 1.0)):
        expected = processed_logprobs(torch.tensor([row]), [Sampling(1, temperature=temperature)])[0]
        torch.testing.assert_close(result[index], expected)


@given(logits=logits, top_k=st.integers(1, 12), top_p=st.floats(0.01, 1), min_p=st.floats(0, 1))
def test_truncate_keeps_the_most_likely_and_only_likelier_tokens(
    logits: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    original = torch.tensor(logits)
    kept = truncate(original.clone(), Sampling(1, top_k=top_k, top_p=top_p, min_p=min_p)).isfinite()
    assert kept[original.argmax()]
    if (~kept).any():
        assert original[~kept].max() <= original[kept].min()
    if len(set(logits)) == len(logits):
        assert int(kept.sum()) <= top_k


def test_truncate_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    for top_p, num_kept in ((0.4, 1), (0.6, 2), (0.79, 2), (0.9, 3), (0.96, 4)):
        assert int(truncate(probabilities.log(), Sampling(1, top_p=top_p)).isfinite().sum()) == num_kept


def test_draw_follows_the_distribution() -> None:
    probabilities = torch.tensor([0.1, 0.2, 0.7])
    rows = 20_000
    logprobs = probabilities.log().expand(rows, 3).contiguous()
    picked = draw(logprobs, [Sampling(1)] * rows, [None] * rows, torch.Generator().manual_seed(0))
    shares = torch.bincount(picked, minlength=3) / rows
    torch.testing.assert_close(shares, probabilities, atol=0.015, rtol=0)


def test_draw_never_picks_a_truncated_token_and_is_greedy_at_temperature_zero() -> None:
    logprobs = torch.tensor([[-torch.inf, -0.7, -0.7], [-0.1, -2.4, -5.0]])
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        picked = draw(logprobs, [Sampling(1), Sampling(1, temperature=0.0)], [None, None], generator)
        assert picked[0] != 0
        assert picked[1] == 0


def test_draw_with_its_own_generator_ignores_the_rest_of_the_batch() -> None:
    logprobs = torch.zeros(5, 50).log_softmax(-1)
    alone = draw(logprobs[:1], [Sampling(1)], [torch.Generator().manual_seed(3)], torch.Generator().manual_seed(0))
    own = [torch.Generator().manual_seed(3), None, None, None, None]
    together = draw(logprobs, [Sampling(1)] * 5, own, torch.Generator().manual_seed(9))
    assert together[0] == alone[0]
