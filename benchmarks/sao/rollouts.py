"""Rollouts on the transformers engine's decoder, by a policy as old as wanted, with swaps in the middle of them.

Invariant: every token carries the log-probability it was sampled with and counts as the version that sampled it, as
in live serving; nothing is recomputed afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from app.inference.transformers_engine.decoder import Decoder
from app.inference.transformers_engine.sampling import Sampling
from benchmarks.sao.tasks import Episode
from learner.collate import Sample

Weights = Mapping[str, Tensor]


class History:
    """The last versions of the policy's weights, newest last."""

    def __init__(self, max_staleness: int) -> None:
        self._versions: deque[Weights] = deque(maxlen=max_staleness + 1)

    def add(self, weights: Weights) -> None:
        """Remember the policy's weights of now; tensors are copied."""
        self._versions.append({name: tensor.detach().clone() for name, tensor in weights.items()})

    def at_staleness(self, staleness: int) -> Weights:
        """The weights `staleness` versions ago, or the oldest there are."""
        return self._versions[max(0, len(self._versions) - 1 - staleness)]


class Sampler:
    """Plays batches of episodes in fp32."""

    def __init__(self, directory: Path, max_model_len: int, seed: int) -> None:
        self._decoder = Decoder(
            directory, dtype=torch.float32, max_num_seqs=256, max_model_len=max_model_len, version=0, seed=seed
        )

    def play(self, episodes: Sequence[Episode], weights: Sequence[Weights], temperature: float = 1.0) -> list[Sample]:
        """Play all episodes to their ends; one Sample each.

        `weights` are taken in turn as generation goes on: the first from the start, the next from the second quarter
        of the longest turn on (its running rollouts keep their KV cache, as they do in serving), and so on.
        """
        transcripts = [_Transcript(list(episode.prompt_ids)) for episode in episodes]
        playing = list(range(len(episodes)))
        self._load(weights[0])
        turn = 0
        while playing:
            if turn > 0:
                self._load(weights[min(turn, len(weights) - 1)])
            texts = self._turn(episodes, transcripts, playing, weights if turn == 0 else weights[-1:], temperature)
            still = []
            for index in playing:
                observation = episodes[index].observe(transcripts[index].turn_ids, texts[index])
                if observation is not None:
                    transcripts[index].token_ids += observation
                    still.append(index)
            playing = still
            turn += 1
        return [
            transcript.sample(episode.reward, temperature)
            for transcript, episode in zip(transcripts, episodes, strict=True)
        ]

    def _turn(
        self,
        episodes: Sequence[Episode],
        transcripts: Sequence[_Transcript],
        playing: Sequence[int],
        weights: Sequence[Weights],
        temperature: float,
    ) -> dict[int, str]:
        """Sample one turn of each; returns its text."""
        longest = max(episodes[index].max_tokens for index in playing)
        swap_steps = {round(longest * part / (2 * len(weights))): each for part, each in enumerate(weights) if part}
        for index in playing:
            transcripts[index].turn_ids = []
            self._decoder.add(
                str(index),
                transcripts[index].token_ids,
                Sampling(max_tokens=episodes[index].max_tokens, temperature=temperature),
            )
        texts = dict.fromkeys(playing, "")
        step = 0
        while self._decoder.num_running or self._decoder.num_waiting:
            if step in swap_steps:
                self._load(swap_steps[step])
            for token in self._decoder.step():
                transcripts[int(token.sequence_id)].append(token.token_id, token.logprob)
                texts[int(token.sequence_id)] += token.text
            step += 1
        return texts

    def _load(self, weights: Weights) -> None:
        self._decoder.model.load_state_dict(weights)


class _Transcript:
    """The tokens of one episode so far."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.turn_ids: list[int] = []
        self._generated: list[int] = []
        self._logprobs: list[float] = []

    def append(self, token_id: int, logprob: float) -> None:
        self._generated.append(len(self.token_ids))
        self._logprobs.append(logprob)
        self.token_ids.append(token_id)
        self.turn_ids.append(token_id)

    def sample(self, reward: float, temperature: float) -> Sample:
        """The episode as the learner takes it; the reward sits on the last generated token."""
        rewards_G = torch.zeros(len(self._generated))
        rewards_G[-1] = reward
        return Sample(
            token_ids_T=torch.tensor(self.token_ids),
            generated_G=torch.tensor(self._generated),
            behaviour_logprobs_G=torch.tensor(self._logprobs),
            rewards_G=rewards_G,
            temperature=temperature,
        )
