"""Tables: one a scenario, and the summary of the default beside own in-flight."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from intervals import Ratio, interval, paired_ratio
from policies import BASELINE, DEFAULT, POLICIES
from rich.table import Table
from scenarios import Scenario, columns

METRICS = (("ttft_p50", "TTFT p50"), ("ttft_p99", "TTFT p99"), ("e2e_mean", "e2e mean"))


def _ms(values: Sequence[float]) -> str:
    found = interval([value * 1e3 for value in values])
    return f"{found.mean:.0f}" if math.isnan(found.half) else f"{found.mean:.0f} ± {found.half:.0f}"


def _percent(ratio: Ratio) -> str:
    text = f"{100 * (ratio.ratio - 1):+.1f} %"
    return text if math.isnan(ratio.low) else f"{text} [{100 * (ratio.low - 1):+.0f}, {100 * (ratio.high - 1):+.0f}]"


def _against(result: dict[str, Any], ours: str, theirs: str, metric: str) -> Ratio:
    return paired_ratio(columns(result, ours, metric), columns(result, theirs, metric))


def _scenario(result: dict[str, Any]) -> Scenario:
    return Scenario(result["trace"], result["ranks"], result["frontends"], result["requests"])


def scenario_table(result: dict[str, Any]) -> Table:
    """All policies in ms, and each one's difference from own in-flight over the same requests."""
    seeds = result["seeds"]
    table = Table(
        title=f"{_scenario(result).title}: {result['requests']} requests, seeds {', '.join(map(str, seeds))}",
        title_justify="left",
        caption="ms, mean over the seeds ± 95 % interval; vs own in-flight: paired by seed, with its 95 % interval",
        caption_justify="left",
    )
    table.add_column("policy", no_wrap=True)
    for _, title in METRICS:
        table.add_column(title, justify="right", no_wrap=True)
    with_baseline = BASELINE in result["policies"]
    if with_baseline:
        for _, title in METRICS[:2]:
            table.add_column(f"{title.split()[1]} vs own", justify="right", no_wrap=True)
    for name in result["policies"]:
        cells = [_ms(columns(result, name, metric)) for metric, _ in METRICS]
        if with_baseline:
            cells += ["" if name == BASELINE else _percent(_against(result, name, BASELINE, metric)) for metric, _ in METRICS[:2]]
        table.add_row(POLICIES[name].title, *cells, style="bold" if name == DEFAULT else None)
    return table


def verdict(ratio: Ratio) -> str:
    """``wins`` or ``loses`` where the 95 % interval of a ratio of times leaves out 1, otherwise ``level``."""
    if ratio.high < 1.0:
        return "wins"
    return "loses" if ratio.low > 1.0 else "level"


def summary(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each scenario: the default beside own in-flight and beside the oracle."""
    rows = []
    for result in results:
        if not {DEFAULT, BASELINE} <= result["policies"].keys():
            continue
        row: dict[str, Any] = {key: result[key] for key in ("trace", "ranks", "frontends")}
        for metric, _ in METRICS:
            ratio = _against(result, DEFAULT, BASELINE, metric)
            row[f"{metric}_vs_own"] = [*ratio]
            row[f"{metric}_verdict"] = verdict(ratio)
            if "oracle" in result["policies"]:
                row[f"{metric}_vs_oracle"] = [*_against(result, DEFAULT, "oracle", metric)]
        rows.append(row)
    return rows


def summary_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The summary to be read."""
    table = Table(
        title="The default (mailbox, cold-set, board) beside own in-flight",
        title_justify="left",
        caption="difference of the times, negative is faster; paired by seed, with 95 % intervals",
        caption_justify="left",
    )
    table.add_column("scenario", no_wrap=True)
    for title in ("p50", "", "p99", "", "e2e mean", "p50 vs oracle", "p99 vs oracle"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        cells = []
        for metric in ("ttft_p50", "ttft_p99"):
            cells += [_percent(Ratio(*row[f"{metric}_vs_own"])), row[f"{metric}_verdict"]]
        cells.append(_percent(Ratio(*row["e2e_mean_vs_own"])))
        cells += [
            _percent(Ratio(*row[key])) if (key := f"{metric}_vs_oracle") in row else "" for metric in ("ttft_p50", "ttft_p99")
        ]
        table.add_row(Scenario(row["trace"], row["ranks"], row["frontends"], 0).title, *cells)
    return table


def conclusion(rows: Sequence[dict[str, Any]]) -> str:
    """In how many scenarios the default is faster, and by how much; and each place where it is not, or not for certain."""
    lines = []
    for title, some in (
        ("four frontends and more", [row for row in rows if row["frontends"] >= 4]),
        ("one frontend", [row for row in rows if row["frontends"] == 1]),
    ):
        if not some:
            continue
        both = sum(all(row[f"{metric}_verdict"] == "wins" for metric in ("ttft_p50", "ttft_p99")) for row in some)
        lines.append(f"With {title}: faster than own in-flight at both p50 and p99 in {both} of {len(some)} scenarios.")
        for metric, name in METRICS[:2]:
            ratios = sorted(Ratio(*row[f"{metric}_vs_own"]) for row in some)
            lines.append(f"  {name}: {100 * (ratios[0].ratio - 1):+.0f} % at best, {100 * (ratios[-1].ratio - 1):+.0f} % at worst.")
        for row in some:
            where = Scenario(row["trace"], row["ranks"], row["frontends"], 0).title
            for metric, name in METRICS[:2]:
                if row[f"{metric}_verdict"] != "wins":
                    lines.append(f"  {where}: {name} {row[f'{metric}_verdict']}, {_percent(Ratio(*row[f'{metric}_vs_own']))}.")
    return "\n".join(lines)


def to_json(results: dict[str, Any]) -> str:
    """The results as JSON, a line for each scenario, times to the microsecond."""
    parts = []
    for key, value in results.items():
        if isinstance(value, list):
            rows = ",\n  ".join(json.dumps(_rounded(row)) for row in value)
            parts.append(f" {json.dumps(key)}: [\n  {rows}\n ]")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, 6)  # JSON has no NaN: a single seed has no interval
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value
