"""Makes docs/img/top.svg: two servers for real, in processes of their own, as ``loadbox top`` shows them (``make pictures``).

One rank has died, another has stopped with work, a third has not published yet, and a frontend has requests in flight.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from loadbox.mailbox import MailboxReader, MailboxWriter, RankState
from loadbox.reader import LoadReader

PICTURE = Path(__file__).parent / "img" / "top.svg"
GROUPS = {"llama-70b": 4, "qwen-decode": 3}
STALL_S = 5.0


def rank(group: str, number: int, size: int) -> None:
    """A scheduler's publishes, for as long as its parent lives."""
    rng = random.Random(f"{group}{number}")
    parent = os.getppid()
    with MailboxWriter(group, number, size) as writer:
        if (group, number) == ("qwen-decode", 2):
            time.sleep(600)  # it is loading its weights
        running, pages = 30 + rng.randrange(20), rng.randrange(9000, 23000)
        while os.getppid() == parent:
            running = max(1, running + rng.randrange(-2, 3))
            pages = min(24900, max(500, pages + rng.randrange(-200, 201)))
            writer.publish(running, max(0, rng.randrange(-12, 6)), pages, 25000)
            time.sleep(0.02 + 0.004 * number)


def main() -> None:
    """Start the ranks, let things happen to two of them, and take the picture."""
    ranks = {
        (group, number): subprocess.Popen([sys.executable, __file__, group, str(number), str(size)])
        for group, size in GROUPS.items()
        for number in range(size)
    }
    try:
        for key in ranks:
            with MailboxReader(*key) as reader:
                while reader.state() is not (RankState.SILENT if key == ("qwen-decode", 2) else RankState.LIVE):
                    time.sleep(0.05)
        time.sleep(1)
        ranks["llama-70b", 2].send_signal(signal.SIGSTOP)
        ranks["qwen-decode", 1].kill()
        with LoadReader("llama-70b", 4) as view:
            for request in range(87):
                view.choose(str(request), 100)
            time.sleep(STALL_S + 1)
            groups = [word for group in GROUPS for word in ("--group", group)]
            subprocess.run([sys.executable, "-m", "loadbox.cli", "top", *groups, "--svg", PICTURE], check=True)
    finally:
        for process in ranks.values():
            process.kill()
            process.wait()
        for group in GROUPS:
            subprocess.run([sys.executable, "-m", "loadbox.cli", "clean", "--group", group], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    if sys.argv[1:]:
        rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
