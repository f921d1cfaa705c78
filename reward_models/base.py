"""What an outcome reward model is: a named, pure judgement of one response to one conversation.

Invariant: a reward is a finite number in [-1, 1], and `parts` says which measurements it came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Score:
    """A reward in [-1, 1] and the named measurements behind it."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)


class RewardModel(Protocol):
    """Scores a response from the messages that led to it."""

    @property
    def name(self) -> str:
        """Identifies the model in the `source` of its feedback, as in `orm:<name>`."""

    def score(self, messages: Sequence[Mapping[str, Any]], response: str) -> Score:
        """Judge `response` as the continuation of `messages`."""
