"""The command ``loadbox clean``."""

from __future__ import annotations

import click

from loadbox.cli._params import to_group
from loadbox.mailbox import _names, _segment

__all__ = ["clean"]


@click.command()
@click.option("--group", callback=to_group, help="Only this DP group's.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
def clean(group: str | None, dry_run: bool) -> None:
    """Remove the mailboxes and dispatch boards that killed schedulers and frontends left in /dev/shm.

    What a living process owns stays, whatever its age; so does everything that is not loadbox's own.  Leftovers do no harm:
    readers call such ranks DEAD, the next scheduler of the rank adopts its mailbox, and the next frontend of the group removes
    the boards of dead ones.

    \b
    loadbox clean --dry-run             what would go, and why the rest stays
    loadbox clean                       all that nobody owns
    loadbox clean --group llama-0       of one DP group
    """
    names = [name for name in _names.list_names() if group is None or name.split(".")[1] == group]
    removed = 0
    for name in names:
        kept = _segment.clean(name, dry_run=dry_run)
        removed += kept is None
        click.echo(f"kept     {name}: {kept}" if kept else f"{'would remove' if dry_run else 'removed'} {name}")
    click.echo(f"{removed} {'to be removed' if dry_run else 'removed'}, {len(names) - removed} kept.")
