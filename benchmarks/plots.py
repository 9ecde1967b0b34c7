"""The pictures of the results, for light and for dark pages: peers, propagation, staleness.

python benchmarks/plots.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter

RESULTS = Path(__file__).resolve().parent / "results"
IMAGES = RESULTS.parents[1] / "docs" / "img"
# Greys and colours of middling lightness: about the same contrast on white and on near-black.
INK, OURS, OTHERS, TORN = "#808890", "#2fa36b", "#3d8fd1", "#d9534f"
STYLE: dict[str, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "loadbox", "font.family": "sans-serif", "font.size": 9, "savefig.transparent": True,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "grid.color": INK, "grid.alpha": 0.25,
}  # fmt: skip


def time_of(ns: float, _: object = None) -> str:
    """A time, in the unit that fits."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns:.3g} ns"


def save(figure: Any, name: str) -> None:
    """As SVG, the same bytes for the same figures."""
    figure.savefig(IMAGES / name, metadata={"Date": None})
    plt.close(figure)


def peers() -> None:
    """Publish, read and the read of 64 ranks of every peer, on a logarithmic scale."""
    figures = json.loads((RESULTS / "peers.json").read_text())["figures"]
    columns = (("publish_ns", "publish"), ("read_ns", "read, writer at 1 kHz"), ("read_all_ns", "read of 64 ranks"))
    names = list(reversed(figures))
    figure, axes = plt.subplots(1, 3, figsize=(9.5, 3.6), sharey=True, layout="constrained")
    for axis, (column, title) in zip(axes, columns, strict=True):
        for place, name in enumerate(names):
            peer = figures[name]
            if peer[column] is None:
                continue
            colour = OURS if name.startswith("Loadbox") else TORN if peer["torn"] else OTHERS
            axis.barh(place, peer[column], color=colour, height=0.7)
            axis.text(peer[column] * 1.15, place, time_of(peer[column]), va="center", fontsize=7.5)
        axis.set_xscale("log")
        axis.set_xlim(20, axis.get_xlim()[1] * 12)
        axis.xaxis.set_major_formatter(FuncFormatter(time_of))
        axis.tick_params(axis="x", labelsize=7.5)
        axis.grid(axis="x")
        axis.set_axisbelow(True)
        axis.set_title(title, fontsize=9)
    axes[0].set_yticks(range(len(names)), [figures[name]["name"] for name in names])
    figure.supxlabel("median, one call from Python; red: torn values were read", fontsize=8)
    save(figure, "peers.svg")


def propagation() -> None:
    """The part of the values that another process has, over the time since the start of their publish."""
    rows = json.loads((RESULTS / "propagation.json").read_text())["rows"]
    figure, axis = plt.subplots(figsize=(5.2, 2.8), layout="constrained")
    for (name, row), colour in zip(rows.items(), (OURS, OTHERS, "#c9892b"), strict=True):
        axis.plot(row["curve"], [i / 2 for i in range(200)], color=colour, label=name)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(time_of))
    axis.set_xlabel("since the start of the publish")
    axis.set_ylabel("% have it")
    axis.grid()
    axis.legend(frameon=False, labelcolor=INK)
    save(figure, "propagation.svg")


def staleness() -> None:
    """Age and error of what a router reads when it decides."""
    rows = json.loads((RESULTS / "staleness.json").read_text())["rows"]
    names = [name for name in reversed(rows) if name != "poll"]
    columns = (
        ("age, p99", "age, ms, p99"),
        ("requests off, mean", "requests off, mean"),
        ("pages off, mean", "KV pages off, %, mean"),
    )
    figure, axes = plt.subplots(1, 3, figsize=(9.0, 2.2), sharey=True, layout="constrained")
    for axis, (column, title) in zip(axes, columns, strict=True):
        for place, name in enumerate(names):
            value = rows[name][column]
            axis.barh(place, value, color=OURS if name == "mailbox" else OTHERS, height=0.65)
            axis.text(value, place, f" {value:,.0f}" if value >= 100 else f" {value:.2g}", va="center", fontsize=7.5)
        axis.set_xlim(0, axis.get_xlim()[1] * 1.15)
        axis.set_title(title, fontsize=9)
    axes[0].set_yticks(range(len(names)), names)
    save(figure, "staleness.svg")


def main() -> None:
    """Draw all."""
    mpl.use("svg")
    with plt.rc_context(STYLE):
        peers()
        propagation()
        staleness()


if __name__ == "__main__":
    main()
