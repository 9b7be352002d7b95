"""Tables are closed, drawn and refuse what they do not list; so are the machines' own."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import pytest

from pdcluster_protocol.alone import ALONE
from pdcluster_protocol.errors import IllegalTransition, Reason
from pdcluster_protocol.messages import KVPoll
from pdcluster_protocol.pair import TABLE as PAIR
from pdcluster_protocol.push import receiver, sender
from pdcluster_protocol.table import Table


class Lamp(StrEnum):
    OFF = "Off"
    ON = "On"
    BROKEN = "Broken"


class Press(StrEnum):
    SWITCH = "Switch"
    HAMMER = "Hammer"


LAMP = Table[Lamp, Press](
    "lamp",
    initial=Lamp.OFF,
    terminals=(Lamp.BROKEN,),
    transitions={
        (Lamp.OFF, Press.SWITCH): Lamp.ON,
        (Lamp.ON, Press.SWITCH): Lamp.OFF,
        (Lamp.ON, Press.HAMMER): Lamp.BROKEN,
    },
)


def states_of(table: Table[Any, Any]) -> set[Any]:
    return set(type(table.initial).__members__.values())


TABLES: list[Table[Any, Any]] = [sender.SENDER, receiver.RECEIVER, ALONE, PAIR]


def test_a_listed_pair_leads_on_and_another_one_is_our_bug() -> None:
    assert Lamp.ON is LAMP.advance(Lamp.OFF, Press.SWITCH)
    assert LAMP.allows(Lamp.ON, Press.HAMMER)
    assert not LAMP.allows(Lamp.OFF, Press.HAMMER)
    with pytest.raises(IllegalTransition, match="lamp: no Hammer in Off") as caught:
        LAMP.advance(Lamp.OFF, Press.HAMMER)
    assert Reason.ILLEGAL_TRANSITION is caught.value.reason


def test_a_terminal_state_that_is_left_is_refused_when_the_table_is_made() -> None:
    with pytest.raises(ValueError, match=r"lamp: terminal states must not be left: .*Off"):
        Table("lamp", initial=Lamp.OFF, terminals=(Lamp.OFF,), transitions=LAMP.transitions)


def test_the_diagram_names_every_step() -> None:
    expected = """\
stateDiagram-v2
    [*] --> Off
    Off --> On: Switch
    On --> Off: Switch
    On --> Broken: Hammer
    Broken --> [*]
"""
    assert expected == LAMP.mermaid()


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_state_is_reached_and_leads_to_an_end(table: Table[Any, Any]) -> None:
    states = states_of(table)
    reached, ends = {table.initial}, set(table.terminals)
    for _ in states:
        reached |= {after for (before, _), after in table.transitions.items() if before in reached}
        ends |= {before for (before, _), after in table.transitions.items() if after in ends}

    assert states == reached
    assert states == ends


@pytest.mark.parametrize("table", [sender.SENDER, receiver.RECEIVER, ALONE], ids=lambda t: t.name)
def test_a_fault_is_possible_wherever_something_still_runs(table: Table[Any, Any]) -> None:
    fault = next(trigger for _, trigger in table.transitions if trigger == "Fault")
    waiting_for_the_end = {"Draining", "Stopping"}

    assert waiting_for_the_end >= {
        state
        for state in states_of(table)
        if state not in table.terminals and not table.allows(state, fault)
    }


@pytest.mark.parametrize(
    ("table", "polls"),
    [(sender.SENDER, sender.KVPOLL), (receiver.RECEIVER, receiver.KVPOLL)],
    ids=["sender", "receiver"],
)
def test_kvpoll_never_goes_back_except_to_failed(
    table: Table[Any, Any], polls: dict[Any, KVPoll]
) -> None:
    assert states_of(table) == set(polls)
    for (before, trigger), after in table.transitions.items():
        if trigger == "Fault":
            assert KVPoll.FAILED is polls[after]
        else:
            assert polls[before] is KVPoll.FAILED or polls[after] >= polls[before]


def test_pages_of_a_failed_room_are_let_go_only_after_draining() -> None:
    for table in (sender.SENDER, receiver.RECEIVER):
        failed = next(state for state in table.terminals if state == "Failed")
        into = {before for (before, _), after in table.transitions.items() if after == failed}
        # No page number had left decode, and no page of prefill was taken, in the others.
        assert into <= {"Bootstrapping", "Resolving", "Admitting", "Draining", "Stopping"}
