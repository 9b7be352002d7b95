"""The Linux calls that Python 3.11 does not offer.

A timer that can be selected on, a mapping at a chosen address, and the tie between a process and
the thread that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import struct
import time

_PR_SET_PDEATHSIG = 1
_MAP_FIXED_NOREPLACE = 0x100000
_MAP_FAILED = ctypes.c_void_p(-1).value
_TFD_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.timerfd_settime.argtypes = (
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_void_p,
)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process with the thread that started it.

    Raises:
        ProcessLookupError: that parent is already gone, so the kernel would never do it.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise _os_error("prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        raise ProcessLookupError(f"parent {parent_pid} is gone")


def map_shared(fd: int, nbytes: int, *, address: int) -> int:
    """Map `nbytes` of `fd` readable and writable at exactly `address`, and return it.

    Raises:
        OSError: something is mapped there, or the kernel has no such address.
    """
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_SHARED | _MAP_FIXED_NOREPLACE
    found = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if found == _MAP_FAILED:
        raise _os_error(f"mmap of {nbytes} bytes at {address:#x}")
    if found != address:
        # A kernel before 4.17 takes the flag for a hint.
        raise OSError(f"mmap of {nbytes} bytes at {address:#x}: the kernel chose {found:#x}")
    return address


def view(address: int, nbytes: int) -> memoryview:
    """Mapped memory as a writable buffer of bytes; it must stay mapped while the view lives."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


class Timer:
    """A one-shot timer that is a descriptor, so one selector waits for sockets and clocks."""

    __slots__ = ("_at", "_fd")

    def __init__(self) -> None:
        self._fd: int = _libc.timerfd_create(time.CLOCK_MONOTONIC, _TFD_FLAGS)
        if self._fd < 0:
            raise _os_error("timerfd_create")
        self._at: float | None = None

    def fileno(self) -> int:
        """Readable from the deadline on, until `arm` is called again."""
        return self._fd

    @property
    def at(self) -> float | None:
        """When it fires; `None` when it is disarmed or its firing was taken note of."""
        return self._at

    def arm(self, at: float | None) -> None:
        """Fire once at `at` on the monotonic clock (the past: now); `None` disarms."""
        if at == self._at:
            return
        self._at = at
        # A value of zero would disarm, so what is due is set to the first nanosecond.
        nanoseconds = 0 if at is None else max(1, int(at * 1e9))
        value = struct.pack("qqqq", 0, 0, nanoseconds // 10**9, nanoseconds % 10**9)
        if _libc.timerfd_settime(self._fd, 1, value, None) != 0:  # 1: an absolute time
            raise _os_error("timerfd_settime")

    def clear(self) -> None:
        """Take note of a firing, so the descriptor is no longer readable."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)
            self._at = None

    def close(self) -> None:
        """Release the descriptor; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _os_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")
