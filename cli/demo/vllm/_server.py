"""``vllm serve -dp 2`` on the CPU, with the tiny model and the scheduler that publishes to the mailboxes."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadbox.cli.demo._children import Child, Children

__all__ = ["HOW_TO_INSTALL", "RANKS", "SCHEDULER", "Server", "environment", "free_port", "is_installed", "serve_command"]

RANKS = 2
SCHEDULER = "loadbox.engines.vllm.MailboxScheduler"
HOW_TO_INSTALL = """\
loadbox demo --engine vllm needs vLLM 0.32 in the environment that loadbox is in; a CPU is enough.

  in a clone of loadbox (3 GB, CPython >= 3.11):   make vllm-install && .venv-vllm/bin/loadbox demo --engine vllm
  where vLLM is installed:                         pip install 'loadbox[cli]' && loadbox demo --engine vllm"""

_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
_HEALTH_LIMIT_S = 1.0


def is_installed() -> bool:
    """Whether this environment has vLLM; it is not imported, which takes ten seconds."""
    return importlib.util.find_spec("vllm") is not None


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def serve_command(model: Path, port: int, additional: dict[str, object]) -> list[str]:
    """The command that a person would type, with what makes it light: few KV blocks, so that they run out; no compiling."""
    arguments = [
        str(model), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port),
        "--data-parallel-size", str(RANKS), "--scheduler-cls", SCHEDULER,
        "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "32", "--block-size", "32",
        "--num-gpu-blocks-override", "129", "--enforce-eager", "--api-server-count", "1", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    if additional:
        arguments += ["--additional-config", json.dumps(additional)]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *arguments]


def environment(group: str | None) -> dict[str, str]:
    """This process's environment with what vLLM needs on the CPU, and with the group, or none, in ``LOADBOX_GROUP``."""
    made = {**os.environ, **_ENVIRONMENT}
    made.pop("LOADBOX_GROUP", None)
    if group is not None:
        made["LOADBOX_GROUP"] = group
    return made


class Server:
    """One server: started by ``__init__``, ready when it says so, stopped with the ``Children`` it belongs to.

    Its group is given by ``--additional-config`` or, with ``by_variable``, by ``LOADBOX_GROUP``; or neither, if it is None.
    """

    def __init__(self, children: Children, folder: Path, model: Path, group: str | None, *, by_variable: bool = False) -> None:
        self.port = free_port()
        self.log = folder / f"vllm-{self.port}.log"
        additional: dict[str, object] = {"loadbox_group": group} if group is not None and not by_variable else {}
        command = serve_command(model, self.port, additional)
        self.child: Child = children.start(
            "vLLM", "loadbox.cli.demo.vllm._keeper", str(self.log), *command, env=environment(group if by_variable else None)
        )
        self.started_s = time.monotonic()
        self.pid: int | None = None
        """The server's process group, once it is known."""

    def take(self, line: bytes) -> None:
        """Take in what the keeper wrote."""
        if self.pid is None and line.strip().isdigit():
            self.pid = int(line)

    def ended(self) -> str | None:
        """How it ended, with the last that it wrote; None while it runs."""
        how = self.child.ended()
        return how and f"vLLM {how}; the end of {self.log}:\n{self.last_lines()}"

    def last_lines(self, count: int = 25) -> str:
        """What it wrote last."""
        try:
            return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])
        except OSError as error:
            return str(error)

    def get(self, path: str, limit_s: float = _HEALTH_LIMIT_S) -> str | None:
        """What the server answers; None if it does not."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=limit_s) as answer:
                return answer.read().decode()  # type: ignore[no-any-return] # typeshed has Any here
        except (OSError, urllib.error.URLError):
            return None

    def healthy(self) -> bool:
        """Whether it serves."""
        return self.get("/health") is not None

    def kill(self) -> None:
        """SIGKILL to the server and all its processes, as the kernel does when memory runs out."""
        assert self.pid is not None
        os.killpg(self.pid, signal.SIGKILL)
