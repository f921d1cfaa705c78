"""From the runs' CSVs to one table and one figure per suite.

Intervals are 95% t intervals over seeds, so with three seeds they are wide, and meant to be read as that.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.sao.variants import SUITES

WINDOW = 20
"""Updates in a moving mean."""
COLLAPSED_BELOW = 0.5
"""A run has collapsed if its last updates earn less than this share of its best window."""
T_97_5 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""97.5% quantiles of Student's t by degrees of freedom."""

Curve = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean over seeds and half the width of its 95% interval (None with a single seed)."""

    mean: float
    half_width: float | None

    def __str__(self) -> str:
        if math.isnan(self.mean):
            return "-"
        return f"{self.mean:.2f}" if self.half_width is None else f"{self.mean:.2f}±{self.half_width:.2f}"


def interval(values: Sequence[float]) -> Interval:
    """Over seeds; not-a-number entries are left out, and all of them give not-a-number."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return Interval(math.nan, None)
    if len(known) == 1:
        return Interval(known[0], None)
    error = float(np.std(known, ddof=1)) / math.sqrt(len(known))
    return Interval(float(np.mean(known)), T_97_5[min(len(known) - 1, 9)] * error)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run in numbers; each is defined where it is computed in `summarise`."""

    final_reward: float
    best_reward: float
    worst_drop: float
    updates_to_80: float
    kept_fraction: float
    explained_variance: float
    critic_grad_norm: float
    entropy: float

    @property
    def collapsed(self) -> bool:
        return self.final_reward < COLLAPSED_BELOW * self.best_reward


def read_run(path: Path) -> dict[str, Curve]:
    """Columns of a run's CSV as arrays; what was not reported is not-a-number."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in rows[0] if name != "kind"]
    return {name: np.array([float(row[name]) if row[name] else math.nan for row in rows]) for name in names}


def moving_mean(values: Curve, window: int = WINDOW) -> Curve:
    """Mean of each full window."""
    window = min(window, len(values))
    return np.convolve(values, np.ones(window) / window, mode="valid")


def summarise(run: dict[str, Curve]) -> RunSummary:
    """What a run came to."""
    smooth = moving_mean(run["reward"])
    success = moving_mean(run["success"], 5)
    reached = np.flatnonzero(success >= 0.8)
    last = slice(-max(WINDOW, len(run["reward"]) // 5), None)
    return RunSummary(
        final_reward=float(run["reward"][last].mean()),
        best_reward=float(smooth.max()),
        worst_drop=float((np.maximum.accumulate(smooth) - smooth).max()),
        updates_to_80=float(reached[0]) if len(reached) else math.nan,
        kept_fraction=_mean(run["kept_fraction"]),
        explained_variance=_mean(run["explained_variance"][last]),
        critic_grad_norm=float(np.nanmedian(run["critic_grad_norm"])) if _known(run["critic_grad_norm"]) else math.nan,
        entropy=_mean(run["entropy"][last]),
    )


def _known(values: Curve) -> bool:
    return bool((~np.isnan(values)).any())


def _mean(values: Curve) -> float:
    return float(np.nanmean(values)) if _known(values) else math.nan


Key = tuple[str, int]
"""Variant and staleness."""


def read_suite(directory: Path) -> dict[Key, list[dict[str, Curve]]]:
    """Every finished run of a suite by variant and staleness, seeds in order."""
    runs: dict[Key, list[dict[str, Curve]]] = defaultdict(list)
    for path in sorted(directory.glob("*.csv")):
        variant, staleness, _ = path.stem.rsplit("_", 2)
        runs[variant, int(staleness.removeprefix("s"))].append(read_run(path))
    return dict(runs)


def table(name: str, runs: dict[Key, list[dict[str, Curve]]]) -> list[dict[str, str]]:
    """One row per variant and staleness, in the suite's order."""
    order = {variant: index for index, variant in enumerate(SUITES[name].variants)}
    rows = []
    for (variant, staleness), seeds in sorted(runs.items(), key=lambda item: (item[0][1], order[item[0][0]])):
        summaries = [summarise(run) for run in seeds]
        reached = [summary.updates_to_80 for summary in summaries if not math.isnan(summary.updates_to_80)]
        row = {
            "suite": name,
            "variant": variant,
            "staleness": str(staleness),
            "seeds": str(len(seeds)),
            "updates": str(len(seeds[0]["reward"])),
        }
        for field in asdict(summaries[0]):
            if field != "updates_to_80":
                row[field] = str(interval([getattr(summary, field) for summary in summaries]))
        row["updates_to_80"] = f"{np.median(reached):.0f}" if reached else "never"
        row["reached_80"] = f"{len(reached)}/{len(seeds)}"
        row["collapsed"] = f"{sum(summary.collapsed for summary in summaries)}/{len(seeds)}"
        rows.append(row)
    return rows


def write_table(rows: Sequence[dict[str, str]], path: Path) -> None:
    """As CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def plot(name: str, runs: dict[Key, list[dict[str, Curve]]], path: Path) -> None:
    """Reward, kept fraction, explained variance and entropy over updates: mean of the seeds, band from min to max."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels = (
        ("reward", "reward (batch mean)"),
        ("kept_fraction", "kept fraction"),
        ("explained_variance", "explained variance"),
        ("entropy", "entropy (nats/token)"),
    )
    all_staleness = sorted({staleness for _, staleness in runs})
    order = {variant: index for index, variant in enumerate(SUITES[name].variants)}
    figure, axes = plt.subplots(
        len(all_staleness), len(panels), figsize=(4.4 * len(panels), 3.2 * len(all_staleness)), squeeze=False
    )
    for row, staleness in enumerate(all_staleness):
        for column, (field, label) in enumerate(panels):
            axis = axes[row][column]
            for variant in sorted((v for v, s in runs if s == staleness), key=order.__getitem__):
                curves = [moving_mean(run[field]) for run in runs[variant, staleness] if _known(run[field])]
                if not curves:
                    continue
                length = min(map(len, curves))
                stacked = np.stack([curve[:length] for curve in curves])
                updates = np.arange(length) + WINDOW
                colour = f"C{order[variant] % 10}"
                axis.plot(updates, stacked.mean(0), label=variant, color=colour, linewidth=1.4)
                axis.fill_between(updates, stacked.min(0), stacked.max(0), color=colour, alpha=0.13, linewidth=0)
            axis.set_title(f"{label}, staleness {staleness}", fontsize=10)
            axis.set_xlabel("update")
            axis.grid(alpha=0.25)
            if field in ("reward", "kept_fraction"):
                axis.set_ylim(-0.02, 1.04)
            if field == "explained_variance":
                axis.set_ylim(-1.0, 1.04)
    axes[0][0].legend(fontsize=8)
    figure.suptitle(f"{SUITES[name].question}  (moving mean over {WINDOW} updates, band: all seeds)", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
