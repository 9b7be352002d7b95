"""Events and effects in words: what a golden trace is written in."""

from __future__ import annotations

from collections.abc import Callable

from pdcluster_protocol import effects as fx
from pdcluster_protocol import events as ev
from pdcluster_protocol import messages as msg
from pdcluster_protocol.errors import Reason
from pdcluster_protocol.push.pairing import page_numbers
from simulation.memory import LAYOUT


def _pages(pages: tuple[int, ...]) -> str:
    return f"pages {list(pages)}"


def _region(region: int) -> str:
    if region < len(LAYOUT.regions):
        return f"region {LAYOUT.regions[region].name}"
    return f"metadata buffer {region - len(LAYOUT.regions)}"


def _runs(runs: tuple[msg.Run, ...]) -> str:
    names = ", ".join(f"{_region(r.region)} page {r.first_page}+{r.pages}" for r in runs[:2])
    more = f" and {len(runs) - 2} more" if len(runs) > 2 else ""
    return f"landed: {names}{more}"


def _status(message: msg.Status) -> str:
    name = msg.KVPoll(message.status).name
    tail = f", {message.runs} runs" if message.runs else f": {message.reason} ({message.detail})"
    last = f", {_runs(message.landed)}" if message.landed else ""
    proof = "" if message.drained else ", an earlier write ended without proof"
    return f"STATUS {name}{tail}{last}{proof}"


MESSAGES: dict[type, Callable[..., str]] = {
    msg.RegisterKVArgs: lambda m: f"REGISTER memory under session {m.session}",
    msg.TransferMetadata: lambda m: (
        f"METADATA {_pages(page_numbers(m) or ())}, slot {m.aux_index}, {m.prompt_tokens} tokens"
    ),
    msg.Abort: lambda m: (
        "ABORT" + (f", generation {m.generation}" if m.generation else ", nothing was published")
    ),
    msg.AbortAck: lambda m: (
        f"ABORT_ACK, generation {m.generation}"
        + ("" if m.drained else ", but a write ended without proof")
    ),
    msg.Accepted: lambda _: "ACCEPTED",
    msg.RunsLanded: lambda m: f"RUNS {_runs(m.runs)}",
    msg.Status: _status,
    msg.Concluded: lambda m: f"CONCLUDED {msg.KVPoll(m.status).name} {m.reason}".rstrip(),
}


def _end(reason: Reason | None, detail: str) -> str:
    return "ends well" if reason is None else f"fails: {reason} ({detail})"


TELL: dict[type, Callable[..., str]] = {
    ev.Joined: lambda e: f"joined as {e.incarnation}",
    ev.TransportReady: lambda e: f"transport ready, session {e.session}",
    ev.TransportLost: lambda e: f"transport lost: {e.detail}",
    ev.LegArrived: lambda e: f"a leg arrives: {e.prompt_tokens} tokens, room {e.key.room}",
    ev.LegCancelled: lambda e: f"the leg is cancelled: {e.reason} ({e.detail})",
    ev.PeerResolved: lambda e: f"{e.bootstrap} is {e.card.incarnation if e.card else e.reason}",
    ev.MessageArrived: lambda e: MESSAGES[type(e.message)](e.message),
    ev.PeerStateChanged: lambda e: f"{e.incarnation} is {e.state}: {e.detail}",
    ev.RowsWritten: lambda e: f"rows {e.start}..{e.end} of {_region(e.region)} are final",
    ev.PromptComputed: lambda _: "the prompt is computed, the first token chosen",
    ev.ComputeStopped: lambda e: f"the model let go {e.reason or ''}".rstrip(),
    ev.OperationDone: lambda e: f"operation {e.operation} {'is done' if e.ok else 'failed'}",
    ev.MetadataRead: lambda e: f"the slot says room {e.room}",
    ev.DecodeFinished: lambda _: "the last token is out",
    ev.Tick: lambda _: "a deadline",
    fx.ResolvePeer: lambda e: f"who serves {e.bootstrap}?",
    fx.Send: lambda e: f"to {e.to.host}: {MESSAGES[type(e.message)](e.message)}",
    fx.StartPrefill: lambda e: f"compute the prompt into {_pages(e.pages)}, slot {e.slot}",
    fx.StartDecode: lambda e: f"decode from {_pages(e.pages)}, first token in slot {e.slot}",
    fx.StopCompute: lambda _: "stop computing",
    fx.Write: lambda e: f"write {e.nbytes} bytes to {e.target} (operation {e.operation})",
    fx.VerifyRun: lambda e: f"verify {e.nbytes} bytes (operation {e.operation})",
    fx.ReadMetadata: lambda e: f"read the room of slot {e.slot}",
    fx.ClearMetadata: lambda e: f"clear slot {e.slot}",
    fx.ConcludeLeg: lambda e: f"the leg {_end(e.reason, e.detail)}",
    fx.Fence: lambda e: f"FENCE for {e.pages} pages: {e.cause}",
    fx.Report: lambda e: f"A FAULT OF OURS: {e.reason} ({e.detail})",
    fx.Count: lambda e: f"count {e.what}",
    fx.CountBytes: lambda e: f"count {e.nbytes} {e.kind} bytes",
}


def tell(what: object) -> str:
    """One event or effect as a clause."""
    return TELL[type(what)](what)


class Story:
    """Collects the lines of a trace; doubled lines of one moment are counted, not repeated."""

    def __init__(self, title: str) -> None:
        self._lines = [title, ""]
        self._last = ""

    def log(self, now: float, who: str, what: object) -> None:
        if isinstance(what, fx.CountBytes):
            return
        self._lines.append(f"{now * 1000:8.1f} ms  {who} {tell(what)}")

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"
