"""The variants that are compared, as settings; and the suites of runs that answer one question each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from store.settings import LearnerSettings

GROUP_SIZE = 4
"""Answers to one prompt where an algorithm needs groups; the number of trajectories per update stays the same."""

BASE: dict[str, dict[str, Any]] = {
    "style": {"policy_learning_rate": 5e-4, "critic": {"learning_rate": 2.5e-3, "num_layers": 2}},
    "lookup": {"policy_learning_rate": 5e-4, "critic": {"learning_rate": 2.5e-3}},
}
"""For each task: the policy's learning rate, the critic's at five times that, and how deep the critic is."""

SHARED: dict[str, Any] = {
    "batch_size": 16,
    "autocast_bfloat16": False,
    "micro_batch_tokens": 4096,
    "critic": {"warmup_updates": 0},
    "plasticity": {"return_to_start": False, "kl_coefficient": 0.05},
}
"""fp32 throughout, so that a ratio of fresh samples is 1; preferences are constant, so nothing returns to the start."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to learn: what it is called in tables, its settings, and scored rollouts its critic sees beforehand."""

    name: str
    meaning: str
    settings: dict[str, Any]
    num_pretraining: int = 0


def _variant(name: str, meaning: str, num_pretraining: int = 0, **settings: Any) -> Variant:
    return Variant(name, meaning, settings, num_pretraining)


VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        _variant("sao", "SAO: token-level skip-observation GAE, DIS, K = 2, frozen attention, running RMS, anchor"),
        _variant("no-dis", "no DIS: every ratio taken for 1", ablation={"trust_region": "none"}),
        _variant("unbounded", "importance ratios kept whatever their size", ablation={"trust_region": "unbounded"}),
        _variant("bare", "no anchor, as the paper has it", plasticity={"kl_coefficient": 0.0}),
        _variant(
            "bare-no-dis",
            "no anchor and no DIS",
            plasticity={"kl_coefficient": 0.0},
            ablation={"trust_region": "none"},
        ),
        _variant("k1", "one critic step for each policy step", critic={"updates_per_step": 1}),
        _variant("unfrozen", "the critic's attention trains", critic={"freeze_attention": False}),
        _variant("k1-unfrozen", "both", critic={"updates_per_step": 1, "freeze_attention": False}),
        _variant("pretrained", "critic pretrained on 256 scored rollouts of the starting policy", 256),
        _variant("pretrained-64", "critic pretrained on 64", 64),
        _variant("pretrained-1024", "critic pretrained on 1,024", 1024),
        _variant("turn-last", "one advantage per turn, V at its last token", ablation={"advantage_level": "turn_last"}),
        _variant("turn-mean", "one advantage per turn, mean V", ablation={"advantage_level": "turn_mean"}),
        _variant("through-obs", "GAE through the observations", ablation={"skip_observations": False}),
        _variant("whiten", "advantages whitened per batch", advantage_scaling="whiten"),
        _variant("unscaled", "advantages left as they are", advantage_scaling="none"),
        _variant("running-mean", "A = R - mean of the last 128 rewards, DIS", algorithm="running_mean"),
        _variant("prompt-mean", "A = R - mean of the prompt's last 8 rewards, DIS", algorithm="prompt_mean"),
        _variant("grpo", "groups of 4, PPO clip", algorithm="grpo"),
        _variant("grpo-dis", "groups of 4, DIS", algorithm="grpo_dis"),
        _variant("ppo", "PPO clip, GAE 0.95, old policy recomputed", algorithm="ppo"),
        _variant("vapo", "VAPO without DIS: length-adaptive GAE, clip-higher, pretrained", 256, algorithm="vapo"),
        _variant("reinforce", "A = R, no correction", algorithm="reinforce"),
    )
}


@dataclass(frozen=True, slots=True)
class Suite:
    """Every variant at every staleness with every seed."""

    question: str
    task: str
    variants: tuple[str, ...]
    staleness: tuple[int, ...]
    num_seeds: int
    num_updates: int


SUITES: dict[str, Suite] = {
    "staleness": Suite(
        "Does DIS keep stale, asynchronous training stable?",
        "style",
        ("bare", "bare-no-dis", "sao", "no-dis"),
        (4, 16),
        5,
        500,
    ),
    "stamina": Suite("Does SAO go on without collapse?", "style", ("sao",), (1,), 3, 1000),
    "fresh": Suite("What does staleness itself cost?", "style", ("sao", "no-dis"), (0, 1), 3, 200),
    "estimators": Suite(
        "What does the critic buy over other baselines?",
        "lookup",
        ("sao", "pretrained", "running-mean", "prompt-mean", "grpo", "grpo-dis", "ppo", "vapo", "reinforce"),
        (4,),
        5,
        200,
    ),
    "parts": Suite(
        "What does each part of SAO do?",
        "lookup",
        ("sao", "no-dis", "unbounded", "bare", "whiten", "unscaled"),
        (4,),
        5,
        200,
    ),
    "turns": Suite(
        "Does leaving observations out of GAE help where they matter, and one advantage per token?",
        "lookup",
        ("sao", "through-obs", "turn-last", "turn-mean"),
        (1,),
        5,
        200,
    ),
    "critic": Suite(
        "How well does the critic predict, by K, frozen attention and pretraining?",
        "style",
        ("sao", "k1", "unfrozen", "k1-unfrozen", "pretrained-64", "pretrained", "pretrained-1024"),
        (1,),
        3,
        60,
    ),
}


def settings_of(variant: Variant, task: str, seed: int) -> LearnerSettings:
    """The learner settings of one run: shared ones, the task's learning rates, the variant's own."""
    merged: dict[str, Any] = {"seed": seed}
    for layer in (SHARED, BASE[task], variant.settings):
        for name, value in layer.items():
            merged[name] = merged.get(name, {}) | value if isinstance(value, dict) else value
    return LearnerSettings(**merged)
