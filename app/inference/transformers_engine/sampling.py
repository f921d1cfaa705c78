"""From logits to sampled tokens.

Invariant: the log-probability reported for a token is the one of the distribution it was drawn from: after
temperature and after truncation (vLLM's `processed_logprobs`).

Shape legend: B sequences, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GREEDY_BELOW = 1e-5
"""A lower temperature means the most likely token; its log-probability is then reported at temperature 1, as vLLM's."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one sequence is sampled and when it stops. `max_tokens` counts generated tokens."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    num_logprobs: int = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def processed_logprobs(logits_BV: torch.Tensor, samplings: list[Sampling]) -> torch.Tensor:
    """Log-probabilities each sequence is sampled from.

    logits_BV    any floating type; the result is float32 [B, V], minus infinity where truncated away
    """
    temperatures_B = torch.tensor([1.0 if s.greedy else s.temperature for s in samplings])
    logits_BV = logits_BV.float() / temperatures_B.to(logits_BV.device)[:, None]
    for row, sampling in enumerate(samplings):
        if sampling.min_p > 0 or sampling.top_k > 0 or sampling.top_p < 1:
            logits_BV[row] = truncate(logits_BV[row], sampling)
    return logits_BV.log_softmax(dim=-1)


def truncate(logits_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Minus infinity for the tokens that min_p, then top_k, then top_p leave out; the most likely always stays."""
    if sampling.min_p > 0:
        threshold = logits_V.max() + torch.log(torch.tensor(sampling.min_p))
        logits_V = logits_V.masked_fill(logits_V < threshold, -torch.inf)
    if 0 < sampling.top_k < logits_V.numel():
        smallest_kept = logits_V.topk(sampling.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < smallest_kept, -torch.inf)
    if sampling.top_p < 1:
        ordered_V, indices_V = logits_V.sort(descending=True)
        # A token stays while the probability before it is still below top_p.
        before_V = ordered_V.softmax(-1).cumsum(-1) - ordered_V.softmax(-1)
        logits_V = logits_V.scatter(0, indices_V[before_V >= sampling.top_p], -torch.inf)
    return logits_V


def draw(
    logprobs_BV: torch.Tensor,
    samplings: list[Sampling],
    own_generators: list[torch.Generator | None],
    shared_generator: torch.Generator,
) -> torch.Tensor:
    """Sample one token per sequence: int64 [B].

    The exponential race of vLLM's sampler: argmax(p / e) with e ~ Exp(1) has distribution p. A seeded sequence draws
    from its own generator, so what it samples does not depend on its neighbours in the batch.
    """
    noise_BV = torch.empty_like(logprobs_BV).exponential_(generator=shared_generator)
    for row, generator in enumerate(own_generators):
        if generator is not None:
            noise_BV[row].exponential_(generator=generator)
        if samplings[row].greedy:
            noise_BV[row] = 1.0
    return (logprobs_BV.exp() / noise_BV.clamp_min(1e-30)).argmax(dim=-1)
