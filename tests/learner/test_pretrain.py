"""Value pretraining: what can be predicted is, what cannot is left alone, and nothing is used up."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from learner import pretrain, pretrain_command, sao
from learner.advantages import terminal_rewards
from learner.collate import Sample
from learner.loop import Learner
from learner.models import load_policy
from learner.pretrain import PATIENCE_EPOCHS, TooFewTrajectoriesError, held_out_explained_variance, pretrain_critic
from learner.sao import SaoState
from learner.scored import ScoredFileError, policy_identity, pretrained_directory, read_jsonl, read_store
from store import queue, workers
from store.database import Database
from store.settings import CriticSettings, LearnerSettings, Settings
from store.types import TrajectoryStatus
from tests.learner.publishers import CheckingPublisher
from tests.learner.rollouts import make_samples, store_judged
from tests.learner.test_loop import one_step, statuses

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
    epochs: list[tuple[int, float | None]] = []
    report = pretrain_critic(state, predictable(300), lambda epoch, explained: epochs.append((epoch, explained)))
    assert (report.num_trained, report.num_held_out) == (240, 60)
    assert report.explained_variance_before == pytest.approx(0.0)
    assert report.explained_variance is not None
    assert report.explained_variance > 0.8
    assert [epoch for epoch, _ in epochs] == list(range(1, report.num_epochs + 1))
    assert state.critic_pretrained
    assert held_out_explained_variance(state, predictable(60, seed=9)) > 0.8
    assert same(state.policy, policy)
    assert state.num_updates == 0


def test_returns_that_nothing_predicts_leave_the_critic_as_it_was(make_state: Any) -> None:
    """The control: the same trajectories, their rewards shuffled between them."""
    state = make_state()
    report = pretrain_critic(state, shuffled(predictable(100)))
    assert report.explained_variance is not None
    assert report.explained_variance < 0.2
    assert report.num_epochs < state.settings.critic.pretrain_max_epochs


def test_best_epoch_is_kept_not_the_last(make_state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state()
    seen: list[dict[str, torch.Tensor]] = []
    explained = iter([0.0, 0.3, 0.5, 0.4, 0.2, 0.9])

    def scripted(state: SaoState, samples: list[Sample]) -> float:
        seen.append(weights(state.critic))
        return next(explained)

    monkeypatch.setattr(pretrain, "held_out_explained_variance", scripted)
    report = pretrain_critic(state, predictable(40))
    assert report.num_epochs == 2 + PATIENCE_EPOCHS
    assert report.explained_variance == 0.5
    assert same(state.critic, seen[2])
    assert not same(state.critic, seen[-1])


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
    shallow = make_state(num_layers=1)
    assert "other learner.critic settings" in str(pretrain.load(tmp_path / "critic", shallow, "me"))
    (tmp_path / "critic" / pretrain.FILE).write_bytes(b"torn")
    assert "torn" in str(pretrain.load(tmp_path / "critic", other, "me"))
    assert not other.critic_pretrained
    assert not shallow.critic_pretrained


GOOD = {"token_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "reward": 0.5, "text": "ignored"}


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_jsonl_lines_become_samples(tmp_path: Path) -> None:
    [sample, warm] = read_jsonl(write_lines(tmp_path / "a.jsonl", GOOD, "", GOOD | {"temperature": 0.7}), 300)
    assert sample.token_ids_T.tolist() == [5, 6, 7, 8]
    assert sample.generated_G.tolist() == [2, 3]
    assert sample.rewards_G.tolist() == [0.0, 0.5]
    assert sample.behaviour_logprobs_G.isnan().all(), "a policy could be trained on it"
    assert warm.temperature == 0.7


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Invalid JSON"),
        (GOOD | {"reward": None}, "line 2: reward: "),
        (GOOD | {"reward": float("inf")}, "line 2: "),
        (GOOD | {"loss_mask": [0, 0, 1]}, "line 2: loss_mask has 3 entries for 4 token_ids"),
        (GOOD | {"loss_mask": [0, 0, 2, 1]}, "line 2: loss_mask.2: "),
        (GOOD | {"loss_mask": [0, 0, 0, 0]}, "line 2: loss_mask marks no generated token"),
        (GOOD | {"loss_mask": [1, 0, 0, 0]}, "line 2: loss_mask marks the first token"),
        (GOOD | {"token_ids": [5, 6, 7, 300]}, "line 2: token_ids holds an id beyond the model's 300"),
        ({"reward": 1.0}, "line 2: token_ids: Field required"),
    ],
)
def test_bad_jsonl_line_is_named(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(ScoredFileError) as raised:
        read_jsonl(write_lines(tmp_path / "a.jsonl", GOOD, line), 300)
    assert message in str(raised.value)


def test_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ScoredFileError, match=r"none\.jsonl cannot be read: No such file"):
        read_jsonl(tmp_path / "none.jsonl", 300)


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


@pytest.fixture
def command(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.setenv("TIDELINE_DATA_DIR", str(settings.data_dir))
    monkeypatch.setenv("TIDELINE_LEARNER__CRITIC__NUM_LAYERS", "2")
    monkeypatch.setenv("TIDELINE_LEARNER__NUM_THREADS", "1")
    return lambda *arguments: pretrain_command.main(list(arguments))


def test_command_trains_from_a_file_and_says_what_it_came_to(
    command: Any, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {
            "token_ids": sample.token_ids_T.tolist(),
            "loss_mask": [0] * 5 + [1] * 4,
            "reward": sample.total_reward,
        }
        for sample in predictable(40)
    ]
    assert command("--from", str(write_lines(tmp_path / "scored.jsonl", *lines))) == 0
    shown = capsys.readouterr().out
    assert "held-out explained variance after" in shown
    assert (pretrained_directory(settings) / pretrain.FILE).is_file()


def test_command_reads_the_store_without_claiming(
    command: Any, database: Database, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command() == 2
    assert "there are 0 scored trajectories; pretraining the critic needs at least 20" in capsys.readouterr().err
    ids = store_judged(database, load_policy(tiny_model_dir), seed=0, count=22)
    assert len(read_store(database)) == 22
    assert command() == 0
    assert set(statuses(database, ids)) == {TrajectoryStatus.READY}


def test_command_refuses_once_learning_has_begun_or_may_at_any_time(
    command: Any,
    settings: Settings,
    database: Database,
    tiny_model_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = datetime.now(UTC)
    assert database.write(lambda session: workers.acquire(session, "learner", "another", 60, now))
    assert command() == 1
    assert "a learner is running on this database" in capsys.readouterr().err
    database.write(lambda session: workers.release(session, "learner", "another"))
    store_judged(database, load_policy(tiny_model_dir), seed=0, count=4)
    one_step(Learner(settings, database, CheckingPublisher(), "me", lambda: False))
    assert command() == 1
    assert "1 updates have been made" in capsys.readouterr().err
    assert database.read(lambda session: queue.count_judged_by_version(session, 0)) == 0
