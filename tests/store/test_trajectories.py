"""Only what can be trained enters the queue; everything is kept as it came."""

from __future__ import annotations

import math

import numpy as np
import pytest

from store import queue, trajectories
from store.database import Database
from store.errors import DuplicateTrajectoryError
from store.types import TrajectoryStatus, VersionSpan
from tests.store.records import at, claim, judge, make_trajectory, store_trajectory


def test_insert_of_a_sound_trajectory_begins_sampled(database: Database) -> None:
    trajectory = make_trajectory()
    status = database.write(lambda session: trajectories.insert(session, trajectory))
    assert status is TrajectoryStatus.SAMPLED
    assert database.read(lambda session: trajectories.status(session, trajectory.id)) == (status, None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"behaviour_logprobs": np.array([-1.0, -1.0], dtype=np.float32)}, "3 generated tokens but 2"),
        ({"behaviour_logprobs": np.array([-1.0, np.nan, -1.0], dtype=np.float32)}, "not finite"),
        ({"loss_mask": np.array([0, 1, 1], dtype=np.uint8)}, "5 token_ids but 3"),
        ({"loss_mask": np.array([0, 0, 1, 1, 7], dtype=np.uint8)}, "other than 0 and 1"),
        ({"version_spans": (VersionSpan(0, 0, 2),)}, "cover 2 of 3"),
        ({"version_spans": ()}, "cover 0 of 3"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
    ],
)
def test_insert_of_a_broken_trajectory_quarantines_it_unrepaired(
    database: Database, changes: dict[str, object], reason: str
) -> None:
    trajectory = make_trajectory(**changes)
    status = database.write(lambda session: trajectories.insert(session, trajectory))
    assert status is TrajectoryStatus.QUARANTINED
    current = database.read(lambda session: trajectories.status(session, trajectory.id))
    assert current is not None
    assert current[0] is TrajectoryStatus.QUARANTINED
    assert reason in (current[1] or "")
    stored = database.read(lambda session: trajectories.get(session, trajectory.id))
    assert stored is not None
    assert not stored.trainable
    assert stored.behaviour_logprobs.tobytes() == trajectory.behaviour_logprobs.tobytes()
    assert stored.loss_mask.tobytes() == trajectory.loss_mask.tobytes()
    assert stored.version_spans == trajectory.version_spans
    judge(database, trajectory.id)
    assert claim(database, "learner") == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"trainable": False, "untrainable_reason": "top_p is 0.9"}, "top_p is 0.9"),
        ({"temperature": 0.0}, "sampled at temperature 0"),
        (
            {
                "loss_mask": np.zeros(5, dtype=np.uint8),
                "behaviour_logprobs": np.zeros(0, dtype=np.float32),
                "version_spans": (),
            },
            "no token was generated",
        ),
    ],
)
def test_insert_of_what_cannot_be_trained_says_why(database: Database, changes: dict[str, object], reason: str) -> None:
    trajectory_id = store_trajectory(database, **changes)
    status = database.read(lambda session: trajectories.status(session, trajectory_id))
    assert status == (TrajectoryStatus.UNTRAINABLE, reason)
    judge(database, trajectory_id)
    assert claim(database, "learner") == []


def test_insert_refuses_a_known_id_and_keeps_the_first(database: Database) -> None:
    trajectory = make_trajectory(text="first")
    database.write(lambda session: trajectories.insert(session, trajectory))
    again = make_trajectory(id=trajectory.id, text="second")
    with pytest.raises(DuplicateTrajectoryError, match=trajectory.id):
        database.write(lambda session: trajectories.insert(session, again))
    stored = database.read(lambda session: trajectories.get(session, trajectory.id))
    assert stored is not None
    assert stored.text == "first"


def test_nul_characters_survive(database: Database) -> None:
    message = {"role": "user", "content": "a\0b \ud83c"}
    trajectory_id = store_trajectory(database, text="c\0d", messages=[message], user="e\0f", metadata={"g": "\0"})
    stored = database.read(lambda session: trajectories.get(session, trajectory_id))
    assert stored is not None
    assert (stored.text, stored.messages, stored.user, stored.metadata) == ("c\0d", [message], "e\0f", {"g": "\0"})


def test_unknown_trajectory_is_none(database: Database) -> None:
    assert database.read(lambda session: trajectories.get(session, "nobody")) is None
    assert database.read(lambda session: trajectories.status(session, "nobody")) is None
    assert database.read(lambda session: trajectories.newest_of_episode(session, "nobody")) is None


def test_expire_unjudged_takes_only_the_old_without_a_reward(database: Database) -> None:
    old = store_trajectory(database, created_at=at(0))
    commented = store_trajectory(database, created_at=at(1))
    judged = store_trajectory(database, created_at=at(2))
    young = store_trajectory(database, created_at=at(100))
    judge(database, commented, None)
    judge(database, judged, 0.0)
    assert database.write(lambda session: queue.expire_unjudged(session, at(100), at(200))) == 2
    assert database.write(lambda session: queue.expire_unjudged(session, at(100), at(200))) == 0
    statuses = [
        (database.read(lambda session, each=each: trajectories.status(session, each)) or ("", ""))[0]
        for each in (old, commented, judged, young)
    ]
    assert statuses == ["expired", "expired", "ready", "sampled"]
    assert [each.trajectory.id for each in claim(database, "learner")] == [judged]
