"""Clients leave: inside their request, before both legs, between them, during either, at the end.

A round: three clients leave at moments that the dice choose, by a plain close or by a reset, while
two others stay, whose answers must be right. The answers that nobody waits for would take many
seconds; the cluster must be idle long before.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import struct
import time
from enum import StrEnum
from urllib.parse import urlsplit

from pdcluster_protocol.ids import Role
from soak.leaks import History
from soak.questions import Bank
from soak.tally import Tally
from support.cluster import PairCluster, until
from support.prompts import prompt

LEAVING = 3
STAYING = 2
TOKENS_TOO_MANY = 2000
"""An answer that would take many seconds, so only leaving can end it soon."""
IDLE_SECONDS_MAX = 2.0
LENGTHS = itertools.cycle(range(300, 1500))
"""Prompt lengths, by which the room of one client is found among all."""


class Moment(StrEnum):
    """When a client leaves; of the rooms it is decode's state that counts."""

    IN_THE_BODY = "inside its request"
    AT_ONCE = "right after its request"
    RESOLVING = "Resolving"
    ADMITTING = "Admitting"
    PUBLISHED = "Published"
    TRANSFERRING = "Transferring"
    LANDED = "Landed"
    RUNNING = "Running"
    FIRST_EVENT = "at the first event"
    LATER_EVENT = "at a later event"


STATES = tuple(Moment)[2:8]
"""Moments that are states, in their order."""


async def leave_again_and_again(
    cluster: PairCluster, bank: Bank, *, rounds: int, dice: random.Random
) -> Tally:
    """All rounds; stops early when something is left of a client that left."""
    tally = Tally("clients that leave")
    history = History()
    try:
        for _ in range(rounds):
            await leave_once(cluster, bank, dice=dice, tally=tally)
            history.look(cluster)
        faults = cluster.faults()
        assert not faults, f"faults of our own: {faults[:3]}"
    except AssertionError as error:
        tally.violated(str(error))
    for leak in history.leaks():
        tally.violated(leak)
    return tally


async def leave_once(
    cluster: PairCluster, bank: Bank, *, dice: random.Random, tally: Tally
) -> None:
    """One round.

    Raises:
        AssertionError: something is left of those that left.
    """
    staying = [asyncio.create_task(bank.ask(q)) for q in bank.draw(dice)[:STAYING]]
    moments = [dice.choice(tuple(Moment)) for _ in range(LEAVING)]
    resets = [dice.random() < 0.5 for _ in range(LEAVING)]
    seeds = [dice.getrandbits(30) for _ in range(LEAVING)]
    left = await asyncio.gather(
        *(
            leave(cluster, moment, reset=reset, seed=seed)
            for moment, reset, seed in zip(moments, resets, seeds, strict=True)
        )
    )
    left_at = time.monotonic()
    for moment in left:
        tally.moments[moment] += 1
    seens = await asyncio.gather(*staying)
    tally.served(seens)
    await cluster.wait_idle()
    # Those who stayed may have taken longer than what is allowed for those who left.
    since = max([left_at, *(seen.at for seen in seens)])
    idle_seconds = time.monotonic() - since
    tally.longest_outage_seconds = max(tally.longest_outage_seconds, idle_seconds)
    assert idle_seconds <= IDLE_SECONDS_MAX, f"idle only after {idle_seconds:.2f} s, {left=}"
    tally.rounds += 1


async def leave(cluster: PairCluster, moment: Moment, *, reset: bool, seed: int) -> str:
    """One client from its connection to its leaving; when it left in truth.

    A state can pass between two looks: then the client leaves at the next one.
    """
    length = next(LENGTHS)
    streamed = moment in (Moment.FIRST_EVENT, Moment.LATER_EVENT) or seed % 2 == 0
    plain = {"stream": streamed, "return_logprob": False, "top_logprobs_num": 0}
    body = cluster.body(prompt(length, seed=seed), TOKENS_TOO_MANY, **plain)
    address = urlsplit(cluster.run.endpoint)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        encoded = json.dumps(body).encode()
        writer.write(
            b"POST /generate HTTP/1.1\r\nhost: pair\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(encoded)
        )
        writer.write(encoded[: len(encoded) // 2] if moment is Moment.IN_THE_BODY else encoded)
        await writer.drain()
        return str(await _wait(cluster, reader, moment, length, events=2 + seed % 9))
    finally:
        if reset:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()


async def _wait(
    cluster: PairCluster, reader: asyncio.StreamReader, moment: Moment, length: int, *, events: int
) -> Moment:
    match moment:
        case Moment.IN_THE_BODY | Moment.AT_ONCE:
            return moment
        case Moment.FIRST_EVENT:
            await _read_events(reader, 1)
            return moment
        case Moment.LATER_EVENT:
            await _read_events(reader, events)
            return moment
        case _:
            return await _state(cluster, reader, moment, length)


async def _read_events(reader: asyncio.StreamReader, count: int) -> None:
    async with asyncio.timeout(60):
        for _ in range(count):
            event = await reader.readuntil(b"\n\n")
            assert b'"error"' not in event, event


async def _state(
    cluster: PairCluster, reader: asyncio.StreamReader, moment: Moment, length: int
) -> Moment:
    """Wait until decode's room has come so far; the state that it then has."""
    seen = moment
    answer = asyncio.create_task(reader.read(1000))

    async def reached() -> bool:
        nonlocal seen
        assert not answer.done() or b" 200 " in answer.result()[:16], answer.result()
        rooms = [room for dump in await cluster.dumps(Role.DECODE) for room in dump["rooms"]]
        states = [Moment(room["state"]) for room in rooms if room["prompt_tokens"] == length]
        if not states:
            return False
        seen = states[0]
        return STATES.index(seen) >= STATES.index(moment)

    try:
        await until(reached, f"{moment} with {length} prompt tokens")
    finally:
        answer.cancel()
    return seen
