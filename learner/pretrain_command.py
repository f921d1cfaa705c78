"""`tideline pretrain-critic`, or `python -m learner.pretrain_command`: pretrain the critic before the first update.

Exit codes: 0 written, 1 something stands in the way (a running learner, updates made), 2 nothing usable to train on,
130 interrupted. Unless it is 0, nothing was written.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `python -m learner` does, before torch is imported

import torch
from rich.console import Console
from rich.table import Table

from learner import pretrain, sao, scored
from store import migrate, steps, workers
from store.database import Database
from store.settings import Settings
from store.types import TidelineError

USAGE_ERROR_CODE = 2
INTERRUPTED_CODE = 130


class LearningBegunError(TidelineError, RuntimeError):
    """A pretrained critic is only ever used before the first update."""


class NothingLearnedError(TidelineError, ValueError):
    """A critic that is no better than an untrained one must not spare the learner its warm-up."""


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="tideline pretrain-critic",
        description="Pretrain the critic on scored trajectories of the starting policy.",
    )
    parser.add_argument("--from", dest="file", type=Path, help="a JSONL file; default: what the store holds")
    options = parser.parse_args(arguments)
    settings = Settings()
    torch.set_num_threads(settings.learner.num_threads or os.cpu_count() or 1)
    console = Console(highlight=False, soft_wrap=True)
    try:
        with console.status("reading scored trajectories") as status:
            report, path = run(settings, options.file, lambda text: status.update(text))
    except (scored.ScoredFileError, pretrain.TooFewTrajectoriesError, NothingLearnedError) as error:
        return _fail(str(error), USAGE_ERROR_CODE)
    except TidelineError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return _fail("interrupted, so nothing was written", INTERRUPTED_CODE)
    table = Table(title="Critic pretrained", title_justify="left", show_header=False)
    for name, value in (
        ("trajectories trained on", str(report.num_trained)),
        ("trajectories held out", str(report.num_held_out)),
        ("epochs", f"{report.num_epochs} in {report.seconds:.1f} s"),
        ("held-out value loss before", f"{report.before.value_loss:.4f}"),
        ("held-out value loss after", f"{report.after.value_loss:.4f}"),
        ("held-out explained variance before", _number(report.before.explained_variance)),
        ("held-out explained variance after", _number(report.after.explained_variance)),
    ):
        table.add_row(name, value)
    console.print(table)
    console.print(f"wrote {path}; the next `tideline serve` starts learning with it", markup=False)
    return 0


def run(settings: Settings, file: Path | None, tell: Callable[[str], None]) -> tuple[pretrain.PretrainReport, Path]:
    """Pretrain and write.

    Raises LearningBegunError, ScoredFileError, TooFewTrajectoriesError, NothingLearnedError, CheckpointWriteError and
    the store's errors.
    """
    database = Database(settings.resolved_database_url)
    try:
        migrate.check(settings.resolved_database_url)
        check_nothing_learned(database)
        start = scored.starting_policy(database)
        samples = (
            scored.read_store(database) if file is None else scored.read_jsonl(file, scored.vocabulary_size(start))
        )
    finally:
        database.close()
    tell(f"pretraining the critic on {len(samples)} trajectories")
    state = sao.SaoState(start, settings.learner)
    report = pretrain.pretrain_critic(
        state,
        samples,
        lambda epoch, score: tell(f"epoch {epoch}: held-out explained variance {_number(score.explained_variance)}"),
    )
    if not state.critic_pretrained:
        raise NothingLearnedError(
            f"after {report.num_epochs} epochs over {report.num_trained} trajectories the critic predicts the "
            f"{report.num_held_out} held-out ones no better than an untrained one, so nothing was written"
        )
    return report, pretrain.write(scored.pretrained_directory(settings), state, scored.policy_identity(start))


def check_nothing_learned(database: Database) -> None:
    """Raise LearningBegunError when updates have been made, or a learner runs that could make one at any time."""
    made = database.read(steps.count)
    if made:
        raise LearningBegunError(f"{made} updates have been made; a critic can be pretrained only before the first")
    learner = database.read(lambda session: workers.get(session, "learner"))
    if learner is not None and learner.lease_expires_at > datetime.now(UTC):
        raise LearningBegunError("a learner is running on this database; stop the server first")


def _number(value: float | None) -> str:
    return "undefined (all returns alike)" if value is None else f"{value:+.3f}"


def _fail(message: str, code: int) -> int:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"tideline: {message}", style="red", markup=False)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
