"""The command ``loadbox doctor``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from loadbox.cli.doctor._finding import Finding

__all__ = ["doctor"]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def doctor(as_json: bool) -> None:
    """Check whether mailboxes work here, explain what is wrong, and say what to do.

    Looks at the core, at /dev/shm (there, in memory, writable, room), at clocks, limits and trust, and at what lies in shared
    memory; then another process publishes, this one reads, and sees it die.  Run it as the user, and in the container, of the
    scheduler or of the frontend.

    Exit code: 0 all is fine; 1 it works, with warnings; 2 mailboxes do not work here (or the command line was wrong).

    \b
    loadbox doctor
    loadbox doctor --json | jq '.checks[] | select(.level != "ok")'
    loadbox doctor > /dev/null; test $? -lt 2      # in a start script
    """
    from loadbox.cli._record import to_json
    from loadbox.cli.doctor._finding import Level
    from loadbox.cli.doctor._run import examine_all

    findings = examine_all()
    worst = max(finding.level for finding in findings)
    if as_json:
        checks = [
            {"check": each.check, "level": each.level.name.lower(), "found": each.found, "advice": each.advice or None}
            for each in findings
        ]
        click.echo(to_json({"result": worst.name.lower(), "checks": checks}))
    else:
        _print(findings)
        counts = {level: sum(each.level is level for each in findings) for level in (Level.FAULT, Level.WARNING)}
        words = [f"{number} {level.name.lower()}{'s' if number > 1 else ''}" for level, number in counts.items() if number]
        click.echo(" and ".join(words) + "." if words else "All is fine.")
    sys.exit(int(worst))


def _print(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from loadbox.cli._show import print_trimmed
    from loadbox.cli.doctor._finding import Level

    styles = {Level.OK: ("ok", "green"), Level.WARNING: ("warning", "yellow"), Level.FAULT: ("FAULT", "bold red")}
    console = Console() if sys.stdout.isatty() else Console(width=1000)  # a line each, for grep
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for finding in findings:
        table.add_row(Text(*styles[finding.level]), Text(finding.check, "bold"), Text(finding.found))
        if finding.advice:
            table.add_row("", "", Padding(Text(finding.advice, "italic"), (0, 0, 0, 2)))
    print_trimmed(console, table)
