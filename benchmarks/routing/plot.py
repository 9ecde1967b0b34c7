"""The picture of the results: p50 and p99 of the time to first token at 64 ranks, on light and on dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from intervals import interval
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from scenarios import columns

# Greys and colours of middling lightness: about the same contrast on white and on near-black.
_INK = "#808890"
_LINES = {
    "round-robin": ("round robin", "#9a9a9a", ":"),
    "coordinator": ("coordinator, 100 ms", "#c9892b", "--"),
    "piggyback": ("piggyback", "#a573d6", "--"),
    "own": ("own in-flight", "#d9534f", "-"),
    "cold-set": ("mailbox", "#3d8fd1", "-"),
    "board": ("mailbox + board (default)", "#2fa36b", "-"),
    "oracle": ("oracle", _INK, ":"),
}
_TRACES = {"chat": "Azure 2023 chat", "code": "Azure 2023 code", "mooncake": "Mooncake conversation"}


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the picture of those of the results that have the largest number of ranks."""
    ranks = max(result["ranks"] for result in results)
    results = [result for result in results if result["ranks"] == ranks]
    traces = [trace for trace in _TRACES if any(result["trace"] == trace for result in results)]
    style: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": "loadbox", "font.family": "sans-serif", "font.size": 9,
        "text.color": _INK, "axes.labelcolor": _INK, "axes.edgecolor": _INK, "xtick.color": _INK, "ytick.color": _INK,
        "axes.spines.top": False, "axes.spines.right": False, "grid.color": _INK, "grid.alpha": 0.25,
    }  # fmt: skip
    with plt.rc_context(style):
        figure, axes = plt.subplots(2, len(traces), figsize=(9.0, 5.0), squeeze=False, layout="constrained")
        for column, trace in enumerate(traces):
            some = sorted((result for result in results if result["trace"] == trace), key=lambda result: result["frontends"])
            for row, (metric, title) in enumerate((("ttft_p50", "p50"), ("ttft_p99", "p99"))):
                axis = axes[row][column]
                for name, (label, colour, line) in _LINES.items():
                    points = [result for result in some if name in result["policies"]]
                    found = [interval([value * 1e3 for value in columns(result, name, metric)]) for result in points]
                    axis.errorbar(
                        [str(result["frontends"]) for result in points],
                        [one.mean for one in found],
                        [one.half for one in found],
                        label=label, color=colour, linestyle=line, linewidth=2.2 if name == "board" else 1.4,
                        marker="o", markersize=3, capsize=2,
                    )  # fmt: skip
                axis.set_yscale("log")
                axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5), numticks=20))
                axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
                axis.yaxis.set_minor_locator(NullLocator())
                axis.grid(axis="y")
                if row == 0:
                    axis.set_title(_TRACES[trace], color=_INK, fontsize=10)
                else:
                    axis.set_xlabel("frontends")
                if column == 0:
                    axis.set_ylabel(f"time to first token, {title}, ms")
        figure.suptitle(f"{ranks} ranks, 95 % intervals", color=_INK, fontsize=10)
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, transparent=True, metadata={"Date": None, "Title": f"Routing policies at {ranks} ranks"})
        plt.close(figure)
