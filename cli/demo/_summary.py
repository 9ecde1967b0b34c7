"""What the run showed, in a few lines."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadbox.cli.demo._observe import Observer
from loadbox.cli.demo._reports import PhaseReport
from loadbox.cli.demo._view import seconds

__all__ = ["print_summary", "summary"]

_SLOW = 1.2
_LATE_S = 0.01


def print_summary(console: Console, observer: Observer) -> None:
    """Print the summary."""
    console.print(summary(observer), highlight=False)


def summary(observer: Observer) -> RenderableType:
    """The replays side by side, then what the mailboxes cost."""
    phases = observer.frontend.phases if observer.frontend else []
    lines = [Text(line) for line in _lines(observer, phases)]
    return Group(Text("The same arrivals under each policy:", "bold"), _table(phases), *lines)


def _table(phases: list[PhaseReport]) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for name in ("requests", "served", "lost", "TTFT p50", "TTFT p99"):
        table.add_column(name, justify="right", no_wrap=True)
    for phase in phases:
        table.add_row(
            phase.policy,
            str(phase.total),
            str(phase.served),
            str(phase.lost),
            seconds(phase.ttft_p50),
            seconds(phase.ttft_p99),
        )
    return table


def _lines(observer: Observer, phases: list[PhaseReport]) -> Iterator[str]:
    engines = list(observer.engines.values())
    publishes = sum(engine.publishes for engine in engines)
    costs = [engine.publish_ns for engine in engines if engine.publish_ns is not None]
    cost = f", {median(costs):,.0f} ns each" if costs else ""
    yield f"Publishes: {publishes:,} in {sum(engine.iterations for engine in engines):,} iterations{cost}."
    frontend = observer.frontend
    if frontend and frontend.read_ns is not None:
        yield f"Reads of all ranks: {frontend.reads:,}, {frontend.read_ns:,.0f} ns each."
    yield "These costs are medians, measured in the ranks and the frontend as they wake up."
    yield "Times to first token are in the trace's time and count from the arrival."
    yield from _exceptions(observer, phases)


def _exceptions(observer: Observer, phases: list[PhaseReport]) -> Iterator[str]:
    engines = list(observer.engines.values())
    for phase in phases:
        if not phase.done and phase.sent:
            yield f"{phase.policy}: stopped after {phase.sent} of {phase.total} requests."
        if phase.refused:
            yield f"{phase.policy}: {phase.refused} requests were refused: they are larger than a rank's whole KV cache."
        if phase.unanswered:
            yield f"{phase.policy}: {phase.unanswered} requests were not answered."
    errors = sum(engine.publish_errors for engine in engines)
    if errors:
        yield f"Publishing failed {errors} times; the ranks served on."
    modelled = sum(engine.modelled_s for engine in engines)
    slowness = sum(engine.spent_s for engine in engines) / modelled if modelled else 1.0
    late = observer.frontend.late_p99_s if observer.frontend else None
    if slowness > _SLOW or (late or 0.0) > _LATE_S:
        yield (
            f"This machine was too busy for this speed-up: iterations took {slowness:.2f} times as long as modelled, and "
            f"dispatches were up to {seconds(late)} late (p99). The times above have that in them; a smaller --speed-up is truer."
        )
