"""`tideline bench sao`, or `python -m benchmarks.sao`: run suites of runs in parallel, write a table and plots.

Invariant: a finished run is a file at its final name; an interrupted bench goes on with the runs that are missing.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.sao import report
from benchmarks.sao.jobs import jobs_of, run_jobs
from benchmarks.sao.run import TASKS
from benchmarks.sao.variants import SUITES, VARIANTS, Suite

PRINTED = {
    "variant": "variant",
    "staleness": "stale",
    "final_reward": "reward",
    "worst_drop": "drop",
    "updates_to_80": "to 80%",
    "collapsed": "collapsed",
    "kept_fraction": "kept",
    "explained_variance": "EV",
}
"""Columns of the printed table; summary.csv has more."""


def main(
    suite: Annotated[
        list[str] | None, typer.Option(help=f"Which question: {', '.join(SUITES)}. May be repeated; default: all.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory for the table, the plots and a CSV per run.")] = Path(
        "data/bench-sao"
    ),
    data_dir: Annotated[Path, typer.Option(help="Where the models are built once.")] = Path("data"),
    variants: Annotated[str | None, typer.Option(help="Only these variants, separated by commas.")] = None,
    staleness: Annotated[str | None, typer.Option(help="Only these, in versions, separated by commas.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds of each variant, instead of the suite's.", min=1)] = None,
    updates: Annotated[int | None, typer.Option(help="Updates of each run, instead of the suite's.", min=1)] = None,
    workers: Annotated[int, typer.Option(help="Runs at a time; 0: one for each core.", min=0)] = 0,
    list_variants: Annotated[bool, typer.Option("--list", help="Say what there is, and end.")] = False,
) -> None:
    """Compare SAO with its baselines and ablations on small models, in process, over several seeds."""
    console = Console(highlight=False)
    if list_variants:
        describe(console)
        return
    names = suite or list(SUITES)
    chosen = {name: narrowed(name, variants, staleness, seeds, updates) for name in names}
    for task in sorted({each.task for each in chosen.values()}):
        build(task, data_dir, console)
    jobs = [job for name, each in chosen.items() for job in jobs_of(name, each, data_dir, out)]
    try:
        run_jobs([job for job in jobs if not job.path.is_file()], workers or os.cpu_count() or 1, console)
    except KeyboardInterrupt:
        console.print("interrupted: what follows is what is finished; the same command goes on from here")
    tell(names, out, console)


def narrowed(name: str, variants: str | None, staleness: str | None, seeds: int | None, updates: int | None) -> Suite:
    """The suite as the options restrict it. Ends the command with exit code 2 for what does not exist."""
    if name not in SUITES:
        fail(f"suite: there is no {name!r}; there are {', '.join(SUITES)}")
    suite = SUITES[name]
    if variants is not None:
        wanted = tuple(variants.split(","))
        for variant in wanted:
            if variant not in VARIANTS:
                fail(f"variants: there is no {variant!r}; --list names them")
        suite = replace(suite, variants=wanted)
    if staleness is not None:
        if not all(part.isdecimal() for part in staleness.split(",")):
            fail(f"staleness: {staleness!r} is not a list of numbers of versions like 0,4,16")
        suite = replace(suite, staleness=tuple(map(int, staleness.split(","))))
    return replace(suite, num_seeds=seeds or suite.num_seeds, num_updates=updates or suite.num_updates)


def fail(message: str) -> None:
    """End with one sentence on standard error and exit code 2."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"tideline: {message}", style="red", markup=False)
    raise typer.Exit(2)


def describe(console: Console) -> None:
    """Print every suite and variant."""
    for title, rows in (
        ("Suites", [(name, suite.question) for name, suite in SUITES.items()]),
        ("Variants", [(variant.name, variant.meaning) for variant in VARIANTS.values()]),
    ):
        table = Table(title=title, title_justify="left", show_header=False)
        for row in rows:
            table.add_row(*row)
        console.print(table)


def build(task: str, data_dir: Path, console: Console) -> None:
    """Make the task's starting model before the runs need it."""
    with console.status(f"building the {task} model") as status:
        TASKS[task](data_dir, lambda what, done, total: status.update(f"{what} {done}/{total}"))


def tell(names: list[str], out: Path, console: Console) -> None:
    """Print and write the table, draw the plots."""
    rows: list[dict[str, str]] = []
    for name in names:
        runs = report.read_suite(out / "runs" / name)
        if not runs:
            continue
        own = report.table(name, runs)
        title = f"{name} ({own[0]['updates']} updates, {own[0]['seeds']} seeds): {SUITES[name].question}"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for column, header in PRINTED.items():
            table.add_column(header, no_wrap=True, justify="left" if column == "variant" else "right")
        for row in own:
            # Of what is the same in every seed or nearly so, the mean alone; a terminal is 80 columns wide.
            short = {column: row[column].split("±")[0] for column in ("kept_fraction", "explained_variance")}
            short["updates_to_80"] = f"{row['updates_to_80']} ({row['reached_80']})"
            table.add_row(*((row | short)[column] for column in PRINTED))
        console.print(table)
        report.plot(name, runs, out / f"{name}.png")
        rows += own
    if rows:
        report.write_table(rows, out / "summary.csv")
        console.print(f"wrote {out / 'summary.csv'} and a plot for each suite beside it", soft_wrap=True)


cli = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
cli.command()(main)

if __name__ == "__main__":
    cli(prog_name="tideline bench sao")
