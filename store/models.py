"""The schema, as SQLAlchemy models. Rows never leave this package: other modules turn them into `store.types` records.

    trajectories --< trajectory_statuses      what was sampled; what became of it and why
         |    \\--< feedback --< feedback_statuses
         |                                    learning_steps >-- policies --< policy_statuses
         +--< step_trajectories >-------------------+
         +--- training_queue                  a row exists exactly as long as the trajectory can still be trained
    workers                                   one row per role

Invariants the schema itself guards:
- a trajectory is trained at most once per pass: (trajectory_id, pass_index) is the key of step_trajectories;
- an idempotency key names one feedback; a policy version comes from at most one step.
- trajectories, feedback, policies and all *_statuses are only ever added to. The current status is the row with the
  greatest id, which the index (subject, id) finds in one lookup.

Content that clients write is in JSON columns (of type json, not jsonb), because PostgreSQL refuses NUL characters in
text and in jsonb, and a sampled answer may contain one.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import JSON, Double, ForeignKey, Index, Integer, MetaData, String, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from store.columns import Float32Array, Int32Array, RowNumber, Uint8Array, UtcDateTime

Identifier = String(36)


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012
        datetime: UtcDateTime,
        float: Double,
        dict[str, Any]: JSON,
        list[Any]: JSON,
        npt.NDArray[np.int32]: Int32Array,
        npt.NDArray[np.float32]: Float32Array,
        npt.NDArray[np.uint8]: Uint8Array,
    }


class TrajectoryRow(Base):
    """One rollout. The content columns become NULL when it is erased; the row stays as the tombstone."""

    __tablename__ = "trajectories"
    __table_args__ = (
        Index(None, "episode_id", "id"),
        Index(None, "created_at", "id"),
        Index(None, "oldest_version"),
        Index(None, "parent_trajectory_id"),
    )

    id: Mapped[str] = mapped_column(Identifier, primary_key=True)
    created_at: Mapped[datetime]
    episode_id: Mapped[str | None] = mapped_column(Text)
    parent_trajectory_id: Mapped[str | None] = mapped_column(ForeignKey("trajectories.id"))
    admitted_version: Mapped[int]
    oldest_version: Mapped[int]
    num_generated: Mapped[int]
    trainable: Mapped[bool]
    untrainable_reason: Mapped[str | None] = mapped_column(Text)
    finish_reason: Mapped[str] = mapped_column(Text)
    temperature: Mapped[float | None]
    api_key_id: Mapped[str | None] = mapped_column(Identifier)
    erased_at: Mapped[datetime | None]
    user: Mapped[str | None] = mapped_column(JSON(none_as_null=True))
    version_spans: Mapped[list[Any]]
    sampling: Mapped[dict[str, Any]]
    request_metadata: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    messages: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))
    text: Mapped[str | None] = mapped_column(JSON(none_as_null=True))
    token_ids: Mapped[npt.NDArray[np.int32] | None]
    loss_mask: Mapped[npt.NDArray[np.uint8] | None]
    behaviour_logprobs: Mapped[npt.NDArray[np.float32] | None]


class TrajectoryStatusRow(Base):
    """One step in the life of a trajectory."""

    __tablename__ = "trajectory_statuses"
    __table_args__ = (Index(None, "trajectory_id", "id"),)

    id: Mapped[int] = mapped_column(RowNumber, primary_key=True)
    trajectory_id: Mapped[str] = mapped_column(ForeignKey("trajectories.id"))
    status: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str | None] = mapped_column(Text)
    at: Mapped[datetime]


class FeedbackRow(Base):
    """One judgement as it came in. `sequence` is the order of arrival, which no clock can disturb."""

    __tablename__ = "feedback"
    __table_args__ = (
        UniqueConstraint("id"),
        UniqueConstraint("idempotency_scope", "idempotency_key"),
        Index(None, "trajectory_id", "sequence"),
        Index(None, "api_key_id"),
    )

    sequence: Mapped[int] = mapped_column(RowNumber, primary_key=True)
    id: Mapped[str] = mapped_column(Identifier)
    trajectory_id: Mapped[str] = mapped_column(ForeignKey("trajectories.id"))
    episode_id: Mapped[str | None] = mapped_column(Text)
    kind: Mapped[str] = mapped_column(String(32))
    reward: Mapped[float | None]
    content: Mapped[dict[str, Any]]
    source: Mapped[str] = mapped_column(Text)
    source_kind: Mapped[str] = mapped_column(String(32))
    weight: Mapped[float]
    turn: Mapped[int | None]
    idempotency_key: Mapped[str | None] = mapped_column(Text)
    idempotency_scope: Mapped[str] = mapped_column(Identifier)
    content_digest: Mapped[str] = mapped_column(String(64))
    api_key_id: Mapped[str | None] = mapped_column(Identifier)
    created_at: Mapped[datetime]


class FeedbackStatusRow(Base):
    """One step in the life of a feedback; `step` is the learner update that consumed it."""

    __tablename__ = "feedback_statuses"
    __table_args__ = (Index(None, "feedback_id", "id"), Index(None, "step"))

    id: Mapped[int] = mapped_column(RowNumber, primary_key=True)
    feedback_id: Mapped[str] = mapped_column(ForeignKey("feedback.id"))
    status: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str | None] = mapped_column(Text)
    at: Mapped[datetime]
    step: Mapped[int | None] = mapped_column(ForeignKey("learning_steps.step"))


class TrainingQueueRow(Base):
    """A trajectory that can still be trained. Its lock orders everything that happens to the trajectory.

    reward and ready_at are NULL until somebody judged it. While lease_owner is set the learner holds it, and reward
    and feedback_ids are what the learner was given.
    """

    __tablename__ = "training_queue"
    __table_args__ = (
        Index(None, "ready_at", "trajectory_id"),
        Index(None, "lease_owner"),
        Index(None, "created_at"),
    )

    trajectory_id: Mapped[str] = mapped_column(ForeignKey("trajectories.id"), primary_key=True)
    created_at: Mapped[datetime]
    reward: Mapped[float | None]
    feedback_ids: Mapped[list[Any]]
    aggregation: Mapped[str | None] = mapped_column(String(32))
    ready_at: Mapped[datetime | None]
    lease_owner: Mapped[str | None] = mapped_column(Text)
    lease_expires_at: Mapped[datetime | None]


class PolicyRow(Base):
    """One policy version."""

    __tablename__ = "policies"

    version: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    parent_version: Mapped[int | None] = mapped_column(ForeignKey("policies.version"))
    path: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime]
    event: Mapped[str | None] = mapped_column(Text)
    metrics: Mapped[dict[str, Any]]


class PolicyStatusRow(Base):
    """One step in the life of a policy."""

    __tablename__ = "policy_statuses"
    __table_args__ = (Index(None, "version", "id"), Index(None, "status", "id"))

    id: Mapped[int] = mapped_column(RowNumber, primary_key=True)
    version: Mapped[int] = mapped_column(ForeignKey("policies.version"))
    status: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str | None] = mapped_column(Text)
    at: Mapped[datetime]


class LearningStepRow(Base):
    """One learner update."""

    __tablename__ = "learning_steps"
    __table_args__ = (UniqueConstraint("version"),)

    step: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    version: Mapped[int | None] = mapped_column(ForeignKey("policies.version"))
    parent_version: Mapped[int] = mapped_column(ForeignKey("policies.version"))
    kind: Mapped[str] = mapped_column(String(32))
    started_at: Mapped[datetime]
    finished_at: Mapped[datetime]
    event: Mapped[str | None] = mapped_column(Text)
    metrics: Mapped[dict[str, Any]]


class StepTrajectoryRow(Base):
    """A trajectory that a step consumed, with the reward it was trained on. pass_index counts repeated training."""

    __tablename__ = "step_trajectories"
    __table_args__ = (Index(None, "step"),)

    trajectory_id: Mapped[str] = mapped_column(ForeignKey("trajectories.id"), primary_key=True)
    pass_index: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    step: Mapped[int] = mapped_column(ForeignKey("learning_steps.step"))
    reward: Mapped[float]
    feedback_ids: Mapped[list[Any]]
    policy_values: Mapped[npt.NDArray[np.float32] | None]
    advantages: Mapped[npt.NDArray[np.float32] | None]


class WorkerRow(Base):
    """The process that plays a role, its lease, and a restart that somebody asked for."""

    __tablename__ = "workers"

    role: Mapped[str] = mapped_column(String(32), primary_key=True)
    owner: Mapped[str] = mapped_column(Text)
    heartbeat_at: Mapped[datetime]
    lease_expires_at: Mapped[datetime]
    state: Mapped[dict[str, Any]]
    restart_requested: Mapped[str | None] = mapped_column(Text)
