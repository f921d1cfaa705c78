"""Algorithms to compare SAO with, one short file each, chosen by `learner.algorithm`.

They share everything with SAO but the advantage estimator and the policy loss (`learner/algorithm.py`).
"""

from __future__ import annotations

from learner.algorithm import Sao
from learner.baselines.grpo import Grpo, GrpoDis
from learner.baselines.ppo import Ppo
from learner.baselines.prompt_mean import PromptMean
from learner.baselines.reinforce import Reinforce
from learner.baselines.running_mean import RunningMean
from learner.baselines.vapo import Vapo
from store.settings import LearnerSettings

ALGORITHMS: dict[str, type[Sao]] = {
    "sao": Sao,
    "running_mean": RunningMean,
    "prompt_mean": PromptMean,
    "grpo": Grpo,
    "grpo_dis": GrpoDis,
    "ppo": Ppo,
    "vapo": Vapo,
    "reinforce": Reinforce,
}


def make_algorithm(settings: LearnerSettings) -> Sao:
    """The algorithm that the settings choose."""
    return ALGORITHMS[settings.algorithm](settings)
