"""``docs/commands.md`` has every command, option and metric."""

from __future__ import annotations

import re
from pathlib import Path

import click
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from loadbox.cli._app import app
from loadbox.cli.export._collector import RankCollector
from loadbox.mailbox import MailboxWriter
from loadbox.reader import LoadReader

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "commands.md").read_text()


def test_commands_and_options() -> None:
    for name, command in app.commands.items():
        assert f"## loadbox {name}\n" in PAGE
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden and name != "demo":
                assert f"`{max(parameter.opts, key=len)}" in PAGE, f"{name} {parameter.opts}"


def test_metrics(group: str) -> None:
    listed = re.findall(r"^\| `(loadbox_\w+)` \| ([^|]*) \|", PAGE, re.MULTILINE)
    registry, collector = CollectorRegistry(), RankCollector([group])
    registry.register(collector)
    with MailboxWriter(group, 0, 1) as writer, LoadReader(group, 1):
        writer.publish(7, 2, 30, 60)
        families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    collector.close()
    exported = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    assert {name: set(labels.split(", ")) for name, labels in listed} == exported
