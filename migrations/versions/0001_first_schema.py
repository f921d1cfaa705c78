"""The first schema: trajectories, feedback, their status logs, the training queue, policies, steps, workers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "policies",
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("parent_version", sa.Integer(), nullable=True),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("event", sa.Text(), nullable=True),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["parent_version"], ["policies.version"], name="fk_policies_parent_version_policies"),
        sa.PrimaryKeyConstraint("version", name="pk_policies"),
    )
    op.create_table(
        "trajectories",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("episode_id", sa.Text(), nullable=True),
        sa.Column("parent_trajectory_id", sa.String(length=36), nullable=True),
        sa.Column("admitted_version", sa.Integer(), nullable=False),
        sa.Column("oldest_version", sa.Integer(), nullable=False),
        sa.Column("num_generated", sa.Integer(), nullable=False),
        sa.Column("trainable", sa.Boolean(), nullable=False),
        sa.Column("untrainable_reason", sa.Text(), nullable=True),
        sa.Column("finish_reason", sa.Text(), nullable=False),
        sa.Column("temperature", sa.Double(), nullable=True),
        sa.Column("api_key_id", sa.String(length=36), nullable=True),
        sa.Column("erased_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("user", sa.JSON(), nullable=True),
        sa.Column("version_spans", sa.JSON(), nullable=False),
        sa.Column("sampling", sa.JSON(), nullable=False),
        sa.Column("request_metadata", sa.JSON(), nullable=True),
        sa.Column("messages", sa.JSON(), nullable=True),
        sa.Column("text", sa.JSON(), nullable=True),
        sa.Column("token_ids", sa.LargeBinary(), nullable=True),
        sa.Column("loss_mask", sa.LargeBinary(), nullable=True),
        sa.Column("behaviour_logprobs", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(
            ["parent_trajectory_id"], ["trajectories.id"], name="fk_trajectories_parent_trajectory_id_trajectories"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_trajectories"),
    )
    op.create_index("ix_trajectories_created_at_id", "trajectories", ["created_at", "id"])
    op.create_index("ix_trajectories_episode_id_id", "trajectories", ["episode_id", "id"])
    op.create_index("ix_trajectories_oldest_version", "trajectories", ["oldest_version"])
    op.create_index("ix_trajectories_parent_trajectory_id", "trajectories", ["parent_trajectory_id"])
    op.create_table(
        "workers",
        sa.Column("role", sa.String(length=32), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("state", sa.JSON(), nullable=False),
        sa.Column("restart_requested", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("role", name="pk_workers"),
    )
    op.create_table(
        "feedback",
        sa.Column("sequence", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("trajectory_id", sa.String(length=36), nullable=False),
        sa.Column("episode_id", sa.Text(), nullable=True),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("content", sa.JSON(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("source_kind", sa.String(length=32), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("turn", sa.Integer(), nullable=True),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("idempotency_scope", sa.String(length=36), nullable=False),
        sa.Column("content_digest", sa.String(length=64), nullable=False),
        sa.Column("api_key_id", sa.String(length=36), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["trajectory_id"], ["trajectories.id"], name="fk_feedback_trajectory_id_trajectories"),
        sa.PrimaryKeyConstraint("sequence", name="pk_feedback"),
        sa.UniqueConstraint("id", name="uq_feedback_id"),
        sa.UniqueConstraint(
            "idempotency_scope", "idempotency_key", name="uq_feedback_idempotency_scope_idempotency_key"
        ),
    )
    op.create_index("ix_feedback_api_key_id", "feedback", ["api_key_id"])
    op.create_index("ix_feedback_trajectory_id_sequence", "feedback", ["trajectory_id", "sequence"])
    op.create_table(
        "learning_steps",
        sa.Column("step", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("parent_version", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("event", sa.Text(), nullable=True),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["parent_version"], ["policies.version"], name="fk_learning_steps_parent_version_policies"
        ),
        sa.ForeignKeyConstraint(["version"], ["policies.version"], name="fk_learning_steps_version_policies"),
        sa.PrimaryKeyConstraint("step", name="pk_learning_steps"),
        sa.UniqueConstraint("version", name="uq_learning_steps_version"),
    )
    op.create_table(
        "policy_statuses",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["version"], ["policies.version"], name="fk_policy_statuses_version_policies"),
        sa.PrimaryKeyConstraint("id", name="pk_policy_statuses"),
    )
    op.create_index("ix_policy_statuses_status_id", "policy_statuses", ["status", "id"])
    op.create_index("ix_policy_statuses_version_id", "policy_statuses", ["version", "id"])
    op.create_table(
        "training_queue",
        sa.Column("trajectory_id", sa.String(length=36), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("feedback_ids", sa.JSON(), nullable=False),
        sa.Column("aggregation", sa.String(length=32), nullable=True),
        sa.Column("ready_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("lease_owner", sa.Text(), nullable=True),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["trajectory_id"], ["trajectories.id"], name="fk_training_queue_trajectory_id_trajectories"
        ),
        sa.PrimaryKeyConstraint("trajectory_id", name="pk_training_queue"),
    )
    op.create_index("ix_training_queue_created_at", "training_queue", ["created_at"])
    op.create_index("ix_training_queue_lease_owner", "training_queue", ["lease_owner"])
    op.create_index("ix_training_queue_ready_at_trajectory_id", "training_queue", ["ready_at", "trajectory_id"])
    op.create_table(
        "trajectory_statuses",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("trajectory_id", sa.String(length=36), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["trajectory_id"], ["trajectories.id"], name="fk_trajectory_statuses_trajectory_id_trajectories"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_trajectory_statuses"),
    )
    op.create_index("ix_trajectory_statuses_trajectory_id_id", "trajectory_statuses", ["trajectory_id", "id"])
    op.create_table(
        "feedback_statuses",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("feedback_id", sa.String(length=36), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["feedback_id"], ["feedback.id"], name="fk_feedback_statuses_feedback_id_feedback"),
        sa.ForeignKeyConstraint(["step"], ["learning_steps.step"], name="fk_feedback_statuses_step_learning_steps"),
        sa.PrimaryKeyConstraint("id", name="pk_feedback_statuses"),
    )
    op.create_index("ix_feedback_statuses_feedback_id_id", "feedback_statuses", ["feedback_id", "id"])
    op.create_index("ix_feedback_statuses_step", "feedback_statuses", ["step"])
    op.create_table(
        "step_trajectories",
        sa.Column("trajectory_id", sa.String(length=36), nullable=False),
        sa.Column("pass_index", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("reward", sa.Double(), nullable=False),
        sa.Column("feedback_ids", sa.JSON(), nullable=False),
        sa.Column("policy_values", sa.LargeBinary(), nullable=True),
        sa.Column("advantages", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(["step"], ["learning_steps.step"], name="fk_step_trajectories_step_learning_steps"),
        sa.ForeignKeyConstraint(
            ["trajectory_id"], ["trajectories.id"], name="fk_step_trajectories_trajectory_id_trajectories"
        ),
        sa.PrimaryKeyConstraint("trajectory_id", "pass_index", name="pk_step_trajectories"),
    )
    op.create_index("ix_step_trajectories_step", "step_trajectories", ["step"])


def downgrade() -> None:
    op.drop_table("step_trajectories")
    op.drop_table("feedback_statuses")
    op.drop_table("trajectory_statuses")
    op.drop_table("training_queue")
    op.drop_table("policy_statuses")
    op.drop_table("learning_steps")
    op.drop_table("feedback")
    op.drop_table("workers")
    op.drop_table("trajectories")
    op.drop_table("policies")
