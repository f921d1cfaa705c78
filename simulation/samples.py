"""The style corpus as text: topics, sentence grammars and the chat messages that offer a pool of styles.

Invariant: held-out topics share neither question nor subject with training topics, so a share measured on them says
what the policy prefers, not what it memorised. The texts live in `simulation/corpus/*.toml`.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

Split = Literal["train", "held_out"]
Language = Literal["en", "zh"]

STYLES = ("academic", "cute", "chuunibyou", "classical")
POOL_A = ("academic", "cute", "chuunibyou")
"""Styles the system prompt offers in the first two phases (SAO.md section 6)."""
POOL_B = ("classical", "cute", "chuunibyou")
"""Styles it offers in the third."""

_SLOT = re.compile(r"\{(\w+)(\|cap)?\}")
_ARTICLE = re.compile(r"\b([Aa])(?= [aeio])")


@dataclass(frozen=True, slots=True)
class Topic:
    """What a user asks, and the singular noun phrase that an answer can be built around."""

    question: str
    subject: str
    language: Language = "en"


@dataclass(frozen=True, slots=True)
class Grammar:
    """Sentence patterns of one style by language, and the interchangeable phrases of their slots."""

    style: str
    patterns: dict[str, tuple[str, ...]]
    slots: dict[str, tuple[str, ...]]


@cache
def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((resources.files("simulation") / "corpus" / f"{name}.toml").read_text(encoding="utf-8"))


def topics(split: Split, language: Language = "en") -> tuple[Topic, ...]:
    """Topics of one split, in file order."""
    pairs = (line.rsplit("|", 1) for line in _read("topics")[split][language])
    return tuple(Topic(question.strip(), subject.strip(), language) for question, subject in pairs)


def grammar(style: str) -> Grammar:
    """The grammar of `style`. Raises ValueError for a style the corpus does not have."""
    if style not in STYLES:
        raise ValueError(f"no style {style!r} in the corpus; it has {', '.join(STYLES)}")
    content = _read(style)
    return Grammar(
        style,
        {"en": tuple(content["patterns"]), "zh": tuple(content["zh"])},
        {name: tuple(phrases) for name, phrases in content["slots"].items()},
    )


def write_answer(style: str, topic: Topic, rng: random.Random) -> str:
    """One answer to `topic` in `style`: a random pattern with random phrases in its slots."""
    source = grammar(style)

    def fill(match: re.Match[str]) -> str:
        name, capitalise = match.groups()
        phrase = topic.subject if name == "subject" else rng.choice(source.slots[name])
        return phrase[0].upper() + phrase[1:] if capitalise else phrase

    text = _SLOT.sub(fill, rng.choice(source.patterns[topic.language]))
    return _ARTICLE.sub(r"\1n", text)


def system_prompt(pool: Sequence[str]) -> str:
    """The instruction that offers `pool`; the policy chooses the style itself."""
    return f"Answer in one of these styles: {', '.join(pool)}."


def chat_messages(pool: Sequence[str], question: str) -> list[dict[str, str]]:
    """What a simulated user sends: the offer of styles, then the question."""
    return [{"role": "system", "content": system_prompt(pool)}, {"role": "user", "content": question}]
