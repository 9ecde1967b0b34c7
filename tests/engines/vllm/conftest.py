"""vLLM as it was released; without it, and outside ``make vllm``, nothing here runs."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
THERE = importlib.util.find_spec("vllm") is not None

if THERE:
    sys.path.insert(0, str(HERE))  # the rig
    for name, value in {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }.items():
        os.environ.setdefault(name, value)
elif os.environ.get("LOADBOX_REQUIRE_VLLM"):
    pytest.exit("vLLM is not installed here; `make vllm` installs it", 1)
else:
    collect_ignore = [path.name for path in HERE.glob("test_*.py")]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of random weights."""
    from loadbox.cli.demo.vllm._tiny_llama import make_tiny_llama

    folder = tmp_path_factory.mktemp("tiny-llama")
    make_tiny_llama(folder)
    return folder
