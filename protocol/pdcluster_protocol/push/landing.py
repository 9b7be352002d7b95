"""What has landed for one decode room in one of our ranks, and whether all of it is verified.

Every prefill rank announces its runs and, with its Success, how many there are. A run is checked
against the request's own pages first (peer input), then its bytes are hashed by the executor. Order
3 is this module: `complete` is True only when every rank said Success, every announced run of every
rank is verified, and together they cover every row of every region and metadata buffer once.
"""

from __future__ import annotations

from pdcluster_protocol.effects import VerifyRun
from pdcluster_protocol.ledger import Ledger
from pdcluster_protocol.messages import Run, RunsLanded, Status
from pdcluster_protocol.push.runs import coverage_fault, run_fault
from pdcluster_protocol.ranks import OwnRank


class Landing:
    """Verification state of one room in one of our ranks."""

    __slots__ = (
        "_announced",
        "_ledger",
        "_own",
        "_pages",
        "_positions",
        "_prompt_tokens",
        "_ranks",
        "_runs",
        "_slot",
        "_verified",
        "_verifying",
        "drained",
    )

    def __init__(
        self,
        ledger: Ledger,
        own: OwnRank,
        *,
        pages: tuple[int, ...],
        slot: int,
        prompt_tokens: int,
        ranks: frozenset[int],
    ) -> None:
        self._ledger = ledger
        self._own = own
        self._pages = pages[: ledger.setup.layout.pages_for(prompt_tokens)]
        self._positions = {page: position for position, page in enumerate(self._pages)}
        self._slot = slot
        self._prompt_tokens = prompt_tokens
        self._ranks = ranks
        self._runs: dict[tuple[int, int], Run] = {}
        self._verifying: dict[int, tuple[int, int]] = {}
        self._verified: set[tuple[int, int]] = set()
        self._announced: dict[int, int] = {}
        self.drained = True
        """False when a rank said that an earlier write ended without proof."""

    @property
    def prompt_pages(self) -> tuple[int, ...]:
        """The pages that prefill writes: those of the prompt, without the answer's."""
        return self._pages

    def operations(self) -> tuple[int, ...]:
        """Verifications that are under way."""
        return tuple(self._verifying)

    def announce(self, message: RunsLanded) -> str:
        """Take announced runs and start to verify them; what is wrong with one, or empty."""
        if message.rank not in self._ranks:
            return f"rank {message.rank} is none of {sorted(self._ranks)}"
        place = self._own.place
        runs_max = len(place.layout.regions) * len(self._pages) + len(place.metadata.rows)
        for run in message.runs:
            if not 0 <= run.index < runs_max:
                return f"run {run.index} of rank {message.rank}: there are at most {runs_max}"
            name = (message.rank, run.index)
            known = self._runs.get(name)
            if known is not None:
                if known != run:
                    return f"run {run.index} of rank {message.rank} was announced twice, unequal"
                continue
            fault = run_fault(
                run,
                layout=place.layout,
                page_positions=self._positions,
                metadata_rows=self._own.place.metadata.rows,
                slot=self._slot,
            )
            if fault:
                return fault
            self._runs[name] = run
            self._verify(name, run)
        return ""

    def succeeded(self, status: Status) -> None:
        """A rank has announced everything."""
        if status.rank in self._ranks:
            self._announced[status.rank] = status.runs
            self.drained = self.drained and status.drained

    def verified(self, operation: int, digest: int) -> Run | None:
        """A verification ended; the run whose bytes are not what prefill read, if any."""
        name = self._verifying.pop(operation, None)
        if name is None:
            return None
        run = self._runs[name]
        if run.digest != digest:
            return run
        self._verified.add(name)
        return None

    def restart(self) -> None:
        """The transport was replaced: verifications under way are lost, ask again."""
        lost = list(self._verifying.values())
        self._verifying.clear()
        for name in lost:
            self._verify(name, self._runs[name])

    @property
    def complete(self) -> bool:
        """Whether every rank succeeded and every run it announced is verified."""
        if self._announced.keys() != self._ranks or self._verifying:
            return False
        return len(self._verified) == len(self._runs) == sum(self._announced.values())

    def coverage_fault(self) -> str:
        """What a complete list of runs does not cover; empty when nothing is missing."""
        return coverage_fault(
            [self._runs[name] for name in sorted(self._runs)],
            layout=self._own.place.layout,
            pages=self._pages,
            prompt_tokens=self._prompt_tokens,
            metadata_rows=self._own.place.metadata.rows,
        )

    def _verify(self, name: tuple[int, int], run: Run) -> None:
        if not self._ledger.setup.verify:
            self._verified.add(name)
            return
        operation = self._ledger.next_operation()
        self._verifying[operation] = name
        self._ledger.emit(self._verification(operation, run))

    def _verification(self, operation: int, run: Run) -> VerifyRun:
        place, rank = self._own.place, self._own.index
        layout = place.layout
        if run.region >= len(layout.regions):
            offset = place.metadata.row_offset(run.region - len(layout.regions), run.first_page)
            return VerifyRun(operation, offset, run.nbytes, rank)
        offset = layout.page_offset(run.region, run.first_page, self._ledger.setup.page_count)
        row = layout.regions[run.region].bytes_per_token
        if run.width in (0, row):
            return VerifyRun(operation, offset, run.nbytes, rank)
        pieces = run.nbytes // run.width
        return VerifyRun(operation, offset + run.offset, run.width, rank, pieces, row)


def last_runs(status: Status, epoch: int) -> RunsLanded:
    """What a status announces; one without runs is of no epoch."""
    of = status.epoch if status.landed else epoch
    return RunsLanded(status.key, status.rank, of, status.landed)
