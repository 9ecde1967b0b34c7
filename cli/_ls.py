"""The command ``loadbox ls``."""

from __future__ import annotations

import click

from loadbox.cli._params import explained, to_groups
from loadbox.mailbox import _files, _names

__all__ = ["ls"]


@click.command()
@click.option("--group", "groups", multiple=True, callback=to_groups, help="Only this DP group's; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="As JSON: a list of objects.")
@explained
def ls(groups: tuple[str, ...], as_json: bool) -> None:
    """List the mailboxes and dispatch boards in /dev/shm.

    One line a file: its state, kind, size, mode, user and name.  A rank's states are those that a reader of this user finds; a
    board is LIVE while its frontend lives.  Below the table stands why a file is REFUSED.  Names of loadbox's own only are listed.

    \b
    loadbox ls                          everything
    loadbox ls --group llama-0          one DP group's
    loadbox ls --json | jq -r '.[] | select(.state == "DEAD") | .name'
    loadbox inspect NAME                all about one of them
    """
    import stat

    from loadbox.cli._examine import kind_of_name, state_of
    from loadbox.cli._record import to_json
    from loadbox.cli._show import print_trimmed, state_text, user

    records = []
    for name in _names.list_names():
        found = _files.stat_name(name)
        if found is None or (groups and name.split(".")[1] not in groups):
            continue
        try:
            state, reason = state_of(name)
            kind, of, rank = kind_of_name(name)
        except FileNotFoundError:
            continue
        records.append(
            {
                "name": name,
                "kind": kind,
                "group": of,
                "rank": rank,
                "state": state,
                "reason": reason,
                "size": found.st_size,
                "mode": f"{stat.S_IMODE(found.st_mode):04o}",
                "uid": found.st_uid,
                "user": user(found.st_uid),
            }
        )
    if as_json:
        click.echo(to_json(records))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for heading, right in (("state", False), ("kind", False), ("size", True), ("mode", False), ("owner", False), ("name", False)):
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    for record in records:
        words = (record["kind"], record["size"], record["mode"], record["user"], record["name"])
        table.add_row(state_text(str(record["state"])), *map(str, words))
    if records:
        console = Console(width=1000)
        print_trimmed(console, table)
        for record in records:
            if record["reason"]:
                console.print(Text(f"{record['name']}: {record['reason']}", "red"))
    else:
        of, where = (f" of group {' or '.join(groups)}", "there") if groups else ("", "here")
        click.echo(f"Nothing{of}: no scheduler and no frontend has made anything {where}.", err=True)
