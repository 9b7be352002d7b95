"""Mooncake in a thread of the engine's process: two real processes over TCP on loopback."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from support.ports import fresh_host
from support.transport_programs import RemoteSide, remote_side

SENDER, RECEIVER, THIRD = (fresh_host() for _ in range(3))
KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where both arenas lie; on a machine with one GPU both processes share it."""
    return str(request.param)


@pytest.fixture
def sender(device: str) -> Iterator[RemoteSide]:
    with remote_side(SENDER, device=device) as side:
        yield side


@pytest.fixture
def receiver(device: str) -> Iterator[RemoteSide]:
    with remote_side(RECEIVER, device=device) as side:
        yield side


def flood(sender: RemoteSide, ready: dict[str, object], *, count: int) -> None:
    """Many writes of the whole arena, of which few can be done when the test goes on."""
    sender.tell(
        "write",
        target=ready["session_name"],
        source=0,
        address=ready["base_address"],
        nbytes=sender.nbytes,
        count=count,
    )


def test_bytes_land_and_the_digests_of_both_sides_are_equal(
    sender: RemoteSide, receiver: RemoteSide
) -> None:
    sender.tell("fill", seed=1)
    sender.wait("Ready")
    peer = receiver.wait("Ready")
    for number, nbytes in enumerate((1, 63, 4 * KIB, 64 * KIB + 1, 4 * MIB), start=1):
        address = peer["base_address"] + 7
        sender.tell("write", target=peer["session_name"], source=5, address=address, nbytes=nbytes)
        written = sender.wait("Completed")
        receiver.tell("digest", operation=number, offset=7, nbytes=nbytes)
        assert (number, True) == (written["operation"], written["ok"])
        assert written["digest"] == receiver.wait("Completed")["digest"]
        sender.tell("digest", operation=100 + number, offset=5, nbytes=nbytes)
        assert written["digest"] == sender.wait("Completed")["digest"]


def test_many_writes_complete_and_both_arenas_are_equal(
    sender: RemoteSide, receiver: RemoteSide
) -> None:
    sender.tell("fill", seed=2)
    peer = receiver.wait("Ready")
    # Submitted before the sender's own transport is ready: held, and then sent.
    for place in range(0, sender.nbytes, 256 * KIB):
        address = peer["base_address"] + place
        sender.tell(
            "write",
            target=peer["session_name"],
            source=place,
            address=address,
            nbytes=256 * KIB,
        )
    completed = sender.wait_completed(sender.nbytes // (256 * KIB))
    assert {True} == {one["ok"] for one in completed}
    assert sender.ask_digest() == receiver.ask_digest()


def test_bytes_outside_either_arena_are_refused_and_nothing_lands(
    sender: RemoteSide, receiver: RemoteSide
) -> None:
    sender.tell("fill", seed=3)
    sender.wait("Ready")
    peer = receiver.wait("Ready")
    before = receiver.ask_digest()
    target, base = peer["session_name"], peer["base_address"]
    for source, nbytes in ((sender.nbytes, 1), (0, sender.nbytes + 1), (-1, 4), (0, 0)):
        sender.tell("write", target=target, source=source, address=base, nbytes=nbytes)
        assert "the arena has" in sender.wait("Refused")["detail"]
    for address in (base + receiver.nbytes - 10, base - 4, 4096):
        sender.tell("write", target=target, source=0, address=address, nbytes=11)
        assert not sender.wait("Completed")["ok"]
    sender.tell("write", target="nowhere", source=0, address=base, nbytes=11)
    assert "not host:port" in sender.wait("Completed")["detail"]
    assert before == receiver.ask_digest()
    sender.tell("write", target=target, source=0, address=base, nbytes=11)
    assert sender.wait("Completed")["ok"]


def test_a_killed_peer_fails_the_writes_to_it_and_another_peer_is_served(
    sender: RemoteSide, receiver: RemoteSide, device: str
) -> None:
    sender.wait("Ready")
    flood(sender, receiver.wait("Ready"), count=400)
    sender.wait("Completed")
    os.kill(receiver.pid, signal.SIGKILL)
    completed = sender.wait_completed(399)
    assert not completed[-1]["ok"]
    assert "-1" in completed[-1]["detail"]
    with remote_side(THIRD, device=device) as third:
        flood(sender, third.wait("Ready"), count=1)
        assert sender.wait("Completed")["ok"]


def test_nothing_lands_after_a_fence_that_was_asked_while_writes_were_under_way(
    sender: RemoteSide, receiver: RemoteSide
) -> None:
    sender.tell("fill", seed=4)
    sender.wait("Ready")
    first = receiver.wait("Ready")
    flood(sender, first, count=400)
    sender.wait("Completed")
    receiver.tell("fence")
    assert 1 == receiver.wait("Fenced")["generation"]
    # From here on the pages may belong to somebody else, who writes into them.
    receiver.tell("fill", seed=5)
    receiver.wait("Filled")
    expected = receiver.ask_digest()
    second = receiver.wait("Ready")
    # The arena has not moved, so a session name that came again would be no protection.
    assert (2, first["base_address"]) == (second["generation"], second["base_address"])
    assert first["session_name"] != second["session_name"]
    completed = sender.wait_completed(399)
    assert not completed[-1]["ok"]
    assert expected == receiver.ask_digest()
    flood(sender, second, count=1)
    assert sender.wait("Completed")["ok"]
    assert sender.ask_digest() == receiver.ask_digest()


def test_what_a_stopped_sender_left_in_the_kernel_does_not_land_after_a_fence(
    sender: RemoteSide, receiver: RemoteSide
) -> None:
    sender.tell("fill", seed=6)
    sender.wait("Ready")
    flood(sender, receiver.wait("Ready"), count=400)
    sender.wait("Completed")
    os.kill(sender.pid, signal.SIGSTOP)
    receiver.tell("fence")
    receiver.wait("Fenced")
    receiver.tell("fill", seed=7)
    receiver.wait("Filled")
    expected = receiver.ask_digest()
    os.kill(sender.pid, signal.SIGCONT)
    assert not sender.wait_completed(399)[-1]["ok"]
    assert expected == receiver.ask_digest()


def test_a_fence_at_the_source_loses_what_was_under_way_and_serves_again(
    sender: RemoteSide, receiver: RemoteSide
) -> None:
    sender.wait("Ready")
    peer = receiver.wait("Ready")
    flood(sender, peer, count=400)
    sender.wait("Completed")
    sender.tell("fence")
    assert 1 == sender.wait("Fenced")["generation"]
    assert 2 == sender.wait("Ready")["generation"]
    sender.tell("fill", seed=8)
    sender.wait("Filled")
    sender.tell("digest", operation=900, offset=0, nbytes=KIB)
    while (answer := sender.wait("Completed"))["operation"] != 900:
        # Those of the first generation that had completed before the fence.
        assert answer["ok"]
    flood(sender, peer, count=1)
    assert sender.wait("Completed")["ok"]
    assert sender.ask_digest() == receiver.ask_digest()
