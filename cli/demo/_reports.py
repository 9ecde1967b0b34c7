"""What ranks and frontends tell the supervisor: one JSON line each, a few times a second and at their end."""

from __future__ import annotations

import msgspec

__all__ = ["ARRIVALS", "EngineReport", "FrontendReport", "PhaseReport", "Report", "decode", "encode"]

ARRIVALS = "arrivals.json"
"""The file, in the run's directory, that holds the requests to replay: a list for each frontend."""


class EngineReport(msgspec.Struct, tag="engine"):
    """One rank's counters."""

    rank: int
    iterations: int
    preemptions: int
    publishes: int
    publish_errors: int
    modelled_s: float
    """Time that the iterations should have taken, and took, in seconds of real time."""
    spent_s: float
    publish_ns: float | None = None
    """Median cost of a publish; in the last report only."""


class PhaseReport(msgspec.Struct):
    """One frontend's part of one replay: its counters, and the times that are new since its last report."""

    total: int
    sent: int = 0
    served: int = 0
    lost: int = 0
    refused: int = 0
    unanswered: int = 0
    ttft: list[float] = []
    """Times to first token, in seconds of trace time."""
    ages: list[float] = []
    """How old the loads were at each decision, the mean over the ranks, in seconds of trace time."""


class FrontendReport(msgspec.Struct, tag="frontend"):
    """How far one frontend is."""

    frontend: int
    waits_for: int | None
    """The replay that it is ready to start."""
    phases: list[PhaseReport]
    mailboxes: int = 0
    """Ranks whose announced mailbox it has found, by name and epoch."""
    batches: int = 0
    load_only: int = 0
    choices: int = 0
    late_p99_s: float | None = None
    """How late requests were dispatched, in seconds of real time, and the median cost of a choice: in the last report only."""
    choose_ns: float | None = None


Report = EngineReport | FrontendReport

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Report] = msgspec.json.Decoder(EngineReport | FrontendReport)


def encode(report: Report) -> bytes:
    """One line, with its end."""
    return _encoder.encode(report) + b"\n"


def decode(line: bytes) -> Report:
    """``msgspec.DecodeError`` if the line is no report."""
    return _decoder.decode(line)
