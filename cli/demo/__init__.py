"""``loadbox demo``: a data-parallel group for real, with a model in the place of the accelerator."""

from loadbox.cli.demo._options import Options
from loadbox.cli.demo._run import DemoError, run
from loadbox.cli.demo._trace import Request, TraceError, read_trace, scale

__all__ = ["DemoError", "Options", "Request", "TraceError", "read_trace", "run", "scale"]
