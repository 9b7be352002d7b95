"""Where local runs live: one base folder per user, one slot per run, and locks that die with us.

A run owns a *slot* (a number that is part of its pods' addresses) and, per engine, a range of
transport ports. Each is claimed by an exclusive flock on a file of its own. The kernel drops the
lock when the last process holding it ends, however it ended; so a lock file that can be locked has
no owner, and what lies beside it is left over and may be removed. That is the whole recovery.

A lock file is removed before its lock is released. So whoever opened the old file in between holds
the lock of a name that is gone; `claim` sees that by comparing inodes and tries again.

Addresses and ports are the machine's, while a base folder is one user's. So a slot or range also
needs a name that the whole machine knows, an abstract unix socket, which ends with its holder too.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from pdcluster_operator.place import SLOT_MAX, TRANSPORT_RANGE_COUNT, pod_address
from pdcluster_protocol.config import SIDECAR_HTTP_PORT
from pdcluster_protocol.errors import ConfigError
from pdctl.preflight import can_listen

SOCKET_PATH_LENGTH_MAX = 100
"""A unix socket's path may have 107 bytes; the names inside a run folder are short."""
NOBODYS_ADDRESS = "127.64.255.1"
"""An address like those of pods that no slot has: busy here means busy everywhere."""
_CLAIM_TRIES_MAX = 100


class Claim(msgspec.Struct, frozen=True):
    """A held lock: the number it stands for, its file, and the descriptor that holds it."""

    number: int
    path: Path
    descriptor: int
    name_descriptor: int | None = None
    """Holds the number's name on this machine; None for a lock that only sweeps."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """All that a process must inherit to hold this claim."""
        named = () if self.name_descriptor is None else (self.name_descriptor,)
        return (self.descriptor, *named)

    def release(self) -> None:
        """Remove the file, then let go."""
        self.path.unlink(missing_ok=True)
        self.let_go_here()

    def let_go_here(self) -> None:
        """Close our descriptors; a child that inherited them keeps the claim."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def base_folder() -> Path:
    """The user's folder of runs, made with mode 0700.

    Raises:
        ConfigError: it belongs to someone else or is open to others, or its path is too long for
            the sockets inside.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = (
        Path(runtime) / "pdcluster"
        if runtime and Path(runtime).is_dir()
        else Path(tempfile.gettempdir()) / f"pdcluster-{os.getuid()}"
    )
    if len(os.fsencode(base / "slot-000" / "link-000")) > SOCKET_PATH_LENGTH_MAX:
        raise ConfigError(
            f"the run folder {base} has too long a path for unix sockets; set XDG_RUNTIME_DIR to a"
            " shorter one"
        )
    base.mkdir(mode=0o700, exist_ok=True)
    status = base.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or base.is_symlink():
        raise ConfigError(
            f"{base} must be a folder of yours with mode 0700; remove it or repair its mode"
        )
    return base


def claim(path: Path, number: int) -> Claim | None:
    """Lock `path`; None when a living process holds it."""
    for _ in range(_CLAIM_TRIES_MAX):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        if _is_file_at(descriptor, path):
            return Claim(number, path, descriptor)
        os.close(descriptor)
    return None


def _is_file_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def claim_slot(base: Path) -> Claim:
    """The first free slot; one whose addresses another user's run listens on is passed over.

    Raises:
        ConfigError: all slots are taken, or something listens on every address.
    """
    if not can_listen(NOBODYS_ADDRESS, SIDECAR_HTTP_PORT):
        raise ConfigError(
            f"port {SIDECAR_HTTP_PORT} is busy on all addresses; end what listens on"
            f" 0.0.0.0:{SIDECAR_HTTP_PORT}: sidecars need that port"
        )
    for found in _claims(base, "slot", range(1, SLOT_MAX + 1)):
        if can_listen(pod_address(found.number, 1), SIDECAR_HTTP_PORT):
            return found
        found.release()
    raise ConfigError(f"all {SLOT_MAX} slots for local runs are taken; end one with pdctl down")


def claim_transport_ranges(
    base: Path, count: int, *, first_port: Callable[[int], int]
) -> list[Claim]:
    """`count` ranges of transport ports; one whose first port is in use is passed over.

    Raises:
        ConfigError: there are not enough.
    """
    claims: list[Claim] = []
    if count:
        for found in _claims(base, "ports", range(TRANSPORT_RANGE_COUNT)):
            if not can_listen("0.0.0.0", first_port(found.number)):  # noqa: S104  # as it will
                found.release()
                continue
            claims.append(found)
            if len(claims) == count:
                return claims
    for taken in claims:
        taken.release()
    if count:
        raise ConfigError(
            f"{count} engines need {count} ranges of transport ports; {len(claims)} are free: end"
            " another run with pdctl down"
        )
    return []


def run_folder(base: Path, slot: int) -> Path:
    """The folder of the run that holds this slot."""
    return base / f"slot-{slot}"


def run_folders(base: Path) -> list[Path]:
    """All folders of runs, by slot."""
    found = [path for path in base.glob("slot-*") if path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.partition("-")[2] or 0))


def sweep(base: Path) -> list[Path]:
    """Remove what runs without a living owner left behind; the folders that were removed."""
    removed = []
    for lock in _lock_files(base):
        stale = claim(lock, 0)
        if stale is None:
            continue
        folder = lock.with_suffix("")
        if folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
        stale.release()
    return removed


def remove_base(base: Path) -> None:
    """Remove the base folder if nothing is in it."""
    try:
        base.rmdir()
    except OSError:
        return


def _lock_files(base: Path) -> Iterable[Path]:
    """The lock files there are, and those that folders of runs ought to have."""
    wanted = {folder.with_suffix(".lock") for folder in run_folders(base)}
    pattern = re.compile(r"(slot|ports)-[0-9]+\.lock")
    present = {path for path in base.iterdir() if pattern.fullmatch(path.name)}
    return sorted(wanted | present)


def _claims(base: Path, kind: str, numbers: Iterable[int]) -> Iterator[Claim]:
    for number in numbers:
        found = claim(base / f"{kind}-{number}.lock", number)
        if found is None:
            continue
        named = _take_name(f"{kind}-{number}")
        if named is None:
            found.release()
            continue
        yield msgspec.structs.replace(found, name_descriptor=named)


def _take_name(name: str) -> int | None:
    """A descriptor that holds a name on this machine; None when another run holds it."""
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        holder.bind(f"\0pdcluster/{name}")
    except OSError:
        holder.close()
        return None
    return holder.detach()
