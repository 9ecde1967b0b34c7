"""What ranks and frontend tell the supervisor: one JSON line each, a few times a second and at their end."""

from __future__ import annotations

import msgspec

__all__ = ["ARRIVALS", "EngineReport", "FrontendReport", "PhaseReport", "Report", "decode", "encode"]

ARRIVALS = "arrivals.json"
"""The file, in the run's directory, that holds the requests to replay."""


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
    """One replay of the arrivals under one policy; times to first token in seconds of trace time."""

    policy: str
    total: int
    sent: int = 0
    served: int = 0
    lost: int = 0
    refused: int = 0
    unanswered: int = 0
    ttft_p50: float | None = None
    ttft_p99: float | None = None
    done: bool = False

    @property
    def ended(self) -> int:
        """Requests that are over, well or not."""
        return self.served + self.lost + self.refused + self.unanswered


class FrontendReport(msgspec.Struct, tag="frontend"):
    """How far the frontend is."""

    phases: list[PhaseReport]
    reads: int = 0
    late_p99_s: float | None = None
    """How late requests were dispatched, in seconds of real time, and the median cost of a read: in the last report only."""
    read_ns: float | None = None


Report = EngineReport | FrontendReport

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Report] = msgspec.json.Decoder(EngineReport | FrontendReport)


def encode(report: Report) -> bytes:
    """One line, with its end."""
    return _encoder.encode(report) + b"\n"


def decode(line: bytes) -> Report:
    """``msgspec.DecodeError`` if the line is no report."""
    return _decoder.decode(line)
