"""A rule-based ORM for writing style: reward = quality * style, both in [0, 1] (SAO.md section 6).

Invariant: repeating a cue earns nothing. Each cue group counts once, cues of other styles lower the score, and quality
falls with repetition, truncation, keyword lists and text that is not made of words.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reward_models.base import Score
from reward_models.lexicon import STYLES, compiled_cues, function_words

__all__ = ["STYLES", "StyleReward", "dominant_style", "quality", "quality_parts", "style_scores"]

FULL_EVIDENCE = 2.0
"""Summed cue weight at which a style is fully marked."""
DOMINANT_SCORE = 0.25
"""Smallest score of a style that is recognised at all."""

_WORD = re.compile(r"[一-鿿]|[^\W\d_一-鿿]+(?:['’-][^\W\d_一-鿿]+)*|\d+")
_CJK = re.compile(r"[一-鿿]")
_WORD_LIKE = re.compile(r"(?i)(?:[a-z]*[aeiouy][a-z]*(?:['’-][a-z]+)*|[bcdfghjklmnpqrstvwxz]|[一-鿿]|\d{1,4})$")
_LONG_RUNS = re.compile(r"(?i)[bcdfghjklmnpqrstvwxz]{5,}|[aiu]{4,}|([a-z])\1{3,}")
_ENDS = re.compile(r"[.!?~…。！？♡♥]['\"”’)*]*$")


def style_scores(text: str) -> dict[str, float]:
    """How strongly and how purely each style marks `text`: strength * share of all evidence, each in [0, 1]."""
    evidence = {
        style: sum(weight for weight, pattern in cues if pattern.search(text))
        for style, cues in compiled_cues().items()
    }
    total = sum(evidence.values())
    if total == 0:
        return dict.fromkeys(evidence, 0.0)
    return {style: min(1.0, found / FULL_EVIDENCE) * found / total for style, found in evidence.items()}


def dominant_style(text: str) -> str | None:
    """The one style that marks `text` most, or None if none does clearly."""
    (best, score), (_, runner_up) = sorted(style_scores(text).items(), key=lambda item: -item[1])[:2]
    return best if score >= DOMINANT_SCORE and score > runner_up else None


def _ramp(value: float, zero: float, one: float) -> float:
    """0 at `zero`, 1 at `one`, linear between; works in both directions."""
    return min(1.0, max(0.0, (value - zero) / (one - zero)))


def quality_parts(text: str) -> dict[str, float]:
    """Measurements of how far `text` is one complete, varied, printable piece of writing; each in [0, 1]."""
    stripped = text.strip()
    words = [word.lower() for word in _WORD.findall(stripped)]
    if not words:
        return {"length": 0.0, "complete": 0.0, "varied": 0.0, "printable": 0.0, "words": 0.0, "sentence": 0.0}
    counts = Counter(words)
    bigrams = list(itertools.pairwise(words))
    most_repeated = max((count for word, count in counts.items() if word not in function_words()), default=1)
    varied = min(
        _ramp(len(counts) / len(words), 0.35, 0.65),
        _ramp(len(set(bigrams)) / len(bigrams), 0.4, 0.8) if len(bigrams) > 2 else 1.0,
        _ramp(most_repeated, 8, 3),
    )
    odd = sum(not (character.isprintable() or character in "\n\t") or character == "�" for character in stripped)
    word_like = sum(bool(_WORD_LIKE.match(word)) and not _LONG_RUNS.search(word) and len(word) <= 18 for word in words)
    chinese = len(_CJK.findall(stripped)) > len(words) / 2
    function_share = sum(word in function_words() for word in words) / len(words)
    return {
        "length": _ramp(len(words), 1, 6) * _ramp(len(words), 120, 60),
        "complete": 1.0 if _ENDS.search(stripped) else 0.5,
        "varied": varied,
        "printable": _ramp(odd / len(stripped), 0.1, 0.0),
        "words": _ramp(word_like / len(words), 0.6, 0.95),
        "sentence": 1.0 if chinese else 0.4 + 0.6 * _ramp(function_share, 0.0, 0.1),
    }


def quality(text: str) -> float:
    """Product of `quality_parts`, in [0, 1]."""
    product = 1.0
    for part in quality_parts(text).values():
        product *= part
    return product


@dataclass(frozen=True, slots=True)
class StyleReward:
    """Rewards answers in one style. Raises ValueError for a style it does not know."""

    style: str

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise ValueError(f"no style {self.style!r}; known are {', '.join(STYLES)}")

    @property
    def name(self) -> str:
        return f"style-{self.style}"

    def score(self, messages: Sequence[Mapping[str, Any]], response: str) -> Score:
        """Quality times the score of `style`, graded in [0, 1]; `messages` do not matter to it."""
        parts = {"quality": quality(response), "style": style_scores(response)[self.style]}
        return Score(parts["quality"] * parts["style"], parts)
