"""Ids sort by time of creation."""

from __future__ import annotations

import uuid

from store.ids import new_id


def test_new_id_is_a_uuid_of_version_7() -> None:
    assert uuid.UUID(new_id()).version == 7
    assert len(new_id()) == 36


def test_new_ids_are_distinct_and_ascend() -> None:
    ids = [new_id() for _ in range(5_000)]
    assert ids == sorted(set(ids))
