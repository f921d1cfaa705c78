"""Scored trajectories of the starting policy, from the store or from a JSONL file, and which policy that is.

Invariant: nothing here claims or changes anything; a line that cannot be trained on is refused by number and field.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Annotated, Literal

import structlog
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from learner.advantages import terminal_rewards
from learner.collate import Sample, to_sample
from store import policies, queue
from store.database import Database
from store.settings import Settings
from store.types import TidelineError, TrajectoryInvariantError

MAX_TRAJECTORIES = 4096
"""Read at most, the oldest first: more hold memory and teach the critic little."""

log = structlog.get_logger("tideline.learner")


class NothingToServeError(TidelineError, RuntimeError):
    """There is no policy to learn from; `tideline serve` makes the first."""


class ScoredFileError(TidelineError, ValueError):
    """A file of scored trajectories cannot be read; the message names the line and the field."""


class ScoredLine(BaseModel):
    """One line: token ids and loss mask of equal length, and the reward of the whole. Other fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    token_ids: list[Annotated[int, Field(ge=0)]]
    loss_mask: list[Literal[0, 1]]
    reward: Annotated[float, Field(allow_inf_nan=False)]
    temperature: Annotated[float, Field(gt=0)] = 1.0

    @model_validator(mode="after")
    def _check(self) -> ScoredLine:
        if len(self.loss_mask) != len(self.token_ids):
            raise ValueError(f"loss_mask has {len(self.loss_mask)} entries for {len(self.token_ids)} token_ids")
        if 1 not in self.loss_mask:
            raise ValueError("loss_mask marks no generated token")
        if self.loss_mask[0] == 1:
            raise ValueError("loss_mask marks the first token, which nothing predicts")
        return self


def read_jsonl(path: Path, vocabulary_size: int) -> list[Sample]:
    """Every line of `path` as a Sample without log-probabilities (NaN): enough for a critic, nothing for a policy.

    Raises ScoredFileError.
    """
    try:
        # Not splitlines: JSON may hold U+2028 and others that it takes for the end of a line.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ScoredFileError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    samples = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            scored = ScoredLine.model_validate_json(line)
        except ValidationError as error:
            raise ScoredFileError(f"{path}, line {number}: {_first(error)}") from error
        if max(scored.token_ids) >= vocabulary_size:
            raise ScoredFileError(f"{path}, line {number}: token_ids holds an id beyond the model's {vocabulary_size}")
        generated_G = torch.tensor(scored.loss_mask).nonzero()[:, 0]
        samples.append(
            Sample(
                token_ids_T=torch.tensor(scored.token_ids),
                generated_G=generated_G,
                behaviour_logprobs_G=torch.full((len(generated_G),), math.nan),
                rewards_G=terminal_rewards(len(generated_G), scored.reward),
                temperature=scored.temperature,
            )
        )
    return samples


def read_store(database: Database) -> list[Sample]:
    """The judged trajectories of the starting policy that wait for training; what cannot be trained is left out."""
    judged = database.read(lambda session: queue.judged_by_version(session, 0, MAX_TRAJECTORIES))
    samples = []
    for each in judged:
        try:
            samples.append(to_sample(each.trajectory, each.reward))
        except TrajectoryInvariantError as error:
            log.warning("not pretrained on", trajectory=each.trajectory.id, reason=str(error))
    return samples


def starting_policy(database: Database) -> Path:
    """Directory of policy 0. Raises NothingToServeError."""
    start = database.read(lambda session: policies.get(session, 0))
    if start is None:
        raise NothingToServeError("there is no policy yet; `tideline serve` makes the first one")
    return Path(start.path)


def policy_identity(directory: Path) -> str:
    """SHA-256 of a policy's weights."""
    with (directory / "model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pretrained_directory(settings: Settings) -> Path:
    """Where the pretrained critic lies until the first update."""
    return settings.data_dir.resolve() / "critic-pretrained"


def _first(error: ValidationError) -> str:
    """The first thing wrong, as `field: what`."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return f"{field}: {message}" if field else message


def vocabulary_size(directory: Path) -> int:
    """Of a policy, from its config."""
    return int(json.loads((directory / "config.json").read_text())["vocab_size"])
