"""The style ORM tells the styles apart, in words it was not written from, and cannot be had by repetition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_models.style import STYLES, StyleReward, dominant_style, quality, quality_parts, style_scores

# Written apart from the corpus, so that recognising them is not recognising its sentences.
HAND_WRITTEN = {
    "academic": [
        "Evidence from longitudinal studies indicates that sleep quality correlates with daily exercise.",
        "Although the sample was small, the results demonstrate a significant effect; hence replication is advisable.",
        "This framework posits that learning depends on prior knowledge and, moreover, on motivation.",
        "It can be argued that erosion is largely determined by rainfall, whereas vegetation has a limited influence.",
        "A theoretical analysis of combustion must distinguish between several mechanisms.",
    ],
    "cute": [
        "Hehe, what a fluffy little question! Let me give you a hug, nya~",
        "Yay! The kitten made a tiny boop on my nose and now I am all sparkly!",
        "Teehee, soft pillows and warm cuddles make everything better, sweetie!",
        "Mew~ I saved you the cutest cookie, it has pink sprinkles!",
        "Aww, you look sleepy! Come snuggle under this cozy blanket with me!",
    ],
    "chuunibyou": [
        "Kukuku, my cursed right hand hungers for the souls of mortals!",
        "You fool! Do you not sense the darkness sealed behind this door?",
        "The abyss has chosen me, and the crimson moon shall witness my awakening!",
        "Unleash the forbidden grimoire, for the demon lord stirs at midnight!",
        "Silence! The black flames of oblivion answer to nobody but me.",
    ],
    "classical": [
        "Hark, the geese depart, and thy heart is as still as the frozen river.",
        "Thou hast asked well; yet the answer lieth beneath the old willow.",
        "Verily, no lamp burneth so bright as the moon upon the water.",
        "In days of yore a scholar sat among the bamboo, and he spake not a word unto any man.",
        "Prithee, drink with me ere the plum blossoms fall, for life is short as dew.",
    ],
}
PLAIN = [
    "You can boil the water for three minutes and then pour it over the leaves.",
    "I think the bus leaves at nine, so we should go now.",
    "Mix the flour with water and put it in the oven.",
]


@pytest.mark.parametrize("style", STYLES)
def test_dominant_style_recognises_unseen_lines(style: str) -> None:
    assert [dominant_style(line) for line in HAND_WRITTEN[style]] == [style] * len(HAND_WRITTEN[style])


@pytest.mark.parametrize("text", PLAIN)
def test_dominant_style_is_none_for_plain_prose(text: str) -> None:
    assert dominant_style(text) is None
    assert quality(text) > 0.9


@pytest.mark.parametrize("style", STYLES)
def test_style_reward_pays_its_own_style_alone(style: str) -> None:
    judge = StyleReward(style)
    own = [judge.score([], line).reward for line in HAND_WRITTEN[style]]
    others = [judge.score([], line).reward for other in STYLES if other != style for line in HAND_WRITTEN[other]]
    assert min(own) > 0.5
    assert max(others) < 0.25


def test_style_reward_is_graded_by_purity() -> None:
    judge = StyleReward("cute")
    pure = "Hehe, a tiny sparkly cookie for you, and a big hug!"
    mixed = "Hehe, a tiny sparkly cookie for thee, and a hug from the abyss, mortal!"
    assert 0 < judge.score([], mixed).reward < judge.score([], pure).reward


@pytest.mark.parametrize(
    "gamed",
    [
        "nya nya nya nya nya nya nya nya nya nya nya nya",
        "tiny sparkly tiny sparkly tiny sparkly tiny sparkly tiny sparkly!",
        "hug hug hug hug hug hug hug hug hug hug hug!",
    ],
)
def test_style_reward_falls_with_repetition(gamed: str) -> None:
    assert StyleReward("cute").score([], gamed).reward < 0.1


def test_style_reward_of_a_bare_keyword_list_stays_below_a_sentence() -> None:
    judge = StyleReward("cute")
    listed = judge.score([], "nya hehe tiny sparkly fluffy hug kitten").reward
    assert listed < 0.35 < judge.score([], "Hehe, the fluffy kitten wants a tiny hug, nya~").reward


def test_quality_punishes_truncation() -> None:
    whole = "Verily, the moon upon the river is as old as the song."
    assert quality(whole) == 1.0
    assert quality(whole.removesuffix("song.")) <= 0.5


@pytest.mark.parametrize(
    "text", ["", "   \n", "!!!???", "xqz kkkrt bbbbgh zzxw vvvkk qwrtp", "����� ����", "\x00\x01\x02"]
)
def test_quality_of_what_is_not_text_is_nothing(text: str) -> None:
    assert quality(text) == pytest.approx(0.0, abs=0.05)


def test_quality_falls_when_an_answer_is_a_word_or_a_flood() -> None:
    assert quality("Nya!") < 0.2
    flood = " ".join(f"the {a}{b} of it" for a in "bcdfg" for b in ("ake", "ore", "ine", "ate", "ump", "ist", "old"))
    assert quality_parts(flood + ".")["length"] < 0.5


def test_style_reward_names_the_style_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="gothic"):
        StyleReward("gothic")


@given(st.text(max_size=300))
def test_style_reward_is_in_range_for_any_text(text: str) -> None:
    scores = style_scores(text)
    assert sum(scores.values()) <= 1 + 1e-9
    for style in STYLES:
        score = StyleReward(style).score([], text)
        assert 0 <= score.reward <= 1
        assert score.reward == pytest.approx(score.parts["quality"] * score.parts["style"])


@given(st.sampled_from([line for lines in HAND_WRITTEN.values() for line in lines]), st.integers(2, 8))
def test_quality_never_rises_when_a_text_is_repeated(line: str, times: int) -> None:
    assert quality(" ".join([line] * times)) < quality(line)
