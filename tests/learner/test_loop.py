"""The loop on a real database and real files; only the engine is a fake."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.inference.protocol import EngineUnavailableError, SwapError
from learner import checkpoint, loop
from learner.files import CheckpointWriteError
from learner.loop import Learner
from learner.scored import NothingToServeError
from store import feedback, policies, queue, steps, trajectories, workers
from store.database import Database
from store.errors import LeaseLostError
from store.settings import Settings
from store.types import FeedbackStatus, PolicyStatus, TrajectoryStatus, VersionSpan
from tests.learner.publishers import CheckingPublisher
from tests.learner.rollouts import make_trajectory, store_judged

OWNER = "learner-under-test"


@pytest.fixture
def make_learner(settings: Settings, database: Database) -> Callable[..., Learner]:
    def make(publisher: CheckingPublisher | None = None, owner: str = OWNER, **changes: Any) -> Learner:
        learner_settings = settings.learner.model_copy(update=changes)
        return Learner(
            settings.model_copy(update={"learner": learner_settings}),
            database,
            publisher or CheckingPublisher(),
            owner,
            should_stop=lambda: False,
        )

    return make


def one_step(learner: Learner) -> None:
    batch = learner.claim_batch()
    assert batch is not None
    learner.step(batch)


def statuses(database: Database, ids: list[str]) -> list[TrajectoryStatus]:
    found = [database.read(lambda session, id=each: trajectories.status(session, id)) for each in ids]
    return [each[0] for each in found if each is not None]


def reason(database: Database, trajectory_id: str) -> str:
    found = database.read(lambda session: trajectories.status(session, trajectory_id))
    assert found is not None
    return str(found[1])


def test_step_trains_records_publishes_and_activates(
    make_learner: Callable[..., Learner], database: Database, settings: Settings
) -> None:
    publisher = CheckingPublisher()
    learner = make_learner(publisher)
    ids = store_judged(database, learner.state.policy, seed=0, count=4)
    one_step(learner)
    active = database.read(policies.active)
    step = database.read(steps.latest)
    assert active is not None
    assert step is not None
    assert (active.version, active.parent_version, step.version, step.kind) == (1, 0, 1, "policy")
    assert publisher.versions == [1]
    assert statuses(database, ids) == [TrajectoryStatus.TRAINED] * 4
    assert sorted(database.read(lambda session: steps.trajectory_ids(session, 1))) == sorted(ids)
    assert Path(active.path, "model.safetensors").is_file()
    assert step.metrics["num_trajectories"] == 4
    assert step.metrics["staleness_max_versions"] == 0
    assert {"critic_seconds", "policy_seconds", "checkpoint_seconds", "queue_age_mean_seconds"} <= set(step.metrics)
    assert learner.version == 1


def test_number_of_updates_is_the_version(make_learner: Callable[..., Learner], database: Database) -> None:
    learner = make_learner()
    for seed in range(3):
        store_judged(database, learner.state.policy, seed, 4, version=learner.version)
        one_step(learner)
    assert learner.version == database.read(steps.count) == 3


def test_critic_warm_up_makes_no_version(make_learner: Callable[..., Learner], database: Database) -> None:
    critic = make_learner().settings.learner.critic.model_copy(update={"warmup_updates": 1})
    learner = make_learner(critic=critic)
    for seed in range(2):
        store_judged(database, learner.state.policy, seed, 4)
        one_step(learner)
    recorded = database.read(lambda session: steps.since(session, 0))
    assert [(step.kind, step.version) for step in recorded] == [("critic_warmup", None), ("policy", 1)]


def test_batch_waits_for_its_size_or_for_the_oldest(make_learner: Callable[..., Learner], database: Database) -> None:
    learner = make_learner()
    store_judged(database, learner.state.policy, seed=0, count=3)
    assert learner.claim_batch() is None
    impatient = make_learner(max_wait_seconds=1e-6)
    batch = impatient.claim_batch()
    assert batch is not None
    assert len(batch.samples) == 3
    database.write(lambda session: queue.release(session, OWNER))
    assert make_learner(max_wait_seconds=1e-6, min_batch_size=4).claim_batch() is None
    assert make_learner(max_wait_seconds=1e-6, enabled=False).claim_batch() is None


def test_trajectory_without_feedback_is_never_trained(make_learner: Callable[..., Learner], database: Database) -> None:
    learner = make_learner(batch_size=2, max_wait_seconds=1e-6)
    unjudged = make_trajectory(np.random.default_rng(9))
    database.write(lambda session: trajectories.insert(session, unjudged))
    judged = store_judged(database, learner.state.policy, seed=0, count=2)
    one_step(learner)
    assert learner.claim_batch() is None
    assert sorted(database.read(lambda session: steps.trajectory_ids(session, 1))) == sorted(judged)
    assert statuses(database, [unjudged.id]) == [TrajectoryStatus.SAMPLED]


def test_trajectory_that_cannot_be_trained_exactly_is_never_trained(
    make_learner: Callable[..., Learner], database: Database
) -> None:
    """A missing log-probability, and sampling that SAO cannot use, never reach the queue or never leave it trained."""
    learner = make_learner(batch_size=2)
    rng = np.random.default_rng(5)
    missing = make_trajectory(rng)
    values = {name: getattr(missing, name) for name in type(missing).__slots__}
    broken = type(missing)(**(values | {"behaviour_logprobs": missing.behaviour_logprobs[:-1]}))
    truncated = make_trajectory(rng, trainable=False, untrainable_reason="top_p is 0.9")
    for each in (broken, truncated):
        database.write(lambda session, stored=each: trajectories.insert(session, stored))
        submit(database, each.id)
    good = store_judged(database, learner.state.policy, seed=0, count=2)
    one_step(learner)
    assert sorted(database.read(lambda session: steps.trajectory_ids(session, 1))) == sorted(good)
    assert statuses(database, [broken.id, truncated.id]) == [TrajectoryStatus.QUARANTINED, TrajectoryStatus.UNTRAINABLE]


def submit(database: Database, trajectory_id: str) -> None:
    from tests.store.records import make_submission

    database.write(lambda session: feedback.submit(session, make_submission(trajectory_id), "priority"))


def test_stale_trajectories_are_dropped_with_a_reason(make_learner: Callable[..., Learner], database: Database) -> None:
    learner = make_learner(max_staleness_versions=1, batch_size=3, min_batch_size=2)
    learner.version = 5
    stale = store_judged(database, learner.state.policy, seed=0, count=1, version=3)
    fresh = store_judged(database, learner.state.policy, seed=1, count=2, version=4)
    assert learner.claim_batch() is None  # two are left of three, and they have not waited long enough
    assert "stale: sampled by version 3" in reason(database, stale[0])
    assert statuses(database, stale + fresh) == [TrajectoryStatus.DROPPED, *[TrajectoryStatus.READY] * 2]


def test_trajectories_from_before_a_return_to_the_start_are_dropped(
    make_learner: Callable[..., Learner], database: Database
) -> None:
    learner = make_learner()
    learner.version = learner.state.floor_version = 7
    early = store_judged(database, learner.state.policy, seed=0, count=4, version=6)
    assert learner.claim_batch() is None
    assert "before the return to the start in 7" in reason(database, early[0])


def test_trajectory_that_the_trust_region_rejects_is_dropped(
    make_learner: Callable[..., Learner], database: Database
) -> None:
    learner = make_learner(min_kept_fraction=0.5)
    good = store_judged(database, learner.state.policy, seed=0, count=3)
    far = make_trajectory(np.random.default_rng(1))
    values = {name: getattr(far, name) for name in type(far).__slots__}
    far = type(far)(**(values | {"behaviour_logprobs": np.full(far.num_generated, -60, np.float32)}))
    database.write(lambda session: trajectories.insert(session, far))
    submit(database, far.id)
    learner.version = loop.STALE_ENOUGH_TO_CHECK_VERSIONS
    assert learner.claim_batch() is None
    assert "trust region keeps only 0%" in reason(database, far.id)
    assert statuses(database, good) == [TrajectoryStatus.READY] * 3


def test_return_to_the_start_is_a_version_and_an_event(
    make_learner: Callable[..., Learner], database: Database
) -> None:
    learner = make_learner()
    start = {name: value.clone() for name, value in learner.state.policy.state_dict().items()}
    store_judged(database, learner.state.policy, seed=0, count=4)
    one_step(learner)
    for reward in (2.0, 2.0):
        learner.state.drop_detector.observe(reward)
    store_judged(database, learner.state.policy, seed=1, count=4, version=1)
    one_step(learner)
    active = database.read(policies.active)
    step = database.read(steps.latest)
    assert active is not None
    assert step is not None
    assert (active.version, active.event, step.kind, step.event) == (2, *["return_to_start"] * 3)
    assert learner.state.floor_version == 2
    assert all(torch.equal(value, start[name]) for name, value in learner.state.policy.state_dict().items())
    resumed = make_learner()
    assert resumed.state.floor_version == 2


def test_missing_engine_is_waited_for_while_the_policy_stays_staged(
    make_learner: Callable[..., Learner], database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[PolicyStatus | None] = []
    monkeypatch.setattr(loop, "PUBLISH_RETRY_SECONDS", 0.01)
    publisher = CheckingPublisher([EngineUnavailableError("starting"), EngineUnavailableError("starting")])
    learner = make_learner(publisher)
    learner.on_state = lambda state: seen.append(newest_status(database)) if state["state"] == "publishing" else None
    store_judged(database, learner.state.policy, seed=0, count=4)
    one_step(learner)
    assert seen == [PolicyStatus.STAGED] * 3
    assert newest_status(database) is PolicyStatus.ACTIVE


def newest_status(database: Database) -> PolicyStatus | None:
    newest = database.read(policies.newest)
    return None if newest is None else newest.status


@pytest.mark.parametrize("steps_before", [0, 1])
def test_refused_swap_rejects_the_version_and_learning_goes_on_from_the_active_one(
    make_learner: Callable[..., Learner], database: Database, steps_before: int
) -> None:
    publisher = CheckingPublisher()
    learner = make_learner(publisher)
    for seed in range(steps_before):
        store_judged(database, learner.state.policy, seed, 4, version=learner.version)
        one_step(learner)
    before = {name: value.clone() for name, value in learner.state.policy.state_dict().items()}
    publisher.failures = [SwapError("the probe does not match")]
    store_judged(database, learner.state.policy, 7, 4, version=learner.version)
    one_step(learner)
    refused = database.read(lambda session: policies.get(session, steps_before + 1))
    assert refused is not None
    assert refused.status is PolicyStatus.REJECTED
    assert learner.version == steps_before
    assert all(torch.equal(value, before[name]) for name, value in learner.state.policy.state_dict().items())
    assert database.write(lambda session: workers.take_restart_request(session, "engine")) == "the probe does not match"
    store_judged(database, learner.state.policy, 8, 4, version=learner.version)
    one_step(learner)
    assert publisher.versions[-1] == learner.version == steps_before + 2  # no version is used twice
    step = database.read(steps.latest)
    assert step is not None
    assert step.parent_version == steps_before


def test_nothing_is_published_until_the_engine_took_the_restart_request(
    make_learner: Callable[..., Learner], database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "PUBLISH_RETRY_SECONDS", 0.01)
    publisher = CheckingPublisher()
    learner = make_learner(publisher)
    now = datetime.now(UTC)
    database.write(lambda session: workers.acquire(session, "engine", "engine:1", 60, now))
    database.write(lambda session: workers.request_restart(session, "engine", "refused", now))
    polls = 0

    def take_after_three(state: dict[str, Any]) -> None:
        nonlocal polls
        if state["state"] == "publishing":
            polls += 1
            assert publisher.versions == []
            if polls == 3:
                database.write(lambda session: workers.take_restart_request(session, "engine"))

    learner.on_state = take_after_three
    store_judged(database, learner.state.policy, seed=0, count=4)
    one_step(learner)
    assert polls == 3
    assert publisher.versions == [1]


def test_lost_lease_leaves_the_step_unrecorded(make_learner: Callable[..., Learner], database: Database) -> None:
    learner = make_learner()
    ids = store_judged(database, learner.state.policy, seed=0, count=4)
    batch = learner.claim_batch()
    assert batch is not None
    database.write(lambda session: queue.release(session, OWNER))
    with pytest.raises(LeaseLostError):
        learner.step(batch)
    assert database.read(steps.count) == 0
    successor = make_learner(owner="another")
    assert successor.version == 0
    one_step(successor)
    assert statuses(database, ids) == [TrajectoryStatus.TRAINED] * 4


def test_full_disk_stops_before_anything_is_recorded_and_gives_the_leases_back(
    make_learner: Callable[..., Learner], database: Database, settings: Settings
) -> None:
    from tests.learner.test_checkpoint import files_at_most

    learner = make_learner()
    ids = store_judged(database, learner.state.policy, seed=0, count=4)
    with files_at_most(900_000), pytest.raises(CheckpointWriteError, match="what was there is intact"):
        learner.run()
    assert database.read(steps.count) == 0
    assert [path.name for path in settings.policies_dir.iterdir()] == ["v000000"]
    one_step(make_learner(owner="another"))
    assert statuses(database, ids) == [TrajectoryStatus.TRAINED] * 4


def test_retention_keeps_the_start_the_active_its_parent_and_the_newest(
    make_learner: Callable[..., Learner], database: Database, settings: Settings
) -> None:
    learner = make_learner(keep_policies=1, keep_checkpoints=2)
    for seed in range(4):
        store_judged(database, learner.state.policy, seed, 4, version=learner.version)
        one_step(learner)
    names = sorted(path.name for path in settings.policies_dir.iterdir())
    assert names == ["v000000", "v000003", "v000004"]
    assert sorted(path.name for path in learner.checkpoints_dir.iterdir()) == ["s000003", "s000004"]


def test_feedback_of_a_trained_trajectory_says_so(make_learner: Callable[..., Learner], database: Database) -> None:
    learner = make_learner()
    store_judged(database, learner.state.policy, seed=0, count=4)
    batch = learner.claim_batch()
    assert batch is not None
    learner.step(batch)
    for judged in batch.judged:
        life = database.read(lambda session, id=judged.feedback_ids[0]: feedback.get(session, id))
        assert life is not None
        assert (life.status, life.trained_in_version) == (FeedbackStatus.TRAINED, 1)


def test_learner_without_a_policy_says_how_to_get_one(settings: Settings, tmp_path: Path) -> None:
    from store import migrate

    url = f"sqlite:///{tmp_path / 'empty.db'}"
    migrate.upgrade(url)
    database = Database(url)
    with pytest.raises(NothingToServeError, match="tideline serve"):
        Learner(settings, database, CheckingPublisher(), OWNER, lambda: True)
    database.close()


def test_recorded_step_without_its_checkpoint_is_one_sentence(
    make_learner: Callable[..., Learner], database: Database
) -> None:
    learner = make_learner()
    store_judged(database, learner.state.policy, seed=0, count=4)
    one_step(learner)
    checkpoint.prune(learner.checkpoints_dir, [])
    with pytest.raises(checkpoint.CheckpointMissingError, match="of step 1"):
        make_learner()


def test_tokens_of_two_versions_count_as_the_older(make_learner: Callable[..., Learner], database: Database) -> None:
    learner = make_learner(max_staleness_versions=1)
    learner.version = 4
    mixed = make_trajectory(np.random.default_rng(3))
    values = {name: getattr(mixed, name) for name in type(mixed).__slots__}
    total = mixed.num_generated
    spans = (VersionSpan(1, 0, 1), VersionSpan(4, 1, total)) if total > 1 else (VersionSpan(1, 0, 1),)
    mixed = type(mixed)(**(values | {"version_spans": spans}))
    database.write(lambda session: trajectories.insert(session, mixed))
    submit(database, mixed.id)
    store_judged(database, learner.state.policy, seed=0, count=3, version=4)
    assert learner.claim_batch() is None
    assert "sampled by version 1" in reason(database, mixed.id)
