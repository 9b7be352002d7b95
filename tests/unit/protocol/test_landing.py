"""Order 3: complete is what every rank announced, and every byte of it verified, once."""

from __future__ import annotations

import msgspec
import pytest

from pdcluster_protocol.effects import VerifyRun
from pdcluster_protocol.ledger import Ledger
from pdcluster_protocol.messages import KVPoll, Run, RunsLanded, Status
from pdcluster_protocol.push.landing import Landing
from support.ledgers import LAYOUT, joined_ledger, key

# 10 tokens in pages 5, 6 and 2; page 9 is for the answer.
PAGES = (5, 6, 2, 9)
SLOT = 1
RUNS = (
    Run(0, 0, 5, 2, 48, 100),
    Run(1, 0, 2, 1, 12, 101),
    Run(2, 1, 5, 2, 16, 102),
    Run(3, 1, 2, 1, 4, 103),
    Run(4, 2, 5, 2, 24, 104),
    Run(5, 2, 2, 1, 6, 105),
    Run(6, 3, SLOT, 1, 16, 106),
    Run(7, 4, SLOT, 1, 8, 107),
)


def landing_on(ledger: Ledger, *ranks: int) -> Landing:
    named = frozenset(ranks or (0,))
    own = ledger.ranks[0]
    return Landing(ledger, own, pages=PAGES, slot=SLOT, prompt_tokens=10, ranks=named)


def announce(landing: Landing, *runs: Run, rank: int = 0) -> str:
    return landing.announce(RunsLanded(key(), rank, 1, runs))


def success(runs: int, *, rank: int = 0, drained: bool = True) -> Status:
    return Status(key(), KVPoll.SUCCESS, rank, runs=runs, drained=drained)


def verify_all(landing: Landing, ledger: Ledger, runs: tuple[Run, ...] = RUNS) -> None:
    asked = [e for e in ledger.take_effects() if isinstance(e, VerifyRun)]
    for effect, run in zip(asked, runs, strict=True):
        assert landing.verified(effect.operation, run.digest) is None


@pytest.fixture
def ledger() -> Ledger:
    return joined_ledger()


@pytest.fixture
def landing(ledger: Ledger) -> Landing:
    return landing_on(ledger)


def test_prefill_writes_the_pages_of_the_prompt_only(landing: Landing) -> None:
    assert (5, 6, 2) == landing.prompt_pages


def test_it_is_complete_only_with_the_last_run_verified_and_announced(
    ledger: Ledger, landing: Landing
) -> None:
    assert not landing.complete
    assert "" == announce(landing, *RUNS[:-1])
    verify_all(landing, ledger, RUNS[:-1])
    landing.succeeded(success(8))
    assert not landing.complete
    announce(landing, RUNS[-1])
    assert not landing.complete
    verify_all(landing, ledger, RUNS[-1:])

    assert landing.complete
    assert "" == landing.coverage_fault()


def test_verified_runs_without_a_final_word_are_not_complete(
    ledger: Ledger, landing: Landing
) -> None:
    announce(landing, *RUNS)
    verify_all(landing, ledger)

    assert not landing.complete


def test_nothing_announced_and_nothing_written_covers_nothing(landing: Landing) -> None:
    landing.succeeded(success(0))

    assert "" != landing.coverage_fault()


def test_runs_may_end_in_any_order(ledger: Ledger, landing: Landing) -> None:
    shuffled = [RUNS[i] for i in (7, 1, 5, 0, 3, 6, 4, 2)]
    runs = tuple(msgspec.structs.replace(run, index=i) for i, run in enumerate(shuffled))
    announce(landing, *runs)
    verify_all(landing, ledger, runs)
    landing.succeeded(success(8))

    assert landing.complete
    assert "" == landing.coverage_fault()


def test_a_run_is_hashed_where_it_lies_and_once(ledger: Ledger, landing: Landing) -> None:
    announce(landing, RUNS[0], RUNS[3], RUNS[7])
    announce(landing, RUNS[0])

    assert [
        VerifyRun(1, LAYOUT.page_offset(0, 5, 16), 48),
        VerifyRun(2, LAYOUT.page_offset(1, 2, 16), 4),
        VerifyRun(3, 20016 + SLOT * 24, 8),
    ] == ledger.take_effects()


def test_other_bytes_than_prefill_read_are_named_and_never_complete(
    ledger: Ledger, landing: Landing
) -> None:
    announce(landing, *RUNS)
    landing.succeeded(success(8))
    asked = [e for e in ledger.take_effects() if isinstance(e, VerifyRun)]
    for effect, run in zip(asked[1:], RUNS[1:], strict=True):
        landing.verified(effect.operation, run.digest)

    assert RUNS[0] == landing.verified(asked[0].operation, 999)
    assert not landing.complete
    assert landing.verified(asked[0].operation, RUNS[0].digest) is None
    assert not landing.complete


@pytest.mark.parametrize(
    ("run", "what"),
    [
        (
            msgspec.structs.replace(RUNS[0], digest=1),
            "run 0 of rank 0 was announced twice, unequal",
        ),
        (Run(8, 0, 9, 1, 24, 0), "page 9 of run 8 is not of this request"),
        (Run(8, 0, 6, 2, 48, 0), "page 7 of run 8 is not of this request"),
        (Run(8, 3, 0, 1, 16, 0), "metadata run 8 is not of slot 1"),
        (Run(-1, 0, 5, 1, 24, 0), "run -1 of rank 0: there are at most 11"),
        (Run(11, 0, 5, 1, 24, 0), "run 11 of rank 0: there are at most 11"),
    ],
    ids=str,
)
def test_a_run_that_cannot_be_is_a_fault(
    ledger: Ledger, landing: Landing, run: Run, what: str
) -> None:
    announce(landing, RUNS[0])
    ledger.take_effects()

    assert what == announce(landing, run)
    assert [] == ledger.take_effects()


def test_a_rank_that_was_given_no_addresses_is_a_fault(landing: Landing) -> None:
    assert "rank 1 is none of [0]" == announce(landing, RUNS[0], rank=1)
    landing.succeeded(success(0, rank=1, drained=False))

    assert landing.drained
    assert not landing.complete


def test_every_rank_must_have_said_its_last_word(ledger: Ledger) -> None:
    landing = landing_on(ledger, 0, 1)
    first, second = RUNS[:4], tuple(msgspec.structs.replace(r, index=r.index - 4) for r in RUNS[4:])
    announce(landing, *first)
    announce(landing, *second, rank=1)
    verify_all(landing, ledger, first + second)
    landing.succeeded(success(4))
    assert not landing.complete
    landing.succeeded(success(4))
    assert not landing.complete
    landing.succeeded(success(4, rank=1))

    assert landing.complete
    assert "" == landing.coverage_fault()


def test_verifications_that_a_transport_took_along_are_asked_again(
    ledger: Ledger, landing: Landing
) -> None:
    announce(landing, *RUNS)
    asked = [e for e in ledger.take_effects() if isinstance(e, VerifyRun)]
    for effect, run in zip(asked[:6], RUNS[:6], strict=True):
        landing.verified(effect.operation, run.digest)
    landing.restart()
    landing.succeeded(success(8))
    again = landing.operations()

    assert landing.verified(asked[6].operation, RUNS[6].digest) is None
    assert not landing.complete
    assert set(again).isdisjoint(e.operation for e in asked)
    verify_all(landing, ledger, RUNS[6:])
    assert landing.complete


def test_a_write_without_proof_is_remembered_over_all_ranks(ledger: Ledger) -> None:
    landing = landing_on(ledger, 0, 1)
    landing.succeeded(success(0, drained=False))
    landing.succeeded(success(0, rank=1))
    landing.succeeded(success(0))

    assert not landing.drained


def test_without_checksums_what_is_announced_counts_but_must_still_cover_everything() -> None:
    ledger = joined_ledger(verify=False)
    landing = landing_on(ledger)
    announce(landing, *RUNS[:-1])
    landing.succeeded(success(7))

    assert [] == ledger.take_effects()
    assert landing.complete
    assert "metadata buffers [1] are missing" == landing.coverage_fault()
