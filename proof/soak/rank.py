"""A rank of the soak: it publishes into its mailbox, and sends a batch to each remote frontend now and then, until it is ended."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

import zmq
from values import (
    BEGUN,
    BEGUN_NS,
    DONE,
    EPOCH,
    EPOCH_LIFE,
    FIRST_LIFE,
    FIRST_NS,
    PUBLISHED,
    RANKS,
    Shared,
    load_of,
    packed,
)  # fmt: skip

from loadbox.mailbox import MailboxInUse, MailboxWriter
from loadbox.piggyback import BatchTokenIDOutSlim, MsgpackSendSocket

INJECTIONS = ("torn", "wrong-rank", "older", "former-life", "silent-death")


def lane(folder: str, frontend: int, rank: int) -> str:
    """Where a remote frontend's output lane of a rank is: beside its handshake lane."""
    return f"ipc://{folder}/f{frontend}-out{rank}"


def run(
    shared: Shared, actor: int, life: int, group: str, folder: str, remotes: int, inject: str, tell: Callable[..., None]
) -> None:
    """Live until SIGTERM; then close in order."""
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ending.append(number))
    rank, truth, counters, random_ = actor, shared.truth(actor), shared.counters(actor), random.Random(life)
    context = zmq.Context()
    lanes = []
    for frontend in range(remotes):
        socket = context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, 20)
        socket.setsockopt(zmq.SNDTIMEO, 0)  # a frontend that is stopped loses batches, and holds nobody up
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(lane(folder, frontend, rank))
        lanes.append(MsgpackSendSocket(socket, rank, load_only="always"))
    try:
        writer = MailboxWriter(group, rank, RANKS, start_wait=30)
    except MailboxInUse as error:
        tell("a rank could not start within 30 s", rank=rank, life=life, error=str(error))
        return
    truth[EPOCH] = writer.epoch
    truth[EPOCH_LIFE] = life
    number = 0
    while not ending:
        number += 1
        load = load_of(rank, life, number)
        truth[BEGUN_NS] = time.monotonic_ns()
        truth[BEGUN] = packed(life, number)
        _publish(writer, load, rank, life, number, inject)
        truth[DONE] = packed(life, number)
        if number == 1:
            truth[FIRST_NS] = time.monotonic_ns()
            truth[FIRST_LIFE] = life
        counters[PUBLISHED] += 1
        if number % 4 == 0:
            for send in lanes:
                try:
                    send.send_pyobj(BatchTokenIDOutSlim([], [], [], [], [], [], [], []), load=load)
                except zmq.Again:
                    pass
        time.sleep(random_.uniform(0.005, 0.03))
    writer.close()
    for send in lanes:
        send.close()
    context.term()


def _publish(writer: MailboxWriter, load: tuple[int, int, int, int], rank: int, life: int, number: int, inject: str) -> None:
    """Publish, or do the wrong thing that is asked for, in rank 5 and once in a while."""
    if inject not in INJECTIONS or rank != 5 or number % 20:
        writer.publish(*load)
    elif inject == "torn":
        writer.publish(load[0], load_of(rank, life, number - 1)[1], *load[2:])
    elif inject == "wrong-rank":
        writer.publish(*load_of(rank + 1, life, number))
    elif inject == "older":
        writer.publish(*load_of(rank, life, number - 5))
    elif inject == "former-life":
        writer.publish(*load_of(rank, life - 1, number))
    elif inject == "silent-death":
        os.kill(os.getpid(), signal.SIGKILL)


def rival(group: str, rank: int, tell: Callable[..., None]) -> None:
    """A second writer of a rank that lives: it must be told so."""
    try:
        writer = MailboxWriter(group, rank, RANKS, start_wait=0)
    except MailboxInUse:
        return
    writer.close()
    tell("a second writer got a rank that lives", rank=rank)
