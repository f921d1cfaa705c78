"""`python -m simulation.prepare`: prints where the model is, refuses the unreadable in one sentence."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from simulation.prepare import convert_model, main, model_slug, prepare_model
from simulation.servable import ModelSourceError


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "simulation.prepare", *map(str, arguments)], capture_output=True, text=True, timeout=300
    )


def test_prepare_converts_a_local_directory_and_prints_its_path(tiny_model_dir: Path, tmp_path: Path) -> None:
    result = run("--model", tiny_model_dir, "--data-dir", tmp_path)
    assert result.returncode == 0, result.stderr
    path = Path(result.stdout.splitlines()[-1])
    assert path.parent == tmp_path / "models"
    tensors = load_file(path / "model.safetensors")
    assert "lm_head.weight" in tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_convert_model_reuses_a_finished_result_until_the_source_changes(tiny_model_dir: Path, tmp_path: Path) -> None:
    source = shutil.copytree(tiny_model_dir, tmp_path / "source")
    first = convert_model(str(source), tmp_path)
    (first / "marker").touch()
    assert convert_model(str(source), tmp_path) == first
    assert (first / "marker").exists()
    settings = json.loads((source / "config.json").read_text()) | {"rms_norm_eps": 1e-3}
    (source / "config.json").write_text(json.dumps(settings))
    assert convert_model(str(source), tmp_path) == first
    assert not (first / "marker").exists()


@pytest.mark.parametrize("damage", ["missing", "empty", "file", "garbled config", "cut weights", "no template"])
def test_prepare_refuses_the_unreadable_in_one_sentence(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    source = tmp_path / "source"
    if damage == "file":
        source.write_text("a model?")
    elif damage == "empty":
        source.mkdir()
    elif damage != "missing":
        shutil.copytree(tiny_model_dir, source)
    if damage == "garbled config":
        (source / "config.json").write_text("{")
    elif damage == "cut weights":
        weights = (source / "model.safetensors").read_bytes()
        (source / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    elif damage == "no template":
        (source / "chat_template.jinja").unlink()
    code = main(["--model", str(source), "--data-dir", str(tmp_path / "data")])
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    sentence = err.strip().splitlines()[-1]
    assert str(source) in sentence
    assert "Traceback" not in err
    assert not any(path.is_file() for path in (tmp_path / "data").rglob("*"))


def test_prepare_model_names_the_profile_it_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match="giant"):
        prepare_model("giant", tmp_path, warm_start=False)


def test_model_slug_is_a_plain_name_that_tells_directories_apart(tmp_path: Path) -> None:
    (tmp_path / "a" / "Model X").mkdir(parents=True)
    (tmp_path / "b" / "Model X").mkdir(parents=True)
    first, second = (model_slug(str(tmp_path / folder / "Model X")) for folder in "ab")
    assert first != second
    assert first.startswith("model-x-")
    assert model_slug("HuggingFaceTB/SmolLM2-135M-Instruct") == "huggingfacetb-smollm2-135m-instruct"
