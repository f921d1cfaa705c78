"""Who plays the roles that only one process may play (`engine`, `learner`).

Invariant guarded here: while a lease lives, nobody else gets the role; taking it is one statement, so two processes
that start at the same moment cannot both succeed.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from store.errors import LeaseLostError
from store.models import WorkerRow
from store.types import JsonObject, WorkerRecord

NOBODY = ""
"""Owner of a role that no process has taken yet."""


def acquire(session: Session, role: str, owner: str, lease_seconds: float, now: datetime) -> bool:
    """Take the role until `now + lease_seconds`. False while another owner's lease lives.

    A restart that somebody asked for stays asked for.
    """
    values = {
        "owner": owner,
        "heartbeat_at": now,
        "lease_expires_at": now + timedelta(seconds=lease_seconds),
        "state": {},
    }
    statement = _insert(session).values(role=role, **values)
    taken = session.scalar(
        statement.on_conflict_do_update(
            index_elements=["role"],
            set_=values,
            where=or_(WorkerRow.lease_expires_at <= now, WorkerRow.owner == owner),
        ).returning(WorkerRow.role)
    )
    return taken is not None


def heartbeat(session: Session, role: str, owner: str, state: JsonObject, lease_seconds: float, now: datetime) -> None:
    """Show a sign of life and what the process does. Raises LeaseLostError if another process has the role now."""
    kept = session.scalar(
        update(WorkerRow)
        .where(WorkerRow.role == role, WorkerRow.owner == owner)
        .values(heartbeat_at=now, lease_expires_at=now + timedelta(seconds=lease_seconds), state=state)
        .returning(WorkerRow.role)
    )
    if kept is None:
        raise LeaseLostError(f"{owner} no longer holds the role {role}")


def get(session: Session, role: str) -> WorkerRecord | None:
    """Who has or last had the role, or None if nobody ever took it."""
    row = session.scalar(select(WorkerRow).where(WorkerRow.role == role).execution_options(populate_existing=True))
    if row is None or row.owner == NOBODY:
        return None
    return WorkerRecord(
        role=row.role,
        owner=row.owner,
        heartbeat_at=row.heartbeat_at,
        lease_expires_at=row.lease_expires_at,
        state=row.state,
        restart_requested=row.restart_requested,
    )


def request_restart(session: Session, role: str, reason: str, now: datetime) -> None:
    """Ask the process that has the role to restart what it runs. It may be asked before anybody has the role."""
    nobody = {"owner": NOBODY, "heartbeat_at": now, "lease_expires_at": now, "state": {}}
    statement = _insert(session).values(role=role, restart_requested=reason, **nobody)
    session.execute(statement.on_conflict_do_update(index_elements=["role"], set_={"restart_requested": reason}))


def take_restart_request(session: Session, role: str) -> str | None:
    """Why a restart was asked for, or None. Each request is handed out once."""
    row = session.scalar(
        select(WorkerRow).where(WorkerRow.role == role).with_for_update().execution_options(populate_existing=True)
    )
    if row is None:
        return None
    reason, row.restart_requested = row.restart_requested, None
    session.flush()
    return reason


def release(session: Session, role: str, owner: str) -> None:
    """Give the role back at once. Does nothing if `owner` does not have it."""
    session.execute(
        update(WorkerRow)
        .where(WorkerRow.role == role, WorkerRow.owner == owner)
        # The last heartbeat is in the past by any clock, so the next process need not wait.
        .values(lease_expires_at=WorkerRow.heartbeat_at)
    )


def _insert(session: Session) -> Any:
    # The databases spell "on conflict" alike; SQLAlchemy has it once per dialect.
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    return insert(WorkerRow)
