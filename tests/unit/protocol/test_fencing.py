"""A fence is lazy, has a cause, and there is one at a time."""

from __future__ import annotations

from pdcluster_protocol.admission import Need
from pdcluster_protocol.effects import Fence
from pdcluster_protocol.fencing import Fencing
from pdcluster_protocol.ledger import Ledger
from pdcluster_protocol.limits import Limits
from support.ledgers import joined_ledger, key


def ledger_with_waiting_pages(pages: int = 1, *, needs_fence: bool = True) -> Ledger:
    ledger = joined_ledger(page_count=100, limits=Limits(quarantine_fraction_max=0.05))
    for pool in (ledger.pool, ledger.slots):
        pool.reserve(key(), pages if pool is ledger.pool else 1)
        pool.quarantine(key(), 0.0, needs_fence=needs_fence)
    return ledger


def causes(ledger: Ledger, *, bystanders: int = 1) -> list[str]:
    Fencing(ledger).consider(bystanders=bystanders)
    effects = ledger.take_effects()
    assert all(isinstance(effect, Fence) for effect in effects)
    return [effect.cause for effect in effects if isinstance(effect, Fence)]


def test_it_waits_while_it_would_delay_others_without_need() -> None:
    assert [] == causes(ledger_with_waiting_pages())


def test_it_comes_at_once_when_nobody_is_delayed() -> None:
    ledger = ledger_with_waiting_pages(3)
    Fencing(ledger).consider(bystanders=0)

    assert [Fence(cause="nobody is delayed", pages=3)] == ledger.take_effects()


def test_pages_that_an_acknowledgement_can_free_are_no_cause() -> None:
    assert [] == causes(ledger_with_waiting_pages(50, needs_fence=False), bystanders=0)


def test_it_comes_when_quarantine_passes_its_share() -> None:
    assert [] == causes(ledger_with_waiting_pages(5))
    assert ["quarantine passed its bound"] == causes(ledger_with_waiting_pages(6))


def test_it_comes_when_the_first_in_line_lacks_pages() -> None:
    ledger = ledger_with_waiting_pages()
    ledger.queue.add(key(2), Need(99, slot=True))
    assert [] == causes(ledger)
    ledger.queue.remove(key(2))
    ledger.queue.add(key(3), Need(100, slot=True))

    assert ["a request waits for these pages"] == causes(ledger)


def test_it_comes_when_the_first_in_line_lacks_a_slot() -> None:
    ledger = ledger_with_waiting_pages()
    ledger.slots.reserve(key(8), 3)
    ledger.queue.add(key(2), Need(1, slot=False))
    assert [] == causes(ledger)
    ledger.queue.remove(key(2))
    ledger.queue.add(key(3), Need(1, slot=True))

    assert ["a request waits for these pages"] == causes(ledger)


def test_it_comes_when_the_pages_waited_ten_abort_budgets() -> None:
    ledger = ledger_with_waiting_pages()
    ledger.now = 300.0
    assert [] == causes(ledger)
    ledger.now = 300.1

    assert ["the pages waited too long"] == causes(ledger)


def test_there_is_one_at_a_time_and_none_without_a_transport() -> None:
    ledger = ledger_with_waiting_pages()
    assert 1 == len(causes(ledger, bystanders=0))
    assert ledger.fencing
    assert [] == causes(ledger, bystanders=0)

    down = ledger_with_waiting_pages()
    down.ranks[0].session = None
    assert [] == causes(down, bystanders=0)
    assert not down.fencing


def ledger_with_gone_sessions(count: int) -> Ledger:
    ledger = joined_ledger(limits=Limits(gone_sessions_idle_max=2, gone_sessions_max=5))
    for number in range(count):
        ledger.contacts.wrote(0, f"session {number}")
    ledger.contacts.remain(())
    return ledger


def test_it_drops_connections_to_some_gone_sessions_when_nobody_is_delayed() -> None:
    assert [] == causes(ledger_with_gone_sessions(2), bystanders=0)
    assert ["connections to more than 2 sessions that are gone"] == causes(
        ledger_with_gone_sessions(3), bystanders=0
    )


def test_it_drops_connections_to_many_gone_sessions_whoever_is_delayed() -> None:
    assert [] == causes(ledger_with_gone_sessions(5))
    assert ["connections to more than 5 sessions that are gone"] == causes(
        ledger_with_gone_sessions(6)
    )


def test_its_new_transport_has_no_connections() -> None:
    ledger = ledger_with_gone_sessions(6)
    assert 1 == len(causes(ledger))
    ledger.transport_lost(0)
    ledger.transport_ready(0, "new", 0)

    assert [] == causes(ledger, bystanders=0)
