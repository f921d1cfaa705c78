"""The corpus is large, varied, in style, and its held-out topics are held out."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from reward_models.style import StyleReward, dominant_style, quality
from simulation.samples import POOL_A, POOL_B, STYLES, chat_messages, grammar, topics, write_answer


def test_topics_are_many_and_held_out_ones_are_disjoint() -> None:
    train, held_out = topics("train"), topics("held_out")
    assert len(train) >= 64
    assert len(held_out) >= 16
    for attribute in ("question", "subject"):
        seen = [getattr(topic, attribute) for topic in (*train, *held_out)]
        assert len(seen) == len(set(seen))


@pytest.mark.parametrize("style", STYLES)
def test_grammar_has_many_patterns_and_no_unfilled_slot(style: str) -> None:
    source = grammar(style)
    assert len(set(source.patterns["en"])) >= 25
    rng = random.Random(0)
    for language in ("en", "zh"):
        for topic in topics("train", language):
            text = write_answer(style, topic, rng)
            assert "{" not in text
            assert "}" not in text


@pytest.mark.parametrize("style", STYLES)
def test_answers_are_varied_good_and_in_style(style: str) -> None:
    rng = random.Random(1)
    subjects = topics("train")
    answers = [write_answer(style, rng.choice(subjects), rng) for _ in range(400)]
    assert len(set(answers)) >= 380
    assert Counter(map(dominant_style, answers))[style] >= 0.98 * len(answers)
    assert sum(map(quality, answers)) / len(answers) > 0.97
    assert sum(StyleReward(style).score([], answer).reward for answer in answers) / len(answers) > 0.85
    for other in set(STYLES) - {style}:
        assert sum(StyleReward(other).score([], answer).reward for answer in answers) / len(answers) < 0.05


@pytest.mark.parametrize("style", STYLES)
def test_answers_to_one_topic_are_not_near_copies(style: str) -> None:
    rng = random.Random(2)
    topic = topics("train")[0]
    answers = [set(write_answer(style, topic, rng).lower().split()) for _ in range(60)]
    overlaps = [len(a & b) / len(a | b) for i, a in enumerate(answers) for b in answers[:i]]
    assert sum(overlaps) / len(overlaps) < 0.4


@pytest.mark.parametrize("style", STYLES)
def test_chinese_answers_are_recognised(style: str) -> None:
    rng = random.Random(3)
    for topic in topics("train", "zh"):
        answer = write_answer(style, topic, rng)
        assert dominant_style(answer) == style
        assert quality(answer) > 0.8


def test_grammar_names_the_style_it_does_not_have() -> None:
    with pytest.raises(ValueError, match="gothic"):
        grammar("gothic")


def test_chat_messages_offer_the_pool_and_choose_nothing() -> None:
    for pool in (POOL_A, POOL_B):
        system, user = chat_messages(pool, "Why?")
        assert all(style in system["content"] for style in pool)
        assert user == {"role": "user", "content": "Why?"}
