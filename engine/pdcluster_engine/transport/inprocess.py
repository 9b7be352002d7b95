"""Mooncake inside the engine's own process, for memory that no other process can map.

Device memory belongs to the process that allocated it, so the library's engine must live there too.
One thread owns it and runs the same loop as a transfer process; the owner thread holds the same
state machine (`supervised`). What is different, and weaker:

* The fence is the destruction of the library's engine (unregister, then its destructor): about one
  second, in which no Python thread runs. Over TCP it was measured to stop every write. Over RDMA it
  closes the queue pairs and drops the memory keys, and must be measured on the hardware before
  anybody relies on it (`docs/howto/cuda.md`).
* A thread cannot be killed. When the library does not come back, no fence can be had here: `Died`
  is final, and the end of the engine's process is the fence.
* The arena cannot move, so the next generation has the old base address. Peers that still write to
  an ended generation are stopped by its port, which is kept taken, and over RDMA by its keys.
* The library logs to the engine's own stderr, so a failed write has no cause beside its code.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import deque

from pdcluster_engine.memory.window import ArenaMemory
from pdcluster_engine.transport.causes import StderrTail
from pdcluster_engine.transport.channel import Channel, ChannelClosed
from pdcluster_engine.transport.contact import unguarded
from pdcluster_engine.transport.life import Life
from pdcluster_engine.transport.mooncake import MooncakeAdapter, Settings
from pdcluster_engine.transport.port import OPERATIONS_MAX, Request, TransportEvent
from pdcluster_engine.transport.process import FromProcess, Started, Worker, say_farewell
from pdcluster_engine.transport.supervised import SupervisedTransport
from pdcluster_protocol.errors import ConfigError, PDClusterError

END_SECONDS = 75.0
"""The library holds a first contact with a hung peer for 60 s, and destruction takes one more."""
CLOSE_SECONDS = 5.0
RETIRED_PORTS_MAX = 8
SELECT_DESCRIPTORS = 1024
"""`select`, which alone waits for microseconds, takes no descriptor from here on."""


class InProcessTransport:
    """`port.Transport` over a Mooncake engine in a thread of this process."""

    __slots__ = ("_inner", "_retired")

    def __init__(
        self,
        settings: Settings,
        memory: ArenaMemory,
        *,
        operations_max: int = OPERATIONS_MAX,
        end_seconds: float = END_SECONDS,
    ) -> None:
        """Use (not own) `memory`, which must outlive this; nothing runs before `start`."""
        retired = RetiredPorts()

        def begin(_address: int) -> Life:
            return AdapterThread(settings, memory, retired=retired, end_seconds=end_seconds)

        self._retired = retired
        self._inner = SupervisedTransport(
            settings, arena_nbytes=memory.nbytes, begin=begin, operations_max=operations_max
        )

    @property
    def generation(self) -> int:
        """The number of the latest start."""
        return self._inner.generation

    def start(self) -> None:
        """See `port.Transport`."""
        self._inner.start()

    def fileno(self) -> int:
        """See `port.Transport`."""
        return self._inner.fileno()

    def events(self) -> list[TransportEvent]:
        """See `port.Transport`."""
        return self._inner.events()

    def submit(self, request: Request) -> None:
        """See `port.Transport`."""
        self._inner.submit(request)

    def fence(self) -> None:
        """See `port.Transport`."""
        self._inner.fence()

    def close(self) -> None:
        """See `port.Transport`; waits until the library's engine is destroyed, 5 s at most."""
        self._inner.close()
        self._retired.close()


class AdapterThread:
    """A `Life`: one library engine, made, used and destroyed by one thread."""

    def __init__(
        self,
        settings: Settings,
        memory: ArenaMemory,
        *,
        retired: RetiredPorts,
        end_seconds: float = END_SECONDS,
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        if theirs.fileno() >= SELECT_DESCRIPTORS:
            ours.close()
            theirs.close()
            raise OSError(f"no descriptor below {SELECT_DESCRIPTORS} is free")
        self._settings = settings
        self._memory = memory
        self._retired = retired
        self._end_seconds = end_seconds
        self._session_name = ""
        self.channel: Channel[FromProcess] = Channel(ours, FromProcess)
        self._theirs: Channel[Request] = Channel(theirs, Request)
        self._stderr_fd, self._stderr_end = os.pipe()
        self.stderr = StderrTail(self._stderr_fd)
        self._end_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._end_lock = threading.Lock()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)
        self._thread.start()

    @property
    def end_seconds(self) -> float | None:
        """See `Life`."""
        return self._end_seconds

    @property
    def pid(self) -> int:
        """This process."""
        return os.getpid()

    @property
    def stderr_fd(self) -> int:
        """Never readable: the library writes to the process's own stderr."""
        return self._stderr_fd

    @property
    def end_fd(self) -> int:
        """Readable once the library's engine is destroyed."""
        return self._end_fd

    def kill(self) -> None:
        """Have the thread see the end of its channel, after the call it is in."""
        self.channel.shut_down()

    def reaped(self) -> bool:
        """Whether the library's engine is gone."""
        return self._ended

    def explain(self) -> str:
        """A thread says why it ends before it does."""
        return "its thread ended without a word"

    def close(self) -> None:
        """See `Life`."""
        self.kill()
        self._thread.join(CLOSE_SECONDS)
        self.release()

    def release(self) -> None:
        """See `Life`; a thread that hangs in the library keeps the descriptors that it uses."""
        self.channel.close()
        os.close(self._stderr_fd)
        os.close(self._stderr_end)
        with self._end_lock:
            os.close(self._end_fd)
            self._end_fd = -1

    def _run(self) -> None:
        adapter = MooncakeAdapter(
            self._settings,
            arena_address=self._memory.address,
            arena_nbytes=self._memory.nbytes,
            guard=unguarded,
        )
        try:
            self._serve(adapter)
        finally:
            adapter.destroy()
            self._retired.add(self._session_name)
            self._theirs.close()
            with self._end_lock:
                self._ended = True
                if self._end_fd >= 0:
                    os.eventfd_write(self._end_fd, 1)

    def _serve(self, adapter: MooncakeAdapter) -> None:
        """Run until the channel ends, or say why not."""
        try:
            self._session_name, version = adapter.start()
            self._theirs.send([Started(self._session_name, self._memory.address, version)])
            Worker(self._theirs, adapter, self._memory.window).serve()
        except ChannelClosed:
            return
        except ConfigError as error:
            say_farewell(self._theirs, error.detail, final=True)
        except PDClusterError as error:
            say_farewell(self._theirs, error.detail, final=False)
        except OSError as error:
            say_farewell(self._theirs, f"{type(error).__name__}: {error}", final=False)
        except RuntimeError as error:
            # What a device raises when it is asked for bytes; its context does not recover.
            say_farewell(self._theirs, f"the device failed: {error}", final=True)


class RetiredPorts:
    """Keeps the ports of ended generations taken, so that the next ones do not draw them.

    A peer that still writes to an ended session asks at its port who serves it. As long as nobody
    answers there, nothing of that peer lands; were the port drawn again, its write would, since the
    arena has not moved.
    """

    __slots__ = ("_lock", "_sockets")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: deque[socket.socket] | None = deque()

    def add(self, session_name: str) -> None:
        """Take the port of a session that has just ended; one of no session is none."""
        port = session_name.rpartition(":")[2]
        if not port:
            return
        taken = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        with self._lock:
            # Whoever took the port in between is no generation of ours.
            with contextlib.suppress(OSError):
                # Old connections linger on that port; it is bound in spite of them.
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                taken.bind(("", int(port)))
            if self._sockets is None:
                taken.close()
                return
            self._sockets.append(taken)
            if len(self._sockets) > RETIRED_PORTS_MAX:
                self._sockets.popleft().close()

    def close(self) -> None:
        """Give all of them back, and take no more."""
        with self._lock:
            sockets, self._sockets = self._sockets, None
        for taken in sockets or ():
            taken.close()
