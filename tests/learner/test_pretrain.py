"""Value pretraining: what can be predicted is, what cannot is known by its mean, and nothing is used up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from learner import pretrain, sao
from learner.advantages import terminal_rewards
from learner.collate import Sample, collate
from learner.loop import Learner
from learner.models import load_policy
from learner.pretrain import (
    PATIENCE_EPOCHS,
    HeldOutScore,
    TooFewTrajectoriesError,
    held_out_score,
    pretrain_critic,
)
from learner.sao import SaoState
from learner.scored import policy_identity, pretrained_directory
from store import feedback, queue
from store.database import Database
from store.settings import CriticSettings, LearnerSettings, Settings
from store.types import TrajectoryStatus
from tests.learner.publishers import CheckingPublisher
from tests.learner.rollouts import make_samples, store_judged
from tests.learner.test_loop import statuses
from tests.store.records import make_submission

CRITIC = {"warmup_updates": 3, "num_layers": 2, "learning_rate": 5e-3}


@pytest.fixture
def make_state(tiny_model_dir: Path) -> Callable[..., SaoState]:
    def make(**changes: Any) -> SaoState:
        critic = CriticSettings(**(CRITIC | changes))
        return SaoState(tiny_model_dir, LearnerSettings(critic=critic, autocast_bfloat16=False))

    return make


def predictable(count: int, seed: int = 0) -> list[Sample]:
    """Rewards that the first token decides."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(count):
        ids_T = torch.randint(3, 300, (9,), generator=generator)
        ids_T[0] = 5 if torch.rand((), generator=generator) < 0.5 else 6
        rewards_G = terminal_rewards(4, float(ids_T[0] == 5))
        samples.append(Sample(ids_T, torch.arange(5, 9), torch.zeros(4), rewards_G, 1.0))
    return samples


def rewarded(samples: list[Sample], rewards: list[float]) -> list[Sample]:
    return [
        replace(sample, rewards_G=terminal_rewards(4, reward)) for sample, reward in zip(samples, rewards, strict=True)
    ]


def shuffled(samples: list[Sample]) -> list[Sample]:
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(3)).tolist()
    return [replace(sample, rewards_G=samples[index].rewards_G) for sample, index in zip(samples, order, strict=True)]


def weights(module: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def same(module: Any, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in module.named_parameters())


def test_predictable_returns_are_predicted_on_trajectories_it_was_not_shown(make_state: Any) -> None:
    state = make_state()
    policy = weights(state.policy)
    epochs: list[tuple[int, HeldOutScore]] = []
    report = pretrain_critic(state, predictable(300), lambda epoch, score: epochs.append((epoch, score)))
    assert (report.num_trained, report.num_held_out) == (240, 60)
    assert report.before.explained_variance == pytest.approx(0.0)
    assert report.after.explained_variance is not None
    assert report.after.explained_variance > 0.8
    assert report.after in [score for _, score in epochs]
    assert [epoch for epoch, _ in epochs] == list(range(1, report.num_epochs + 1))
    assert state.critic_pretrained
    fresh = held_out_score(state, predictable(60, seed=9)).explained_variance
    assert fresh is not None
    assert fresh > 0.8
    assert same(state.policy, policy)
    assert state.num_updates == 0


def test_returns_that_nothing_predicts_are_not_predicted(make_state: Any) -> None:
    """The control: the same trajectories, their rewards shuffled between them."""
    state = make_state()
    report = pretrain_critic(state, shuffled(predictable(100)))
    assert report.after.explained_variance is not None
    assert report.after.explained_variance < 0.2
    assert report.num_epochs < state.settings.critic.pretrain_max_epochs


def test_mean_of_returns_that_nothing_predicts_is_learned(make_state: Any) -> None:
    """The explained variance is 0 with the mean as without; the value loss is what a baseline is for."""
    state = make_state()
    generator = torch.Generator().manual_seed(1)
    rewards = (torch.rand(200, generator=generator) < 0.8).float().tolist()
    report = pretrain_critic(state, rewarded(predictable(200), rewards))
    assert state.critic_pretrained
    assert report.before.value_loss == pytest.approx(0.4, abs=0.1)
    assert report.after.value_loss < 0.13  # the variance of such rewards is 0.16, so the mean alone has 0.08


def test_equal_returns_are_learned_though_they_explain_nothing(make_state: Any) -> None:
    state = make_state()
    report = pretrain_critic(state, rewarded(predictable(60), [1.0] * 60))
    assert report.before == HeldOutScore(pytest.approx(0.5), None)
    assert report.after.value_loss < 0.05
    assert report.after.explained_variance is None


def test_score_is_that_of_a_loop_over_tokens(make_state: Any) -> None:
    state = make_state()
    samples = make_samples(3, 7)
    with torch.no_grad():
        state.critic.head.weight.normal_(0, 0.3)
    errors, returns = [], []
    for sample, values_G in zip(
        samples, sao.values_of(state.critic, collate(samples, 64), samples, state.settings), strict=True
    ):
        for value in values_G.tolist():
            errors.append(sample.total_reward - value)
            returns.append(sample.total_reward)
    score = held_out_score(state, samples)
    assert score.value_loss == pytest.approx(sum(error**2 for error in errors) / (2 * len(errors)), rel=1e-4)
    assert score.explained_variance == pytest.approx(
        1 - statistics.pvariance(errors) / statistics.pvariance(returns), rel=1e-3
    )


def test_best_epoch_is_kept_not_the_last(make_state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state()
    seen: list[dict[str, torch.Tensor]] = []
    scores = iter([HeldOutScore(loss, None) for loss in (0.9, 0.5, 0.3, 0.4, 0.6, 0.1)])

    def scripted(state: SaoState, samples: list[Sample]) -> HeldOutScore:
        seen.append(weights(state.critic))
        return next(scores)

    monkeypatch.setattr(pretrain, "held_out_score", scripted)
    report = pretrain_critic(state, predictable(40))
    assert report.num_epochs == 2 + PATIENCE_EPOCHS
    assert report.after.value_loss == 0.3
    assert same(state.critic, seen[2])
    assert not same(state.critic, seen[-1])


def test_told_to_stop_it_ends_within_a_step_and_keeps_the_best(make_state: Any) -> None:
    state = make_state()
    asked: list[dict[str, torch.Tensor]] = []

    def should_stop() -> bool:
        asked.append(weights(state.critic))
        return len(asked) == 6  # 80 trajectories are five batches of 16, so this is before the second epoch's first

    report = pretrain_critic(state, predictable(100), should_stop=should_stop)
    assert (report.num_epochs, len(asked)) == (1, 6)
    assert same(state.critic, asked[5])
    assert state.critic_pretrained
    at_once = make_state()
    before = weights(at_once.critic)
    assert pretrain_critic(at_once, predictable(100), should_stop=lambda: True).num_epochs == 0
    assert same(at_once.critic, before)
    assert not at_once.critic_pretrained


def test_pretrained_critic_needs_no_warm_up_and_resumes_as_pretrained(make_state: Any, tiny_model_dir: Path) -> None:
    batch = make_samples(0, 4, load_policy(tiny_model_dir))
    cold, warm, resumed = make_state(), make_state(), make_state()
    assert sao.update(cold, batch).kind == "critic_warmup"
    pretrain_critic(warm, predictable(40))
    sao.load_state_dict(resumed, sao.state_dict(warm))
    assert sao.update(warm, batch).kind == "policy"
    assert sao.update(resumed, batch).kind == "policy"


def test_too_few_trajectories_are_counted(make_state: Any) -> None:
    with pytest.raises(TooFewTrajectoriesError, match="there are 7 scored trajectories"):
        pretrain_critic(make_state(), predictable(7))


def test_written_critic_is_taken_up_by_its_own_start_alone(make_state: Any, tmp_path: Path) -> None:
    state = make_state()
    pretrain_critic(state, predictable(60))
    pretrain.write(tmp_path / "critic", state, "me")
    taken = make_state()
    assert pretrain.load(tmp_path / "critic", taken, "me") is None
    assert same(taken.critic, weights(state.critic))
    assert taken.critic_pretrained
    other = make_state()
    assert "another starting policy" in str(pretrain.load(tmp_path / "critic", other, "you"))
    other.settings = other.settings.model_copy(update={"gamma": 0.9})
    assert "at learner.gamma 1.0, not 0.9" in str(pretrain.load(tmp_path / "critic", other, "me"))
    shallow = make_state(num_layers=1)
    assert "other learner.critic settings" in str(pretrain.load(tmp_path / "critic", shallow, "me"))
    (tmp_path / "critic" / pretrain.FILE).write_bytes(b"torn")
    assert "torn" in str(pretrain.load(tmp_path / "critic", other, "me"))
    assert not other.critic_pretrained
    assert not shallow.critic_pretrained


def with_critic(settings: Settings, **changes: Any) -> Settings:
    critic = settings.learner.critic.model_copy(update=changes)
    return settings.model_copy(update={"learner": settings.learner.model_copy(update={"critic": critic})})


def run_one_batch(settings: Settings, database: Database) -> tuple[Learner, list[str]]:
    """A learner through its loop until it has made one update; and the states it told."""
    told: list[str] = []
    learner = Learner(
        settings,
        database,
        CheckingPublisher(),
        "me",
        lambda: learner.state.num_updates > 0,
        lambda state: told.append(str(state.get("state"))),
    )
    learner.run()
    return learner, told


def test_learner_does_not_pretrain_on_too_few(settings: Settings, database: Database, tiny_model_dir: Path) -> None:
    store_judged(database, load_policy(tiny_model_dir), seed=0, count=24)
    few, told = run_one_batch(with_critic(settings, pretrain_min_trajectories=25), database)
    assert not any("pretraining" in state for state in told)
    assert not few.state.critic_pretrained


def test_learner_pretrains_before_its_first_update_and_uses_nothing_up(
    settings: Settings, database: Database, tiny_model_dir: Path
) -> None:
    ids = store_judged(database, load_policy(tiny_model_dir), seed=0, count=24)
    _, told = run_one_batch(with_critic(settings, pretrain_min_trajectories=24), database)
    assert "pretraining the critic, epoch 1" in told
    assert told.index("pretraining the critic") < told.index("training critic")
    found = statuses(database, ids)
    assert found.count(TrajectoryStatus.TRAINED) == 4
    assert found.count(TrajectoryStatus.READY) == 20


def test_what_is_judged_during_pretraining_counts_and_leases_are_fresh_after_it(
    settings: Settings, database: Database, tiny_model_dir: Path
) -> None:
    ids = store_judged(database, load_policy(tiny_model_dir), seed=0, count=24)
    lease_seconds = 0.4

    def judge_again(state: dict[str, Any]) -> None:
        if state["state"] == "pretraining the critic":
            submission = make_submission(ids[0], -1.0)
            database.write(lambda session: feedback.submit(session, submission, "priority"))
            time.sleep(2 * lease_seconds)

    settings = with_critic(settings, pretrain_min_trajectories=24)
    settings = settings.model_copy(
        update={"learner": settings.learner.model_copy(update={"lease_seconds": lease_seconds})}
    )
    batch = Learner(settings, database, CheckingPublisher(), "me", lambda: False, judge_again).claim_batch()
    assert database.read(lambda session: queue.stats(session, datetime.now(UTC))).num_leased == 4
    assert batch is not None
    assert {each.trajectory.id: each.reward for each in batch.judged}[ids[0]] == -1.0


def test_learner_that_dies_or_is_stopped_while_pretraining_has_claimed_nothing(
    settings: Settings, database: Database, tiny_model_dir: Path
) -> None:
    store_judged(database, load_policy(tiny_model_dir), seed=0, count=24)
    settings = with_critic(settings, pretrain_min_trajectories=24)

    def die(state: dict[str, Any]) -> None:
        if state["state"] == "pretraining the critic, epoch 1":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Learner(settings, database, CheckingPublisher(), "me", lambda: False, die).claim_batch()
    told: list[str] = []
    learner = Learner(
        settings,
        database,
        CheckingPublisher(),
        "me",
        lambda: "pretraining the critic" in told,
        lambda state: told.append(state["state"]),
    )
    learner.run()
    assert learner.state.num_updates == 0
    assert not any("epoch" in state for state in told)
    stats = database.read(lambda session: queue.stats(session, datetime.now(UTC)))
    assert (stats.num_ready, stats.num_leased) == (24, 0)


def test_learner_goes_on_when_too_few_can_be_pretrained_on(
    settings: Settings, database: Database, tiny_model_dir: Path
) -> None:
    store_judged(database, load_policy(tiny_model_dir), seed=0, count=8)
    learner, _ = run_one_batch(with_critic(settings, pretrain_min_trajectories=8), database)
    assert learner.state.num_updates == 1
    assert not learner.state.critic_pretrained


def test_learner_starts_with_the_critic_that_was_written_for_it(
    settings: Settings, database: Database, make_state: Any
) -> None:
    start = Path(settings.data_dir) / "policies" / "v000000"
    state = SaoState(start, settings.learner)
    pretrain_critic(state, predictable(60))
    pretrain.write(pretrained_directory(settings), state, policy_identity(start))
    learner = Learner(settings, database, CheckingPublisher(), "me", lambda: True)
    assert learner.state.critic_pretrained
    assert same(learner.state.critic, weights(state.critic))
