"""VAPO (arXiv 2504.05118) without DIS: PPO with length-adaptive GAE and a clip that is wider above.

Its loss on correct answers is left out: graded rewards have no correct answers. Value pretraining is a setting that
every algorithm with a critic shares.
"""

from __future__ import annotations

from torch import Tensor

from learner.algorithm import Sao
from learner.baselines.ppo import Ppo
from learner.collate import Sample


class Vapo(Ppo):
    """SAO's advantages with PPO's loss, clip-higher."""

    clip_high = 0.28

    def _advantages_of(self, sample: Sample, valued: Sample, values_G: Tensor) -> Tensor:
        return Sao._advantages_of(self, sample, valued, values_G)
