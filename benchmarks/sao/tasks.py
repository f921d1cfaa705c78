"""What the policy is to learn in the bench: an episode is a prompt, turns of generated tokens, and a terminal reward.

Invariant: an episode knows nothing of the policy but the tokens it generated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from reward_models.style import StyleReward, dominant_style
from simulation.micro import MicroModel, build_micro
from simulation.samples import POOL_A, chat_messages, topics

Progress = Callable[[str, int, int], None]


class Episode(Protocol):
    """One rollout in the making. `max_tokens` bounds each turn."""

    prompt_ids: list[int]
    max_tokens: int

    def observe(self, generated_ids: Sequence[int], text: str) -> list[int] | None:
        """Take in a turn; the observation that follows it, or None when the episode is over."""
        ...

    @property
    def reward(self) -> float:
        """In [0, 1]; known once the episode is over."""
        ...

    @property
    def succeeded(self) -> bool:
        """What the bench counts: the reward's yes or no."""
        ...


class Task(Protocol):
    """A source of episodes and the model that starts on them."""

    directory: Path
    max_model_len: int

    def episodes(self, rng: random.Random, num_prompts: int, group_size: int) -> list[Episode]:
        """`group_size` episodes for each of `num_prompts` prompts."""
        ...


class StyleEpisode:
    """One answer to one question; rewarded for the preferred style."""

    max_tokens = 32

    def __init__(self, prompt_ids: list[int], preferred: str) -> None:
        self.prompt_ids = prompt_ids
        self._judge = StyleReward(preferred)
        self._text = ""

    def observe(self, generated_ids: Sequence[int], text: str) -> list[int] | None:
        self._text = text
        return None

    @property
    def reward(self) -> float:
        return self._judge.score((), self._text).reward

    @property
    def succeeded(self) -> bool:
        return dominant_style(self._text) == self._judge.style


class StyleTask:
    """The paper's simulation in its first phase: users who like one style of those offered (SAO.md section 6)."""

    max_model_len = 256

    def __init__(self, data_dir: Path, progress: Progress, preferred: str = "cute") -> None:
        from transformers import AutoTokenizer

        self.directory = build_micro(data_dir / "models" / "micro-styles", MicroModel(), progress)
        self._preferred = preferred
        self._tokenizer: Any = AutoTokenizer.from_pretrained(self.directory)

    def episodes(self, rng: random.Random, num_prompts: int, group_size: int) -> list[Episode]:
        chosen: list[Episode] = []
        for _ in range(num_prompts):
            messages = chat_messages(POOL_A, rng.choice(topics("train")).question)
            ids = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            chosen += [StyleEpisode(list(ids), self._preferred) for _ in range(group_size)]
        return chosen
