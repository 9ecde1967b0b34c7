"""The other process of the self-test: publishes what it is told, a line at a time, until its stdin ends."""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Publish as rank 0 of the group in argv[1]; "up" once the mailbox is there, "done" after each publish."""
    from loadbox.mailbox import MailboxError, MailboxWriter

    try:
        writer = MailboxWriter(sys.argv[1], 0, 1)
    except MailboxError as error:
        sys.exit(str(error))
    with writer:
        os.write(1, b"up\n")  # a line is one write, whatever PYTHONUNBUFFERED makes of print
        for line in sys.stdin:
            running, waiting, active, total = map(int, line.split())
            writer.publish(running, waiting, active, total)
            os.write(1, b"done\n")


if __name__ == "__main__":
    main()
