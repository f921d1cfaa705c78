"""Ids of everything that is stored: UUIDv7 strings, so that sorting by id is sorting by time of creation."""

from __future__ import annotations

import uuid_utils


def new_id() -> str:
    """A fresh UUIDv7 in its 36-character form; within one process each is greater than the one before."""
    return str(uuid_utils.uuid7())
