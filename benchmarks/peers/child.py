"""One side of a peer in a process of its own: ``python child.py PEER ROLE PLACE RANKS ARGUMENT``.

write HZ        publish (i, 2i, 3i, 4i) so often, 0: without pause; says "ready", then its count of publishes every 0.1 s
write-all HZ    the same for all ranks, HZ 0: once, and then lives on; says "ready"
read            read rank 0 without pause; says "ready", then its count of reads every 0.1 s
once            read rank 0 once and print it as JSON
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from catalogue import peer_named


def _count(call: Any, pause_s: float) -> None:
    i = 0
    due = time.monotonic()
    while True:
        i += 1
        call(i)
        if pause_s:
            time.sleep(pause_s)
        if i % 16 == 0 or pause_s:
            now = time.monotonic()
            if now >= due:
                print(i, flush=True)
                due = now + 0.1


def main() -> None:
    """Run the role until killed."""
    name, role, place, ranks, argument = sys.argv[1:]
    peer = peer_named(name)(place)
    type(peer).require()
    if role == "write":
        publish = peer.writer(0, int(ranks))
        publish(1, 2, 3, 4)
        print("ready", flush=True)
        _count(lambda i: publish(i, 2 * i, 3 * i, 4 * i), 1 / int(argument) if int(argument) else 0.0)
    if role == "write-all":
        publishers = [peer.writer(rank, int(ranks)) for rank in range(int(ranks))]
        i = 0
        while True:
            i += 1
            for publish in publishers:
                publish(i, 2 * i, 3 * i, 4 * i)
            if i == 1:
                print("ready", flush=True)
            time.sleep(1 / int(argument) if int(argument) else 3600.0)
    read = peer.reader(0, int(ranks))
    if role == "once":
        end = time.monotonic() + 1
        while (found := read()) is None and time.monotonic() < end:  # a subscription or an attachment takes a moment
            time.sleep(0.01)
        print(json.dumps(None if found is None else list(found)), flush=True)
        return
    read()
    print("ready", flush=True)
    _count(lambda i: read(), 0.0)


if __name__ == "__main__":
    main()
