"""Compare ways of choosing a rank by simulation: ``python benchmarks/routing --help``. README.md describes the model."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import click
import report
from policies import POLICIES
from rich.console import Console
from scenarios import Plan, Scenario, full_plan, quick_plan, run

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "routing.json"
PICTURE = ROOT / "docs" / "img" / "routing.svg"


def _restrict(plan: Plan, traces: tuple[str, ...], ranks: tuple[int, ...], frontends: tuple[int, ...]) -> Plan:
    def wanted(one: Scenario) -> bool:
        asked = ((traces, one.trace), (ranks, one.ranks), (frontends, one.frontends))
        return all(not values or value in values for values, value in asked)

    chosen = tuple(filter(wanted, plan.scenarios))
    if not chosen:
        raise click.UsageError("no scenario fits these options: there are 8 and 64 ranks (--quick: 8) and 1, 4 and 16 frontends")
    return dataclasses.replace(plan, scenarios=chosen)


@click.command()
@click.option("--quick", is_flag=True, help="8 ranks, the main policies, shorter runs: under a minute.")
@click.option(
    "--trace", "traces", multiple=True, type=click.Choice(["chat", "code", "mooncake"]), help="Only this trace (repeatable)."
)
@click.option("--ranks", multiple=True, type=int, help="Only this number of ranks (repeatable).")
@click.option("--frontends", multiple=True, type=int, help="Only this number of frontends (repeatable).")
@click.option("--policy", "policies", multiple=True, type=click.Choice(list(POLICIES)), help="Only this policy (repeatable).")
@click.option("--seeds", type=click.IntRange(1), help="How many seeds.")
@click.option("--arrivals", type=click.Choice(["overlaid", "squeezed", "poisson"]), default="overlaid", show_default=True)
@click.option("--utilisation", type=click.FloatRange(0.05, 2.0), default=0.8, show_default=True)
@click.option("--dispatch-ms", type=click.FloatRange(0), default=1.0, show_default=True, help="From the decision to the rank.")
@click.option("--publish-early", is_flag=True, help="Ranks publish before they take in what has arrived, not after scheduling.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write the results there.")
@click.option(
    "--svg", "svg_path", type=click.Path(path_type=Path, dir_okay=False), help="Draw the results there (needs matplotlib)."
)
@click.option("--publish", is_flag=True, help=f"Write {RESULTS.relative_to(ROOT)} and {PICTURE.relative_to(ROOT)}.")
def main(
    quick: bool,
    traces: tuple[str, ...],
    ranks: tuple[int, ...],
    frontends: tuple[int, ...],
    policies: tuple[str, ...],
    seeds: int | None,
    arrivals: str,
    utilisation: float,
    dispatch_ms: float,
    publish_early: bool,
    json_path: Path | None,
    svg_path: Path | None,
    publish: bool,
) -> None:
    """Compare ways of choosing a rank, by simulation of the ranks and with loadbox's own choosers."""
    changes: dict[str, Any] = {
        "arrivals": arrivals,
        "utilisation": utilisation,
        "dispatch_s": dispatch_ms / 1e3,
        "publish_early": publish_early,
    }
    if policies:
        changes["policies"] = policies
    if seeds:
        changes["seeds"] = seeds
    plan = _restrict((quick_plan if quick else full_plan)(**changes), traces, ranks, frontends)
    if publish:
        json_path, svg_path = json_path or RESULTS, svg_path or PICTURE
    console = Console(width=None if Console().is_terminal else 170)
    started = time.perf_counter()

    def done(result: dict[str, Any]) -> None:
        console.print(report.scenario_table(result), "")

    results = run(plan, done)
    rows = report.summary(results["scenarios"])
    if rows:
        console.print(report.summary_table(rows), "")
        console.print(report.conclusion(rows), highlight=False)
    console.print(f"{time.perf_counter() - started:.0f} s", highlight=False)
    if json_path:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(report.to_json({**results, "summary": rows}))
    if svg_path:
        from plot import draw

        svg_path.parent.mkdir(parents=True, exist_ok=True)
        draw(results["scenarios"], svg_path)


if __name__ == "__main__":
    main()
