"""The commands and their options."""

from __future__ import annotations

import os
from importlib import metadata

import click

from loadbox.cli._clean import clean
from loadbox.cli._inspect import inspect
from loadbox.cli._ls import ls
from loadbox.cli._watch import watch
from loadbox.cli.demo._command import demo
from loadbox.cli.doctor._command import doctor
from loadbox.cli.export._command import export
from loadbox.cli.top._command import top

__all__ = ["app"]


class _InOrder(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_InOrder, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(metadata.version("loadbox"), "--version", "-V", message="loadbox %(version)s")
@click.option("--no-color", is_flag=True, help="No colours, as with NO_COLOR=1 in the environment; FORCE_COLOR=1 asks for them.")
def app(no_color: bool) -> None:
    """The true load of every data-parallel rank of an LLM server, at once and for almost nothing.

    \b
    loadbox demo                        for a start
    loadbox top                         what this host's ranks do now
    loadbox doctor                      if something is not as it should be
    loadbox COMMAND --help              more, with examples
    """
    if no_color:
        os.environ["NO_COLOR"] = "1"  # rich looks for it, and so do the processes that a command starts


for command, said in (
    (demo, "See it work: real rank processes, live."),
    (top, "Every group and rank on this host, live."),
    (ls, "The files in /dev/shm, and their states."),
    (inspect, "All about one file, and what is odd about it."),
    (watch, "One rank's load as it changes: CSV, JSON, text."),
    (export, "Prometheus metrics; a dashboard for Grafana."),
    (doctor, "Does it work here, and what to do if not."),
    (clean, "Remove what killed processes left."),
):
    command.short_help = said
    app.add_command(command)
