"""`tideline bench`: the benchmarks, each a program of its own under `benchmarks/` that this process becomes.

The app package never imports the learner, and the benchmarks do.
"""

from __future__ import annotations

import os
import sys

import typer

group = typer.Typer(no_args_is_help=True)


@group.command(
    "sao",
    # Its own options and help are the program's.
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def sao(context: typer.Context) -> None:
    """Compare SAO with its baselines and ablations on small models, in process, over several seeds."""
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.sao", *context.args])
