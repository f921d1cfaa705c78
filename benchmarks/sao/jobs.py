"""The runs of a suite, several at a time in processes of their own.

Invariant: a run's CSV appears under its final name only when it is complete.
"""

from __future__ import annotations

import csv
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.sao.run import run
from benchmarks.sao.variants import Suite


@dataclass(frozen=True, slots=True)
class Job:
    """One run and where its rows go."""

    data_dir: Path
    task: str
    variant: str
    staleness: int
    seed: int
    num_updates: int
    path: Path


def jobs_of(name: str, suite: Suite, data_dir: Path, out: Path) -> list[Job]:
    """All runs of a suite, one seed of everything before the next."""
    directory = out / "runs" / name
    directory.mkdir(parents=True, exist_ok=True)
    return [
        Job(
            data_dir,
            suite.task,
            variant,
            staleness,
            seed,
            suite.num_updates,
            directory / f"{variant}_s{staleness}_seed{seed}.csv",
        )
        for seed in range(suite.num_seeds)
        for staleness in suite.staleness
        for variant in suite.variants
    ]


def run_jobs(jobs: list[Job], num_workers: int, console: Console) -> None:
    """Run them, `num_workers` at a time, and write each when it is finished."""
    if not jobs:
        return
    context = multiprocessing.get_context("spawn")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        context.Manager() as manager,
        Progress(*columns, TimeRemainingColumn(), console=console) as progress,
        ProcessPoolExecutor(num_workers, mp_context=context) as pool,
    ):
        told: Any = manager.Queue()
        bar = progress.add_task("updates", total=sum(job.num_updates for job in jobs))
        futures = {pool.submit(work, job, told): job for job in jobs}
        num_finished = 0
        try:
            while num_finished < len(jobs):
                time.sleep(0.5)
                while not told.empty():
                    progress.advance(bar, told.get())
                for future in [each for each in futures if each.done()]:
                    job = futures.pop(future)
                    future.result()
                    num_finished += 1
                    progress.console.print(
                        f"{job.path.parent.name}: {job.variant}, staleness {job.staleness}, seed {job.seed} "
                        f"({num_finished} of {len(jobs)} runs)"
                    )
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in pool._processes.values():
                process.terminate()
            raise


def work(job: Job, told: Any) -> None:
    """One run, in a worker process, which ends with the bench."""
    bench = multiprocessing.parent_process()

    def on_update(_: int) -> None:
        if bench is not None and not bench.is_alive():
            os._exit(1)
        told.put(1)

    rows = run(job.data_dir, job.task, job.variant, job.staleness, job.seed, job.num_updates, on_update)
    partial = job.path.with_suffix(".partial")
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row.items()} for row in rows
        )
    partial.rename(job.path)
