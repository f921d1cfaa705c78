"""VAPO (arXiv 2504.05118) without DIS: PPO with length-adaptive GAE and a clip that is wider above.

Its loss on correct answers is left out: graded rewards have no correct answers. Value pretraining is a setting that
every algorithm with a critic shares.
"""

from __future__ import annotations

from learner.algorithm import Sao
from learner.baselines.ppo import Ppo


class Vapo(Ppo):
    """SAO's advantages with PPO's loss, clip-higher."""

    clip_high = 0.28

    def gae_lambda(self, num_generated: int) -> float:
        return Sao.gae_lambda(self, num_generated)
