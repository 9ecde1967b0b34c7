"""What the run showed, in a few lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadbox.cli._show import seconds
from loadbox.cli.demo._figures import percentile
from loadbox.cli.demo._observe import Observer, Replay

__all__ = ["print_summary", "summary"]

_SLOW = 1.2
_LATE_S = 0.01
_UNEVEN = 1.1


def print_summary(console: Console, observer: Observer) -> None:
    """Print the summary."""
    console.print(summary(observer), highlight=False)


def summary(observer: Observer) -> RenderableType:
    """The replays side by side, then what the mailboxes cost."""
    replays = observer.replays()
    lines = [Text(line) for line in _lines(observer, replays)]
    return Group(Text("The same arrivals with each policy:", "bold"), _table(replays), *lines)


def _table(replays: list[Replay]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for name in ("requests", "served", "lost", "TTFT p50", "p99", "age p50", "p99"):
        table.add_column(name, justify="right", no_wrap=True)
    for replay in replays:
        for name, figures, one_source in replay.rows():
            ages = figures.ages if one_source else []
            table.add_row(
                name,
                str(figures.total),
                str(figures.served),
                str(figures.lost),
                seconds(percentile(figures.ttft, 0.5)),
                seconds(percentile(figures.ttft, 0.99)),
                seconds(percentile(ages, 0.5)) if ages else "",
                seconds(percentile(ages, 0.99)) if ages else "",
            )
    return table


def _lines(observer: Observer, replays: list[Replay]) -> Iterator[str]:
    engines, frontends = list(observer.engines.values()), list(observer.frontends.values())
    publishes = sum(engine.publishes for engine in engines)
    iterations = sum(engine.iterations for engine in engines)
    yield f"Publishes: {publishes:,} in {iterations:,} iterations{_each(engine.publish_ns for engine in engines)}."
    batches, load_only = sum(each.batches for each in frontends), sum(each.load_only for each in frontends)
    yield f"Batches with a load: {batches:,}, {load_only:,} of them with nothing else, as a rank fell idle."
    found = sum(1 for frontend in frontends if frontend.mailboxes)
    yield f"Mailboxes found as the ranks announced them, by name and epoch: by {found} of {len(frontends)} frontends."
    choices = sum(frontend.choices for frontend in frontends)
    yield f"Choices: {choices:,}{_each(frontend.choose_ns for frontend in frontends)}, all ranks looked at."
    yield "These costs are medians, measured in the ranks and the frontends as they wake up; a loop of calls takes much less each."
    yield "TTFT counts from the arrival, the age is that of the loads at a decision; both are in the trace's time."
    yield from _exceptions(observer, replays)


def _each(costs: Iterable[float | None]) -> str:
    known = [cost for cost in costs if cost is not None]
    return f", {median(known):,.0f} ns each" if known else ""


def _exceptions(observer: Observer, replays: list[Replay]) -> Iterator[str]:
    engines, frontends = list(observer.engines.values()), list(observer.frontends.values())
    for replay in replays:
        figures = replay.all
        if figures.sent and not figures.done:
            yield f"{replay.title}: stopped after {figures.sent} of {figures.total} requests."
        if figures.refused:
            yield f"{replay.title}: {figures.refused} requests were refused: they are larger than a rank's whole KV cache."
        if figures.unanswered:
            yield f"{replay.title}: {figures.unanswered} requests were not answered."
    errors = sum(engine.publish_errors for engine in engines)
    if errors:
        yield f"Publishing failed {errors} times; the ranks served on."
    modelled = sum(engine.modelled_s for engine in engines)
    paces = [replay.slowness for replay in replays if replay.slowness]
    if paces and max(paces) > _UNEVEN * min(paces):
        each = " and ".join(f"{pace:.2f}" for pace in paces)
        yield (
            f"Not to be compared: iterations took {each} times as long as modelled in these replays, so this machine was busier "
            "in one than in another. Run it again, or with a smaller --speed-up."
        )
    slowness = sum(engine.spent_s for engine in engines) / modelled if modelled else 1.0
    late = max((frontend.late_p99_s or 0.0 for frontend in frontends), default=0.0)
    if slowness > _SLOW or late > _LATE_S:
        yield (
            f"This machine was too busy for this speed-up: iterations took {slowness:.2f} times as long as modelled, and "
            f"dispatches were up to {seconds(late)} late (p99). The times above have that in them; a smaller --speed-up is truer."
        )
