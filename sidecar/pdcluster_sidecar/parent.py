"""Dying with the supervisor: a process must not outlive what started it, even a killed one."""

from __future__ import annotations

import ctypes
import os
import signal

from pdcluster_protocol.errors import ConfigError

PARENT_VARIABLE = "PDCLUSTER_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, if `PDCLUSTER_PARENT_PID` names one.

    Raises:
        ConfigError: the parent is gone already, or is another process than the variable says.
    """
    named = os.environ.get(PARENT_VARIABLE)
    if named is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise ConfigError(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")
    # The parent may have died before the call, and then no signal will ever come.
    if str(os.getppid()) != named:
        raise ConfigError(
            f"{PARENT_VARIABLE} is {named}, but the parent is {os.getppid()}: it is gone"
        )
