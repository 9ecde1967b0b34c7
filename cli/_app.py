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


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(metadata.version("loadbox"), "--version", "-V", message="loadbox %(version)s")
@click.option("--no-color", is_flag=True, help="No colours, as with NO_COLOR=1 in the environment; FORCE_COLOR=1 asks for them.")
def app(no_color: bool) -> None:
    """The true load of every data-parallel rank of an LLM server, at once and for almost nothing.

    \b
    loadbox demo     see it work: four ranks, a public request trace, a live table
    loadbox top      every group and rank on this host, live
    loadbox ls       the files that they have in /dev/shm, and their states
    loadbox inspect  all about one file, and what is odd about it
    loadbox watch    one rank's load as it changes, for logs and spreadsheets
    loadbox export   the same for Prometheus
    loadbox doctor   whether it works here, and what to do if not
    loadbox clean    remove what killed processes left in /dev/shm
    """
    if no_color:
        os.environ["NO_COLOR"] = "1"  # rich looks for it, and so do the processes that a command starts


for command in (demo, top, ls, inspect, watch, export, doctor, clean):
    app.add_command(command)
