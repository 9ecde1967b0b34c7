"""The command ``loadbox clean``."""

from __future__ import annotations

import click

from loadbox.cli._params import to_groups
from loadbox.mailbox import _names, _segment

__all__ = ["clean"]


@click.command()
@click.option("--group", "groups", multiple=True, callback=to_groups, help="Only this DP group's; may be given several times.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
def clean(groups: tuple[str, ...], dry_run: bool) -> None:
    """Remove the mailboxes and dispatch boards that killed schedulers and frontends left in /dev/shm.

    What a living process owns stays, whatever its age; so does everything that is not loadbox's own.  Leftovers do no harm:
    readers call such ranks DEAD, the next scheduler of the rank adopts its mailbox, and the next frontend of the group removes
    the boards of dead ones.

    \b
    loadbox clean --dry-run             what would go, and why the rest stays
    loadbox clean                       all that nobody owns
    loadbox clean --group llama-0       of one DP group
    """
    names = [name for name in _names.list_names() if not groups or name.split(".")[1] in groups]
    removed = 0
    for name in names:
        kept = _segment.clean(name, dry_run=dry_run)
        removed += kept is None
        click.echo(f"kept     {name}: {kept}" if kept else f"{'would remove' if dry_run else 'removed'} {name}")
    click.echo(f"{removed} {'to be removed' if dry_run else 'removed'}, {len(names) - removed} kept.")
