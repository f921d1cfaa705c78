"""Scored trajectories: every good line is read as it was written, every bad one is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from learner.scored import ScoredFileError, read_jsonl

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


def test_only_a_newline_ends_a_jsonl_line(tmp_path: Path) -> None:
    line = json.dumps(GOOD | {"text": "a\u2028b\x85c"}, ensure_ascii=False)
    assert len(read_jsonl(write_lines(tmp_path / "a.jsonl", line, line), 300)) == 2


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
