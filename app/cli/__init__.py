"""The `tideline` command.

Each command is a function in a module of its own; here they get their names. Exit codes: 0 well, 1 something is
missing or failed, 2 wrong settings or arguments.
"""

from __future__ import annotations

import typer

from app.cli import bench, config, database, demo, doctor, policies, serve

cli = typer.Typer(
    name="tideline",
    help="A language-model server that learns from live feedback while it serves.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cli.command("serve")(serve.serve)
cli.command("app")(serve.app)
cli.command("engine")(serve.engine)
cli.command("learner")(serve.learner)
cli.command("pretrain-critic")(serve.pretrain_critic)
cli.command("demo")(demo.demo)
cli.command("simulate")(demo.simulate)
cli.command("config")(config.config)
cli.command("doctor")(doctor.doctor)
cli.add_typer(bench.group, name="bench", help="Benchmarks of the algorithm; each prints a table and draws plots.")
cli.add_typer(database.group, name="db", help="The database's migrations.")
cli.add_typer(policies.group, name="policies", help="The versions of the policy.")


def main() -> None:
    """Entry point of the command."""
    cli()
