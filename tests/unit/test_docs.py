"""What the documentation draws and tabulates is what the code does."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pdcluster_protocol.alone import ALONE
from pdcluster_protocol.messages import KVPoll
from pdcluster_protocol.pair import TABLE as PAIR
from pdcluster_protocol.push import receiver, sender
from pdcluster_protocol.table import Table
from support.guards import ROOT

ROOMS = (ROOT / "docs/concepts/rooms.md").read_text(encoding="utf-8")
DIAGRAMS = re.findall(r"^```mermaid\n(.*?)^```$", ROOMS, re.MULTILINE | re.DOTALL)
TABLES: list[Table[Any, Any]] = [sender.SENDER, receiver.RECEIVER, ALONE, PAIR]


@pytest.mark.parametrize("at", range(len(TABLES)), ids=[table.name for table in TABLES])
def test_a_diagram_is_drawn_from_its_table(at: int) -> None:
    assert len(TABLES) == len(DIAGRAMS)
    assert TABLES[at].mermaid() == DIAGRAMS[at]


def test_kvpoll_is_tabulated_as_it_is() -> None:
    def states(polls: dict[Any, KVPoll], value: KVPoll) -> str:
        # A dictionary of polls is written in the order of the states.
        return ", ".join(state for state in polls if polls[state] is value)

    rows = {
        int(number): (senders, receivers)
        for number, senders, receivers in re.findall(
            r"^\| `\w+` (\d) \| ([\w, ]+) \| ([\w, ]+) \|$", ROOMS, re.MULTILINE
        )
    }
    expected = {
        int(value): (states(sender.KVPOLL, value), states(receiver.KVPOLL, value))
        for value in KVPoll
    }
    assert expected == rows
