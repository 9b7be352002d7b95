"""A warm parent: everything imported, nothing computed, engines forked from it in milliseconds.

Importing torch and transformers costs seconds of CPU in each process; a fork after the import
costs none of it. The nursery keeps one thread and never runs a forward, because a child of a
process with worker threads could hang in a lock that no thread of its own will open.

The supervisor talks in JSON lines, requests on standard input, answers on standard output:

    → {"op": "fork", "config": PATH, "log": PATH, "env": {NAME: VALUE}}
    ← {"pid": N}, or {"error": TEXT} for what cannot be done
    ← {"ready": THREADS} once, when it is warm
    ← {"exit": N, "status": S} whenever a child has ended

A negative status is a signal. The end of standard input ends the nursery; its children, tied to
it by the kernel, die with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import traceback
from pathlib import Path

import msgspec

from pdcluster_engine.environment import PARENT_PID_VARIABLE, follow_parent, prepare_environment
from pdcluster_protocol.errors import ConfigError

_LINE_BYTES_MAX = 1 << 20
_IMPORTED = (
    "torch",
    "transformers",
    "transformers.masking_utils",
    "transformers.models.llama.modeling_llama",
    "transformers.models.glm_moe_dsa.modeling_glm_moe_dsa",
    "pdcluster_engine.model.loading",
    "pdcluster_engine.assembly",
    "pdcluster_engine.serving",
)


class ForkRequest(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="op", tag="fork"
):
    """Start an engine with this configuration file, its output appended to this log."""

    config: str
    log: str
    env: dict[str, str] = {}


def main() -> int:
    """Warm up, then serve the supervisor until its end of the pipe closes."""
    # Ctrl-C in a terminal is the supervisor's to answer; our end is the end of standard input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare_environment()
    try:
        follow_parent()
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for module in _IMPORTED:
        importlib.import_module(module)
    gc.collect()
    # Pages that the collector never visits again stay shared with the children.
    gc.freeze()
    _answer(ready=len(list(Path("/proc/self/task").iterdir())))
    return _serve()


def _serve() -> int:
    received, woken = _child_exits()
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(received, selectors.EVENT_READ)
    pending = b""
    while True:
        # Nothing falls due here: the supervisor speaks, or a child ends.
        for key, _ in selector.select():
            if key.fileobj is received:
                received.recv(4096)
                _reap()
                continue
            chunk = os.read(0, 65536)
            if not chunk:
                return 0
            *lines, pending = (pending + chunk).split(b"\n")
            if len(pending) > _LINE_BYTES_MAX:
                _answer(error=f"a line of more than {_LINE_BYTES_MAX} bytes")
                return 1
            for line in lines:
                _handle(line, woken)


def _child_exits() -> tuple[socket.socket, socket.socket]:
    """A socket that becomes readable when a child ends, and its other end, which must stay open."""
    received, woken = socket.socketpair()
    for end in (received, woken):
        end.settimeout(0)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    # With the default action no signal would reach the wake-up descriptor.
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    return received, woken


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _answer(exit=pid, status=os.waitstatus_to_exitcode(status))


def _handle(line: bytes, woken: socket.socket) -> None:
    try:
        request = msgspec.json.decode(line, type=ForkRequest)
        log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, OSError) as error:
        _answer(error=str(error))
        return
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become_engine(request, log, parent, woken)
    os.close(log)
    _answer(pid=pid)


def _become_engine(request: ForkRequest, log: int, parent: int, woken: socket.socket) -> None:
    """In the child: shed what is the nursery's and run the engine's own main; never returns."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        woken.close()
        _replace_descriptors(log)
        os.environ.update(request.env)
        os.environ[PARENT_PID_VARIABLE] = str(parent)
        from pdcluster_engine.process import main as engine_main

        status = engine_main(["--config", request.config])
    except BaseException:  # noqa: BLE001  The outermost frame of this process.
        traceback.print_exc()
    finally:
        # Never back into the nursery's loop, whatever happened.
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(status)


def _replace_descriptors(log: int) -> None:
    """Standard input from nowhere, both outputs to the log, all others closed."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for name in [path.name for path in Path("/proc/self/fd").iterdir()]:
        if int(name) > 2:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _answer(**fields: int | str) -> None:
    """One line; a supervisor that no longer reads shows as end of input."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, msgspec.json.encode(fields) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
