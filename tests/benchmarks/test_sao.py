"""The bench: episodes, rollouts of stale policies, the arithmetic of its table, and the command itself."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from benchmarks.sao import report
from benchmarks.sao.__main__ import cli
from benchmarks.sao.lookup import ANIMALS, END, IDS, NOTHING, WORDS, LookupEpisode, LookupTask, World, played
from benchmarks.sao.rollouts import History, Sampler
from benchmarks.sao.run import silent
from benchmarks.sao.variants import SUITES, VARIANTS, settings_of
from learner.collate import Sample, collate, split_rows
from learner.models import load_policy, target_logprobs


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with the lookup model in it."""
    directory = tmp_path_factory.mktemp("bench")
    LookupTask(directory, silent)
    return directory


@pytest.fixture(scope="session")
def lookup_dir(data_dir: Path) -> Path:
    return data_dir / "models" / "lookup"


def ids(*words: str) -> list[int]:
    return [IDS[word] for word in words]


def right_words(world: World) -> list[list[str]]:
    friend = world.friends[world.asked]
    return [["look", world.asked, END], ["look", friend, END], ["say", world.colours[friend], END]]


def test_perfect_player_is_rewarded_and_each_wrong_word_is_not() -> None:
    def play(*turns: list[str]) -> LookupEpisode:
        episode = LookupEpisode(World(random.Random(5)))
        for turn in turns:
            if episode.observe(ids(*turn), "") is None:
                break
        return episode

    first, second, third = right_words(World(random.Random(5)))
    assert play(first, second, third).reward == 1.0
    world = World(random.Random(5))
    wrong = next(animal for animal in ANIMALS if world.answer != world.colours[animal])
    assert play(first, ["look", wrong, END], ["say", world.colours[wrong], END]).reward == 0.0
    assert play(third, second, third).reward == 0.0
    assert play(first, second).reward == 0.0
    assert play(first, ["look", END], third).reward == 0.0
    assert play(first, second, [*third[:2], "look"]).reward == 0.0


def test_pages_tell_the_fact_and_differ_between_worlds() -> None:
    world = World(random.Random(1))
    friend = world.friends[world.asked]
    page = world.page(world.asked, "friend")
    assert page[:2] == ["page", world.asked]
    assert page[-2:] == ["friend", friend]
    assert friend != world.asked
    assert world.page(friend, "colour")[-2:] == ["colour", world.answer]
    assert all(world.page(other, "friend")[-1] == NOTHING for other in ANIMALS if other != world.asked)
    assert all(world.page(other, "colour")[-1] == NOTHING for other in ANIMALS if other != friend)
    assert len({World(random.Random(seed)).answer for seed in range(40)}) > 4


def test_teacher_is_right_as_often_as_told() -> None:
    rng = random.Random(0)
    never_errs = [played(rng, 1.0) for _ in range(20)]
    for token_ids, mask in never_errs:
        said = [WORDS[token] for token, is_player in zip(token_ids, mask, strict=True) if is_player]
        assert len(said) == 9
        assert said[1] == WORDS[token_ids[1]]
    first_right = sum(ids[1] == ids[3] for ids, _ in (played(rng, 0.4) for _ in range(1000))) / 1000
    assert first_right == pytest.approx(0.4 + 0.6 / 8, abs=0.05)


def test_starting_policy_solves_some_episodes_and_not_many(lookup_dir: Path) -> None:
    episodes = [LookupEpisode(World(random.Random(seed))) for seed in range(400)]
    Sampler(lookup_dir, 128, seed=0).play(episodes, [load_policy(lookup_dir).state_dict()])
    assert 0.1 < sum(episode.reward for episode in episodes) / len(episodes) < 0.3


def rescored(directory: Path, sample: Sample) -> torch.Tensor:
    (batch,) = collate([sample], 10_000)
    return split_rows(target_logprobs(load_policy(directory), batch), batch, [sample])[0]


def test_rollouts_of_many_turns_carry_the_log_probabilities_they_were_sampled_with(lookup_dir: Path) -> None:
    sampler = Sampler(lookup_dir, 128, seed=0)
    weights = load_policy(lookup_dir).state_dict()
    worlds = [World(random.Random(seed)) for seed in range(24)]
    samples = sampler.play([LookupEpisode(world) for world in worlds], [weights], temperature=0.7)
    assert {len(sample.turns) for sample in samples} == {3}
    for sample, world in zip(samples, worlds, strict=True):
        assert sample.token_ids_T[:2].tolist() == ids("ask", world.asked)
        assert all(1 <= turn.stop - turn.start <= 4 for turn in sample.turns)
        assert int(sample.generated_G[-1]) == len(sample.token_ids_T) - 1
        assert sample.rewards_G[:-1].tolist() == [0.0] * (sample.num_generated - 1)
        assert sample.behaviour_logprobs_G.tolist() == pytest.approx(rescored(lookup_dir, sample).tolist(), abs=1e-4)


def test_swap_in_the_middle_changes_who_samples_the_rest(lookup_dir: Path) -> None:
    """The second weights always end a turn at once; the first never do within the turn's first token."""
    ending = {name: value.clone() for name, value in load_policy(lookup_dir).state_dict().items()}
    sampler = Sampler(lookup_dir, 128, seed=0)
    silent_head = {name: torch.zeros_like(value) for name, value in ending.items()}
    episodes = [LookupEpisode(World(random.Random(seed))) for seed in range(8)]
    samples = sampler.play(episodes, [ending, silent_head])
    uniform = -math.log(len(WORDS))
    for sample in samples:
        assert abs(float(sample.behaviour_logprobs_G[0]) - uniform) > 1e-3
        if sample.num_generated > 1:
            assert float(sample.behaviour_logprobs_G[1]) == pytest.approx(uniform, abs=1e-5)
    assert any(sample.num_generated > 1 for sample in samples)


def test_history_goes_back_as_far_as_there_is_one() -> None:
    history = History(4)
    weight = torch.zeros(1)
    for version in range(10):
        weight[0] = version
        history.add({"weight": weight})
        assert float(history.at_staleness(0)["weight"]) == version
        assert float(history.at_staleness(4)["weight"]) == max(0, version - 4)
        assert float(history.at_staleness(2)["weight"]) == max(0, version - 2)


def test_every_variant_of_every_suite_exists_and_is_settings_of_its_own() -> None:
    for suite in SUITES.values():
        assert set(suite.variants) <= set(VARIANTS)
    seen = {
        (settings_of(variant, "style", 0).model_dump_json(), variant.num_pretraining) for variant in VARIANTS.values()
    }
    assert len(seen) == len(VARIANTS)
    assert settings_of(VARIANTS["k1"], "style", 3).critic.learning_rate == pytest.approx(2.5e-3)
    assert settings_of(VARIANTS["bare"], "style", 3).plasticity.return_to_start is False


def test_interval_is_students() -> None:
    found = report.interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(4.303 / math.sqrt(3))
    assert str(report.interval([0.5])) == "0.50"
    assert str(found) == "2.00±2.48"
    assert str(report.interval([math.nan])) == "-"


def test_summary_sees_a_collapse_and_a_drop() -> None:
    reward = np.concatenate([np.linspace(0, 1, 100), np.ones(100), np.full(100, 0.2)])
    columns = ("kept_fraction", "explained_variance", "critic_grad_norm", "entropy")
    run = {"reward": reward, "success": reward, **{name: np.full(300, 0.5) for name in columns}}
    summary = report.summarise(run)
    assert summary.final_reward == pytest.approx(0.2)
    assert summary.best_reward == pytest.approx(1.0)
    assert summary.worst_drop == pytest.approx(0.8)
    assert summary.updates_to_80 == pytest.approx(78, abs=3)
    assert summary.collapsed
    steady = report.summarise(run | {"reward": np.ones(300), "success": np.zeros(300)})
    assert not steady.collapsed
    assert steady.worst_drop == pytest.approx(0.0)
    assert math.isnan(steady.updates_to_80)


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def test_command_runs_a_suite_writes_its_table_and_goes_on_where_it_was(tmp_path: Path, data_dir: Path) -> None:
    arguments = [
        *("--suite", "turns", "--variants", "sao,turn-mean", "--seeds", "1", "--updates", "3"),
        *("--out", str(tmp_path / "out"), "--data-dir", str(data_dir), "--workers", "2"),
    ]
    finished = subprocess.run(
        [sys.executable, "-m", "app.cli", "bench", "sao", *arguments], capture_output=True, text=True, timeout=300
    )
    assert finished.returncode == 0, finished.stderr
    assert "Does leaving observations out of GAE help" in finished.stdout
    lines = (tmp_path / "out" / "summary.csv").read_text().splitlines()
    assert [line.split(",")[:5] for line in lines[1:]] == [
        ["turns", "sao", "1", "1", "3"],
        ["turns", "turn-mean", "1", "1", "3"],
    ]
    assert (tmp_path / "out" / "turns.png").read_bytes().startswith(b"\x89PNG")
    finished_run = tmp_path / "out" / "runs" / "turns" / "sao_s1_seed0.csv"
    before = finished_run.stat().st_mtime_ns
    assert len(finished_run.read_text().splitlines()) == 4
    missing_run = finished_run.with_name("turn-mean_s1_seed0.csv")
    content = missing_run.read_text()
    missing_run.unlink()
    assert bench(*arguments).exit_code == 0
    assert finished_run.stat().st_mtime_ns == before
    assert missing_run.read_text() == content  # the same seed gives the same run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "nonsense"], "suite: there is no 'nonsense'"),
        (["--suite", "turns", "--variants", "nonsense"], "variants: there is no 'nonsense'"),
        (["--suite", "turns", "--staleness", "four"], "staleness: 'four' is not a list"),
    ],
)
def test_command_names_what_does_not_exist(arguments: list[str], message: str) -> None:
    refused = bench(*arguments)
    assert refused.exit_code == 2
    assert message in refused.stderr


def test_list_names_every_suite_and_variant() -> None:
    shown = bench("--list")
    assert shown.exit_code == 0
    assert all(name in shown.stdout for name in [*SUITES, *VARIANTS])
