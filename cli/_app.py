"""The commands and their options."""

from __future__ import annotations

from importlib import metadata

import click

from loadbox.cli._clean import clean
from loadbox.cli.demo._command import demo

__all__ = ["app"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(metadata.version("loadbox"), "--version", "-V", message="loadbox %(version)s")
def app() -> None:
    """The true load of every data-parallel rank of an LLM server, at once and for almost nothing.

    \b
    loadbox demo     see it work: four ranks, a public request trace, a live table
    loadbox clean    remove the mailboxes that killed schedulers left in /dev/shm
    """


for command in (demo, clean):
    app.add_command(command)
