"""The drop detector: one change is found once, and noise around a low mean is no change."""

from __future__ import annotations

from learner.drift import DropDetector
from store.settings import PlasticitySettings


def observed(rewards: list[float], **settings: float) -> list[bool]:
    detector = DropDetector(PlasticitySettings(**settings))
    return [detector.observe(reward) for reward in rewards]


def test_drop_below_the_share_of_the_trailing_mean_is_found_once() -> None:
    assert observed([0.9, 0.9, 0.9, 0.3, 0.0, 0.0, 0.0]) == [False, False, False, True, False, False, False]


def test_drop_just_above_the_threshold_is_none() -> None:
    assert not any(observed([0.9, 0.9, 0.9, 0.37]))
    assert observed([0.9, 0.9, 0.9, 0.35])[-1]


def test_low_or_negative_trailing_mean_detects_nothing() -> None:
    assert not any(observed([0.1, 0.1, 0.1, 0.0]))
    assert not any(observed([-0.5, -0.5, -0.5, -1.0]))


def test_trailing_mean_slides_and_survives_a_checkpoint() -> None:
    settings = PlasticitySettings(trailing_batches=2)
    detector = DropDetector(settings)
    for reward in (1.0, 1.0, 0.5, 0.5):
        detector.observe(reward)
    resumed = DropDetector(settings, detector.trailing())
    assert resumed.trailing() == [0.5, 0.5]
    assert not resumed.observe(0.21)
    assert DropDetector(settings, [0.5, 0.5]).observe(0.19)
