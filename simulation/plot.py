"""The adaptation record as adaptation.csv and adaptation.png.

Invariant: the picture is drawn from the rows alone, so a stored CSV gives the same picture again.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from reward_models.style import STYLES
from simulation.evaluation import NO_STYLE
from simulation.run import Row

SHARE_COLUMNS = tuple(f"share_{style}" for style in (*STYLES, NO_STYLE))
COLUMNS = ("kind", "version", "phase", "preferred", "elapsed_seconds", *SHARE_COLUMNS, "reward")

# Okabe and Ito's palette, told apart by the colour-blind; markers differ as well, for print in grey.
_LOOKS = {
    "academic": ("#0072B2", "s"),
    "cute": ("#CC79A7", "o"),
    "chuunibyou": ("#000000", "^"),
    "classical": ("#E69F00", "D"),
    NO_STYLE: ("#999999", "x"),
}


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write the record, one line per row; shares and reward are empty on rows that are no evaluation."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for row in rows:
            shares = {f"share_{style}": f"{share:.4f}" for style, share in (row.shares or {}).items()}
            writer.writerow(
                {
                    "kind": row.kind,
                    "version": row.version,
                    "phase": row.phase,
                    "preferred": row.preferred,
                    "elapsed_seconds": f"{row.elapsed_seconds:.1f}",
                    "reward": "" if row.reward is None else f"{row.reward:.4f}",
                    **shares,
                }
            )


def read_csv(path: Path) -> list[Row]:
    """The rows that `write_csv` wrote (rounded). Raises KeyError or ValueError for another kind of file."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Row(
                line["kind"],
                int(line["version"]),
                int(line["phase"]),
                line["preferred"],
                float(line["elapsed_seconds"]),
                {style: float(line[f"share_{style}"]) for style in (*STYLES, NO_STYLE)} if line["reward"] else None,
                float(line["reward"]) if line["reward"] else None,
            )
            for line in csv.DictReader(file)
        ]


def plot_adaptation(rows: Sequence[Row], path: Path, title: str = "What the policy writes on held-out topics") -> None:
    """Draw the share of each style over policy updates, with switches of preference and learner's events marked.

    Raises ValueError when there is no evaluation among `rows`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    measured = [row for row in rows if row.shares is not None]
    if not measured:
        raise ValueError("there is no evaluation to draw")
    # Figure and canvas by hand: pyplot keeps every figure in module state and may pick a window system.
    figure = Figure(figsize=(10, 5.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    versions = [row.version for row in measured]
    for style in (*STYLES, NO_STYLE):
        shares = [100 * (row.shares or {}).get(style, 0.0) for row in measured]
        if max(shares) == 0:
            continue
        colour, marker = _LOOKS[style]
        line = ":" if style == NO_STYLE else "-"
        axes.plot(versions, shares, color=colour, marker=marker, markersize=5, linewidth=2, linestyle=line, label=style)
    axes.plot(
        versions, [100 * (row.reward or 0.0) for row in measured],
        color="#009E73", linewidth=1.5, linestyle="--", label="mean reward x 100",
    )  # fmt: skip
    switches = [row for row in rows if row.kind == "switch"]
    starts = [(versions[0], measured[0].preferred), *((row.version, row.preferred) for row in switches)]
    ends = [*(version for version, _ in starts[1:]), max(versions)]
    for row in switches:
        axes.axvline(row.version, color="#444444", linewidth=1.2)
    for (start, preferred), end in zip(starts, ends, strict=True):
        axes.text((start + end) / 2, 107, f"preferred: {preferred}", ha="center", va="center", fontsize=10)
    events = [row for row in rows if row.kind not in ("evaluation", "switch")]
    for index, name in enumerate(dict.fromkeys(row.kind for row in events)):
        marked = sorted({row.version for row in events if row.kind == name})
        colour = ("#D55E00", "#56B4E9", "#F0E442")[index % 3]
        axes.vlines(marked, 0, 102, color=colour, linewidth=1.5, linestyle=(0, (2, 2)), label=name.replace("_", " "))
    axes.set(xlabel="policy updates", ylabel="share of answers (%)", ylim=(-2, 113), title=title)
    axes.set_yticks(range(0, 101, 20))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    figure.savefig(path)
