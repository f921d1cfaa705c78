"""Typed records that cross a process or a package boundary. Pure data: numpy and the standard library only.

Invariant guarded here: a trajectory's ids, mask, log-probabilities and version spans describe the same tokens.

    len(token_ids) == len(loss_mask)
    sum(loss_mask) == len(behaviour_logprobs) == sum of the lengths of version_spans

Shape legend: T tokens of the trajectory, G generated tokens of it (G = loss_mask.sum()).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

JsonObject = dict[str, Any]


class TidelineError(Exception):
    """Root of every error this project raises on purpose; its message is fit to be shown to a user."""


class TrajectoryInvariantError(TidelineError, ValueError):
    """A trajectory's arrays do not describe the same tokens. It is quarantined with this message, never repaired."""


class TrajectoryStatus(enum.StrEnum):
    """Life of a trajectory.

    sampled -> ready -> trained
       |         +-> dropped      too stale, or trust region kept too little
       +-> untrainable            sampled in a way SAO cannot use (top_p < 1, aborted, ...)
       +-> expired                nobody judged it in time
       +-> quarantined            its arrays contradict each other
    """

    SAMPLED = "sampled"
    READY = "ready"
    TRAINED = "trained"
    UNTRAINABLE = "untrainable"
    EXPIRED = "expired"
    DROPPED = "dropped"
    QUARANTINED = "quarantined"


class FeedbackStatus(enum.StrEnum):
    """Life of one feedback: accepted -> queued -> one of the others, each with a reason."""

    ACCEPTED = "accepted"
    QUEUED = "queued"
    TRAINED = "trained"
    SUPERSEDED = "superseded"
    LATE = "late"
    QUARANTINED = "quarantined"
    EXPIRED = "expired"
    DROPPED = "dropped"
    RETRACTED = "retracted"


class PolicyStatus(enum.StrEnum):
    """staged (recorded, durable) -> active (served, probe passed) -> retired; or staged -> rejected."""

    STAGED = "staged"
    ACTIVE = "active"
    RETIRED = "retired"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Generated tokens [start, end) of a trajectory were sampled by policy `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One rollout of one prompt, exactly as sampled.

    token_ids           int32 [T]    prompt, generated tokens and observations, in order
    loss_mask           uint8 [T]    1 on tokens the model generated, 0 on everything else
    behaviour_logprobs  float32 [G]  the sampler's log-probability of each generated token, at `temperature`
    version_spans       contiguous, in order, covering [0, G)
    """

    id: str
    created_at: datetime
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    behaviour_logprobs: npt.NDArray[np.float32]
    version_spans: tuple[VersionSpan, ...]
    temperature: float
    finish_reason: str
    messages: list[JsonObject]
    text: str
    admitted_version: int
    trainable: bool
    untrainable_reason: str | None = None
    sampling: JsonObject = field(default_factory=dict)
    metadata: JsonObject = field(default_factory=dict)
    episode_id: str | None = None
    parent_trajectory_id: str | None = None
    user: str | None = None

    @property
    def num_generated(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def oldest_version(self) -> int:
        """The oldest policy version among the generated tokens, or the version at admission if there are none."""
        return min((span.version for span in self.version_spans), default=self.admitted_version)

    def check(self) -> None:
        """Raise TrajectoryInvariantError naming the first broken invariant."""
        check_trajectory_arrays(self.token_ids, self.loss_mask, self.behaviour_logprobs, self.version_spans)
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise TrajectoryInvariantError(f"temperature is {self.temperature}, not a finite number >= 0")


def check_trajectory_arrays(
    token_ids: npt.NDArray[np.int32],
    loss_mask: npt.NDArray[np.uint8],
    behaviour_logprobs: npt.NDArray[np.float32],
    version_spans: Sequence[VersionSpan],
) -> None:
    """Raise TrajectoryInvariantError unless the arrays describe the same tokens (SAO.md section 1)."""
    if len(token_ids) != len(loss_mask):
        raise TrajectoryInvariantError(f"{len(token_ids)} token_ids but {len(loss_mask)} loss_mask entries")
    if not np.isin(loss_mask, (0, 1)).all():
        raise TrajectoryInvariantError("loss_mask holds values other than 0 and 1")
    num_generated = int(np.sum(loss_mask))
    if num_generated != len(behaviour_logprobs):
        raise TrajectoryInvariantError(
            f"{num_generated} generated tokens but {len(behaviour_logprobs)} behaviour_logprobs"
        )
    if not np.isfinite(behaviour_logprobs).all():
        raise TrajectoryInvariantError("behaviour_logprobs holds a value that is not finite")
    if (behaviour_logprobs > 1e-4).any():
        raise TrajectoryInvariantError("behaviour_logprobs holds a value above 0")
    position = 0
    for span in version_spans:
        if span.start != position or span.end <= span.start:
            raise TrajectoryInvariantError(f"version span [{span.start}, {span.end}) does not continue at {position}")
        position = span.end
    if position != num_generated:
        raise TrajectoryInvariantError(f"version spans cover {position} of {num_generated} generated tokens")


@dataclass(frozen=True, slots=True)
class JudgedTrajectory:
    """A claimed trajectory with the one reward that its feedback amounts to, and the feedback that went into it."""

    trajectory: Trajectory
    reward: float
    ready_at: datetime
    feedback_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FeedbackSubmission:
    """A validated feedback as the API accepted it; `reward` is already mapped to [-1, 1], None for a comment alone."""

    trajectory_id: str | None
    episode_id: str | None
    kind: str
    reward: float | None
    content: JsonObject
    source: str = "user"
    source_kind: str = "human"
    weight: float = 1.0
    turn: int | None = None
    idempotency_key: str | None = None
    api_key_id: str | None = None


@dataclass(frozen=True, slots=True)
class FeedbackReceipt:
    """What became of a feedback so far. `created` is False when an idempotency key repeated an earlier one."""

    id: str
    trajectory_id: str | None
    status: FeedbackStatus
    reason: str | None
    created: bool = True


class FeedbackEvent(NamedTuple):
    """One step in the life of a feedback."""

    status: FeedbackStatus
    reason: str | None
    at: datetime


@dataclass(frozen=True, slots=True)
class FeedbackLife:
    """A stored feedback, what has become of it, and how (`history`, the oldest first).

    `trained_in_version` is the policy version that it went into: None unless `trained`, and None after a step that
    trained the critic alone.
    """

    id: str
    trajectory_id: str
    episode_id: str | None
    kind: str
    reward: float | None
    content: JsonObject
    source: str
    source_kind: str
    weight: float
    turn: int | None
    idempotency_key: str | None
    api_key_id: str | None
    created_at: datetime
    status: FeedbackStatus
    reason: str | None
    trained_in_version: int | None
    history: tuple[FeedbackEvent, ...]


@dataclass(frozen=True, slots=True)
class PolicyRecord:
    """One policy version. `path` is a directory transformers can load, holding model.safetensors in bf16."""

    version: int
    parent_version: int | None
    status: PolicyStatus
    path: str
    created_at: datetime
    activated_at: datetime | None = None
    event: str | None = None
    metrics: JsonObject = field(default_factory=dict)
    status_reason: str | None = None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One learner update. `version` is the policy it produced, None for critic-only and skipped updates.

    kind: `policy` (a SAO update), `critic_warmup` (critic alone), `return_to_start` (weights restored after a
    detected drop in reward), `skipped` (no token inside the trust region).
    """

    step: int
    version: int | None
    parent_version: int
    kind: str
    started_at: datetime
    finished_at: datetime
    metrics: JsonObject
    event: str | None = None


@dataclass(frozen=True, slots=True)
class QueueStats:
    """The ready-queue at one moment. Times are UTC."""

    num_ready: int
    num_leased: int
    oldest_ready_at: datetime | None


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """Heartbeat and state of the one process that plays a role (`engine` or `learner`)."""

    role: str
    owner: str
    heartbeat_at: datetime
    lease_expires_at: datetime
    state: Mapping[str, Any]
    restart_requested: str | None = None
