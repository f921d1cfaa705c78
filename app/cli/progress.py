"""What a running simulation shows on the terminal, and the table at its end.

On a terminal a panel is redrawn in place and each measurement leaves a line above it; elsewhere only the lines appear.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from simulation.run import Event, Measured, PhaseStarted, Polled, Row, Simulation, StepTaken

BAR_WIDTH = 30
ADAPTED_SHARE = 0.8
"""A phase counts as followed from the first measurement with this share of the preferred style."""


class SimulationDisplay:
    """Told of a simulation's events; a context manager that owns the live panel."""

    def __init__(self, simulation: Simulation, console: Console) -> None:
        self._simulation = simulation
        self._console = console
        self._began = time.monotonic()
        self._phase: PhaseStarted | None = None
        self._polled: Polled | None = None
        self._row: Row | None = None
        self._steps: list[dict[str, Any]] = []
        self._swap_pauses: dict[int, float] = {}
        # Last: it draws the panel at once.
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._panel, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def on_event(self, event: Event) -> None:
        """Take in what has happened."""
        match event:
            case PhaseStarted():
                self._phase = event
                pool = ", ".join(event.phase.pool)
                self._say(
                    f"phase {event.index + 1} of {event.num_phases}: users now prefer {event.phase.preferred}"
                    f" (offered: {pool})",
                    "bold",
                )
            case Polled():
                self._polled = event
                learner = event.learning["learner"]
                if "swap_pause_seconds" in learner:
                    self._swap_pauses[learner["served_version"]] = learner["swap_pause_seconds"]
            case StepTaken():
                self._steps.append(event.step)
                if event.step.get("event"):
                    self._say(f"version {event.step['version']}: {_words(event.step['event'])}", "bold yellow")
            case Measured():
                self._row = event.row
                self._say(self._measurement(event.row))

    def summary(self, rows: Sequence[Row]) -> RenderableType:
        """The table of the whole run: one line per phase, and the run's figures."""
        table = Table(title="How the policy followed its users")
        for name in ("phase", "preferred", "share at start", "updates to 80%", "best share", "last share", "events"):
            table.add_column(name, justify="left" if name in ("preferred", "events") else "right")
        for index, phase in enumerate(self._simulation.schedule.phases):
            measured = [row for row in rows if row.phase == index and row.shares is not None]
            if not measured:
                continue
            shares = [(row.shares or {}).get(phase.preferred, 0.0) for row in measured]
            adapted = [row.version for row, share in zip(measured, shares, strict=True) if share >= ADAPTED_SHARE]
            events = [
                f"{_words(row.kind)} in version {row.version}"
                for row in rows
                if row.phase == index and row.kind not in ("evaluation", "switch")
            ]
            table.add_row(
                str(index + 1),
                phase.preferred,
                f"{shares[0]:.0%}",
                str(adapted[0] - measured[0].version) if adapted else "not reached",
                f"{max(shares):.0%}",
                f"{shares[-1]:.0%}",
                ", ".join(events) or "-",
            )
        return Group(table, Text(self._figures()))

    def _figures(self) -> str:
        made = [step for step in self._steps if step["version"] is not None]
        version = 0 if self._polled is None else self._polled.version
        parts = [f"{len(made)} policy updates, serving version {version}"]
        if made:
            parts.append(f"median update {statistics.median(step['metrics']['step_seconds'] for step in made):.1f} s")
        if self._swap_pauses:
            parts.append(f"median swap pause {statistics.median(self._swap_pauses.values()):.2f} s")
        judgements = 0 if self._polled is None else self._polled.num_judgements
        return "; ".join([*parts, f"{judgements} answers judged", f"{time.monotonic() - self._began:.0f} s"])

    def _measurement(self, row: Row) -> str:
        shares = row.shares or {}
        told = "  ".join(f"{style} {share:4.0%}" for style, share in shares.items() if share or style == row.preferred)
        return f"version {row.version:3d}  held-out: {told}  reward {row.reward:.2f}"

    def _say(self, line: str, style: str = "") -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        self._console.print(f"{minutes:2d}:{seconds:02d}  {line}", style=style, markup=False, soft_wrap=True)

    def _panel(self) -> RenderableType:
        if self._phase is None or self._polled is None:
            return Text("asking the server how learning goes ...")
        table = Table(box=None, show_header=False, padding=(0, 1))
        shares = {} if self._row is None else self._row.shares or {}
        for style, share in shares.items():
            name = Text(style, style="bold green" if style == self._phase.phase.preferred else "")
            table.add_row(name, Text("█" * round(share * BAR_WIDTH), style="cyan"), f"{share:.0%}")
        return Group(Text(""), table, Text(self._status(self._phase, self._polled), style="dim"))

    def _status(self, phase: PhaseStarted, polled: Polled) -> str:
        learner = polled.learning["learner"]
        reward = "-" if polled.mean_recent_reward is None else f"{polled.mean_recent_reward:.2f}"
        pauses = list(self._swap_pauses.values())
        swap = "-" if not pauses else f"{pauses[-1]:.2f} s"
        return (
            f"phase {phase.index + 1}/{phase.num_phases}, preferred: {phase.phase.preferred} | version {polled.version}"
            f" ({polled.version - phase.version} updates in this phase) | recent reward {reward} |"
            f" queue {polled.num_ready} | learner: {learner['state']} | last swap {swap}"
        )


def _words(name: str) -> str:
    return name.replace("_", " ")
