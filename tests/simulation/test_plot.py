"""The record becomes a CSV that can be read back, and a picture."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.image import imread

from reward_models.style import STYLES
from simulation.plot import plot_adaptation, read_csv, write_csv
from simulation.run import Row


def evaluation(version: int, phase: int, preferred: str, share: float) -> Row:
    rest = (1 - share) / len(STYLES)
    shares = dict.fromkeys((*STYLES, "none"), rest) | {preferred: share}
    return Row("evaluation", version, phase, preferred, 10.0 * version, shares, share * 0.9)


ROWS = [
    *(evaluation(version, 0, "cute", min(1.0, 0.3 + 0.1 * version)) for version in range(0, 12, 2)),
    Row("switch", 11, 1, "chuunibyou", 110.0),
    evaluation(11, 1, "chuunibyou", 0.0),
    Row("return_to_start", 12, 1, "chuunibyou", 120.0),
    *(evaluation(version, 1, "chuunibyou", 0.08 * (version - 11)) for version in range(13, 24, 2)),
]


def test_write_csv_is_read_back_the_same(tmp_path: Path) -> None:
    write_csv(ROWS, tmp_path / "adaptation.csv")
    again = read_csv(tmp_path / "adaptation.csv")
    assert [(row.kind, row.version, row.phase, row.preferred) for row in again] == [
        (row.kind, row.version, row.phase, row.preferred) for row in ROWS
    ]
    for row, original in zip(again, ROWS, strict=True):
        assert (row.shares is None) == (original.shares is None)
        if row.shares is not None:
            assert row.shares == pytest.approx(original.shares, abs=1e-4)
            assert row.reward == pytest.approx(original.reward, abs=1e-4)


def test_plot_adaptation_draws_lines_and_marks_events(tmp_path: Path) -> None:
    plot_adaptation(ROWS, tmp_path / "with.png")
    plot_adaptation([row for row in ROWS if row.kind == "evaluation"], tmp_path / "without.png")
    image, without = imread(tmp_path / "with.png"), imread(tmp_path / "without.png")
    assert image.shape[0] > 500
    assert image.shape[1] > 1000
    assert image.shape != without.shape or (image != without).any(), "the events are not drawn"


def test_plot_adaptation_refuses_a_record_without_measurements(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no evaluation"):
        plot_adaptation([Row("switch", 1, 0, "cute", 0.0)], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
