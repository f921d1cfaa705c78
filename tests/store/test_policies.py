"""Policy versions only grow, and at most one is active."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from store import policies
from store.database import Database
from store.errors import PolicyStateError, UnknownPolicyError
from store.types import PolicyRecord, PolicyStatus
from tests.store.records import at, make_policy, store_starting_policy


def insert(database: Database, policy: PolicyRecord) -> None:
    database.write(lambda session: policies.insert(session, policy))


def activate(database: Database, version: int, seconds: float) -> None:
    database.write(lambda session: policies.activate(session, version, at(seconds)))


def reject(database: Database, version: int, reason: str = "probe off by 0.3") -> None:
    database.write(lambda session: policies.reject(session, version, reason, at(1)))


def statuses(database: Database) -> dict[int, PolicyStatus]:
    return {policy.version: policy.status for policy in database.read(policies.list_all)}


def test_empty_store_has_no_policy(database: Database) -> None:
    assert database.read(policies.active) is None
    assert database.read(policies.newest) is None
    assert database.read(policies.list_all) == []
    assert database.read(lambda session: policies.get(session, 0)) is None
    assert database.read(policies.next_version) == 0


def test_policy_reads_back_as_inserted(database: Database) -> None:
    store_starting_policy(database)
    policy = make_policy(1, event="return_to_start", metrics={"kl": 0.25})
    insert(database, policy)
    assert database.read(lambda session: policies.get(session, 1)) == policy
    start = database.read(lambda session: policies.get(session, 0))
    assert start is not None
    assert (start.status, start.activated_at, start.parent_version) == (PolicyStatus.ACTIVE, at(0), None)


def test_activate_retires_the_one_before(database: Database) -> None:
    store_starting_policy(database)
    insert(database, make_policy(1))
    assert statuses(database) == {1: PolicyStatus.STAGED, 0: PolicyStatus.ACTIVE}
    activate(database, 1, 5)
    activate(database, 1, 6)
    assert statuses(database) == {1: PolicyStatus.ACTIVE, 0: PolicyStatus.RETIRED}
    active = database.read(policies.active)
    assert active is not None
    assert (active.version, active.activated_at) == (1, at(5))


def test_rejected_policy_is_neither_newest_nor_active_and_its_number_is_used_up(database: Database) -> None:
    store_starting_policy(database)
    insert(database, make_policy(1))
    newest = database.read(policies.newest)
    assert newest is not None
    assert newest.version == 1
    reject(database, 1)
    reject(database, 1, "again")
    newest, active = database.read(policies.newest), database.read(policies.active)
    assert newest is not None
    assert active is not None
    assert (newest.version, active.version) == (0, 0)
    assert database.read(policies.next_version) == 2
    rejected = database.read(lambda session: policies.get(session, 1))
    assert rejected is not None
    assert (rejected.status, rejected.status_reason) == (PolicyStatus.REJECTED, "probe off by 0.3")


def test_status_changes_that_would_serve_the_wrong_policy_are_refused(database: Database) -> None:
    store_starting_policy(database)
    insert(database, make_policy(1))
    insert(database, make_policy(2, parent_version=0))
    reject(database, 1)
    with pytest.raises(PolicyStateError, match="policy 1 is rejected"):
        activate(database, 1, 2)
    activate(database, 2, 3)
    with pytest.raises(PolicyStateError, match="policy 0 is retired"):
        activate(database, 0, 4)
    with pytest.raises(PolicyStateError, match="policy 2 is active"):
        reject(database, 2)
    with pytest.raises(UnknownPolicyError, match="no policy 7"):
        activate(database, 7, 5)
    with pytest.raises(UnknownPolicyError, match="no policy 7"):
        reject(database, 7)
    assert statuses(database) == {2: "active", 1: "rejected", 0: "retired"}


def test_version_number_is_used_once(database: Database) -> None:
    store_starting_policy(database)
    with pytest.raises(PolicyStateError, match="policy 0 exists already"):
        insert(database, make_policy(0, parent_version=None, path="elsewhere"))
    with pytest.raises(PolicyStateError, match="cannot begin its life retired"):
        insert(database, make_policy(1, status=PolicyStatus.RETIRED))
    assert [policy.path for policy in database.read(policies.list_all)] == ["policies/v000000"]


def test_inserting_an_active_policy_retires_the_one_before(database: Database) -> None:
    store_starting_policy(database)
    insert(database, make_policy(1, status=PolicyStatus.ACTIVE, activated_at=at(3)))
    assert statuses(database) == {1: PolicyStatus.ACTIVE, 0: PolicyStatus.RETIRED}


def test_concurrent_activations_leave_one_active(database: Database) -> None:
    store_starting_policy(database)
    for version in range(1, 9):
        insert(database, make_policy(version, parent_version=0))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda version: activate(database, version, version), range(1, 9)))
    assert list(statuses(database).values()).count(PolicyStatus.ACTIVE) == 1
    assert list(statuses(database).values()).count(PolicyStatus.RETIRED) == 8
