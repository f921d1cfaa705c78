"""What is read equals what was written."""

from __future__ import annotations

import itertools
import json
from datetime import UTC, datetime, timedelta, timezone

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from sqlalchemy.dialects import sqlite

from store import trajectories
from store.columns import Float32Array, Int32Array, UtcDateTime, dump_json
from store.database import Database
from store.types import Trajectory, VersionSpan
from tests.store.records import make_trajectory

lengths = st.integers(0, 40)
offsets = st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
times = st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=offsets)
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@st.composite
def any_trajectory(draw: st.DrawFn) -> Trajectory:
    """A trajectory that keeps the invariant: any mask, any log-probabilities, several versions."""
    mask = draw(st_numpy.arrays(np.uint8, lengths, elements=st.integers(0, 1)))
    num_generated = int(mask.sum())
    cuts = sorted({0, num_generated, *draw(st.lists(st.integers(0, num_generated), max_size=3))})
    spans = [VersionSpan(index, start, end) for index, (start, end) in enumerate(itertools.pairwise(cuts))]
    finite = st.floats(-(2.0**99), 0, width=32)
    return make_trajectory(
        created_at=draw(times),
        token_ids=draw(st_numpy.arrays(np.int32, len(mask))),
        loss_mask=mask,
        behaviour_logprobs=draw(st_numpy.arrays(np.float32, num_generated, elements=finite)),
        version_spans=tuple(spans),
        temperature=draw(st.floats(0.01, 100)),
        messages=[{"role": "user", "content": draw(words)}],
        text=draw(words),
        user=draw(st.none() | words),
        metadata={draw(words): draw(words)},
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trajectory=any_trajectory())
def test_trajectory_round_trip_is_exact(database: Database, trajectory: Trajectory) -> None:
    database.write(lambda session: trajectories.insert(session, trajectory))
    stored = database.read(lambda session: trajectories.get(session, trajectory.id))
    assert stored is not None
    for name in ("token_ids", "loss_mask", "behaviour_logprobs"):
        before, after = getattr(trajectory, name), getattr(stored, name)
        assert after.dtype == before.dtype
        assert after.tobytes() == before.tobytes()
    for name in ("created_at", "version_spans", "temperature", "messages", "text", "user", "metadata"):
        assert getattr(stored, name) == getattr(trajectory, name)
    assert stored.created_at.tzinfo is UTC


def test_array_bytes_are_little_endian() -> None:
    big_endian = np.array([1, -2], dtype=">i4")
    assert Int32Array().process_bind_param(big_endian.astype("i4"), sqlite.dialect()) == b"\x01\0\0\0\xfe\xff\xff\xff"
    assert Int32Array().process_bind_param(big_endian, sqlite.dialect()) == b"\x01\0\0\0\xfe\xff\xff\xff"


@pytest.mark.parametrize("array", [np.array([1.0]), np.array([1], dtype=np.int64), np.array([1], dtype=np.int16)])
def test_array_column_refuses_another_dtype(array: np.ndarray) -> None:
    with pytest.raises(TypeError, match="cannot be stored as float32"):
        Float32Array().process_bind_param(array, sqlite.dialect())


def test_array_column_refuses_two_dimensions() -> None:
    with pytest.raises(ValueError, match="2 dimensions"):
        Float32Array().process_bind_param(np.zeros((2, 2), dtype=np.float32), sqlite.dialect())


def test_naive_time_is_refused() -> None:
    with pytest.raises(ValueError, match="no timezone"):
        UtcDateTime().process_bind_param(datetime(2026, 1, 1), sqlite.dialect())


def test_time_in_another_zone_is_stored_as_utc() -> None:
    tokyo = datetime(2026, 1, 1, 9, tzinfo=timezone(timedelta(hours=9)))
    assert UtcDateTime().process_bind_param(tokyo, sqlite.dialect()) == datetime(2026, 1, 1)


def test_dump_json_turns_undefined_numbers_into_null() -> None:
    metrics = {"explained_variance": float("nan"), "norms": [1.5, float("inf"), -float("inf")], "count": 3}
    assert json.loads(dump_json(metrics)) == {"explained_variance": None, "norms": [1.5, None, None], "count": 3}
