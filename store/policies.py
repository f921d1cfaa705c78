"""Policy versions.

Invariants guarded here: a version number is used once; at most one policy is active, and it is the one that became
active last; a rejected or retired version never becomes active again (going back publishes a version of its own).

    staged -> active -> retired
       +----> rejected
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Select, func, select
from sqlalchemy import insert as sql_insert
from sqlalchemy.orm import Session

from store.errors import PolicyStateError, UnknownPolicyError
from store.models import PolicyRow, PolicyStatusRow
from store.statuses import append_policy_status
from store.types import PolicyRecord, PolicyStatus


def insert(session: Session, policy: PolicyRecord) -> None:
    """Store a policy, staged or at once active.

    Raises PolicyStateError for a version that exists already, or a first status other than these two.
    """
    if policy.status not in (PolicyStatus.STAGED, PolicyStatus.ACTIVE):
        raise PolicyStateError(f"policy {policy.version} cannot begin its life {policy.status.value}")
    if session.get(PolicyRow, policy.version) is not None:
        raise PolicyStateError(f"policy {policy.version} exists already, and no version is used twice")
    values = {
        "version": policy.version,
        "parent_version": policy.parent_version,
        "path": policy.path,
        "created_at": policy.created_at,
        "event": policy.event,
        "metrics": policy.metrics,
    }
    session.execute(sql_insert(PolicyRow), values)
    append_policy_status(session, policy.version, PolicyStatus.STAGED, None, policy.created_at)
    if policy.status is PolicyStatus.ACTIVE:
        activate(session, policy.version, policy.activated_at or policy.created_at)


def get(session: Session, version: int) -> PolicyRecord | None:
    """The policy of this version, or None."""
    return _one(session, _policies().where(PolicyRow.version == version))


def active(session: Session) -> PolicyRecord | None:
    """The policy that serves, or None before the first."""
    last = (
        select(PolicyStatusRow.version)
        .where(PolicyStatusRow.status == PolicyStatus.ACTIVE.value)
        .order_by(PolicyStatusRow.id.desc())
        .limit(1)
        .scalar_subquery()
    )
    policy = _one(session, _policies().where(PolicyRow.version == last))
    return policy if policy is not None and policy.status is PolicyStatus.ACTIVE else None


def newest(session: Session) -> PolicyRecord | None:
    """The greatest version that was not rejected, staged ones included, or None before the first."""
    return _one(session, _policies().where(_status() != PolicyStatus.REJECTED.value).limit(1))


def next_version(session: Session) -> int:
    """One more than the greatest version ever used, rejected ones included; 0 for the first."""
    greatest = session.scalar(select(func.max(PolicyRow.version)))
    return 0 if greatest is None else greatest + 1


def activate(session: Session, version: int, now: datetime) -> None:
    """Make a staged policy the active one and retire the one before. Activating the active policy changes nothing.

    Raises UnknownPolicyError, and PolicyStateError for a policy that was rejected or retired.
    """
    policy = _locked(session, version)
    if policy.status is PolicyStatus.ACTIVE:
        return
    if policy.status is not PolicyStatus.STAGED:
        raise PolicyStateError(f"policy {version} is {policy.status.value}; only a staged policy becomes active")
    before = active(session)
    if before is not None:
        reason = f"policy {version} took over"
        append_policy_status(session, before.version, PolicyStatus.RETIRED, reason, now)
    append_policy_status(session, version, PolicyStatus.ACTIVE, None, now)


def reject(session: Session, version: int, reason: str, now: datetime) -> None:
    """Say that a staged policy will never serve. Rejecting it again changes nothing.

    Raises UnknownPolicyError, and PolicyStateError for a policy that has served.
    """
    policy = _locked(session, version)
    if policy.status is PolicyStatus.REJECTED:
        return
    if policy.status is not PolicyStatus.STAGED:
        raise PolicyStateError(f"policy {version} is {policy.status.value}; only a staged policy can be rejected")
    append_policy_status(session, version, PolicyStatus.REJECTED, reason, now)


def list_all(session: Session) -> list[PolicyRecord]:
    """Every policy, the newest version first."""
    return [_record(row) for row in session.execute(_policies())]


def _locked(session: Session, version: int) -> PolicyRecord:
    """The policy, while no other transaction changes any policy's status."""
    # The first policy's row is the lock of all, so that two activations cannot both see the same one before them.
    session.scalar(select(PolicyRow.version).order_by(PolicyRow.version).limit(1).with_for_update())
    policy = get(session, version)
    if policy is None:
        raise UnknownPolicyError(f"there is no policy {version}")
    return policy


def _status() -> Any:
    return _last_status(PolicyStatusRow.status)


def _last_status(column: Any, *conditions: Any) -> Any:
    return (
        select(column)
        .where(PolicyStatusRow.version == PolicyRow.version, *conditions)
        .order_by(PolicyStatusRow.id.desc())
        .limit(1)
        .correlate(PolicyRow)
        .scalar_subquery()
    )


def _policies() -> Select[Any]:
    became_active = _last_status(PolicyStatusRow.at, PolicyStatusRow.status == PolicyStatus.ACTIVE.value)
    return select(
        PolicyRow,
        _status().label("status"),
        _last_status(PolicyStatusRow.reason).label("reason"),
        became_active.label("activated_at"),
    ).order_by(PolicyRow.version.desc())


def _one(session: Session, query: Select[Any]) -> PolicyRecord | None:
    row = session.execute(query).one_or_none()
    return None if row is None else _record(row)


def _record(row: Any) -> PolicyRecord:
    return PolicyRecord(
        version=row.PolicyRow.version,
        parent_version=row.PolicyRow.parent_version,
        status=PolicyStatus(row.status),
        path=row.PolicyRow.path,
        created_at=row.PolicyRow.created_at,
        activated_at=row.activated_at,
        event=row.PolicyRow.event,
        metrics=row.PolicyRow.metrics,
        status_reason=row.reason,
    )
