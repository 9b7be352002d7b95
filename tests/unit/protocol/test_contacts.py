"""Which sessions our transports have written to are gone, rank by rank."""

from __future__ import annotations

from pdcluster_protocol.contacts import Contacts


def written(*sessions: str, rank_count: int = 1) -> Contacts:
    contacts = Contacts(rank_count)
    for session in sessions:
        contacts.wrote(0, session)
    return contacts


def test_a_session_that_was_never_written_to_is_no_contact() -> None:
    contacts = written("a")
    contacts.remain({"a"})

    assert 0 == contacts.gone


def test_what_was_written_to_and_does_not_remain_is_gone() -> None:
    contacts = written("a", "b", "b", "c")
    contacts.remain({"b", "never written"})

    assert 2 == contacts.gone


def test_a_session_that_comes_again_is_not_gone() -> None:
    contacts = written("a")
    contacts.remain(())
    contacts.remain({"a"})

    assert 0 == contacts.gone


def test_a_session_written_to_after_its_end_is_found_at_the_next_change() -> None:
    contacts = written("a")
    contacts.remain({"b"})
    contacts.wrote(0, "old")
    contacts.remain({"b"})

    assert 2 == contacts.gone


def test_each_rank_counts_for_itself_and_forgets_with_its_transport() -> None:
    contacts = written("a", "b", "c", rank_count=2)
    contacts.wrote(1, "a")
    contacts.remain(())
    assert 3 == contacts.gone
    contacts.forget_rank(0)
    assert 1 == contacts.gone
    contacts.remain(())
    assert 1 == contacts.gone
    contacts.forget_rank(1)

    assert 0 == contacts.gone
