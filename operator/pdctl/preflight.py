"""What a local run needs of this machine, checked before any process starts.

Each refusal says which field, flag or package repairs it: the same faults, found later in the log
of a process, would cost the reader a search.
"""

from __future__ import annotations

import importlib.metadata
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

from pdcluster_operator.plan import Plan
from pdcluster_protocol.errors import ConfigError

MOONCAKE_PREFIX = "mooncake-transfer-engine"
INSTALL = "pip install 'pdcluster[mooncake-cpu]'"
IMPORT_SECONDS = 60.0
LIBRARY_PACKAGES = {
    "libibverbs.so": "apt-get install libibverbs1",
    "libnuma.so": "apt-get install libnuma1",
    "libcurl.so": "apt-get install libcurl4",
    "libstdc++.so": "apt-get install libstdc++6",
    "libmlx5.so": "apt-get install ibverbs-providers",
    "libcudart.so": "the CUDA runtime, or on a machine without GPU the wheel of "
    "pdcluster[mooncake-cpu] instead",
    "libcuda.so": "the NVIDIA driver, or on a machine without GPU the wheel of "
    "pdcluster[mooncake-cpu] instead",
}


def installed_mooncake() -> list[str]:
    """The names of all installed distributions of Mooncake; they share one folder."""
    names = (
        str(distribution.metadata["Name"]).lower().replace("_", "-")
        for distribution in importlib.metadata.distributions()
    )
    return sorted({name for name in names if name.startswith(MOONCAKE_PREFIX)})


def require_mooncake(distributions: Sequence[str], *, python: str = sys.executable) -> None:
    """See that exactly one wheel is installed and that its libraries are there.

    Raises:
        ConfigError: with the command that repairs it.
    """
    if not distributions:
        raise ConfigError(f"the Mooncake wheel is not installed; {INSTALL}")
    if len(distributions) > 1:
        raise ConfigError(
            f"{len(distributions)} Mooncake wheels are installed ({', '.join(distributions)}) and"
            " overwrite each other's files; repair with: pip uninstall -y"
            f" {' '.join(distributions)} && {INSTALL}"
        )
    try:
        # In a process of its own: the library starts threads and may end its process.
        done = subprocess.run(
            [python, "-c", "import mooncake.engine"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=IMPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"import mooncake.engine took over {IMPORT_SECONDS:.0f} s") from error
    if done.returncode != 0:
        raise ConfigError(explain_import(done.stderr, distributions[0]))


def explain_import(stderr: str, distribution: str) -> str:
    """The remedy for an import that failed, by the last line that it wrote."""
    lines = stderr.strip().splitlines()
    last = lines[-1] if lines else "it ended without a word"
    for library, remedy in LIBRARY_PACKAGES.items():
        if library in last:
            return f"Mooncake ({distribution}) misses {library}: {remedy}"
    return (
        f"Mooncake ({distribution}) cannot be imported: {last}; repair with: pip install"
        f" --force-reinstall --no-deps {distribution}"
    )


def require_free_ports(plan: Plan) -> None:
    """See that nobody listens where a placed plan is going to.

    Raises:
        ConfigError: naming the port, its address and the flag or remedy.
    """
    for host, port, fix in _ports(plan):
        if not can_listen(host, port):
            raise ConfigError(f"port {port} on {host} is busy; {fix}")


def can_listen(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def _ports(plan: Plan) -> Iterator[tuple[str, int, str]]:
    """(host, port, fix) of every listener; router processes share their port."""
    for router in plan.routers[:1]:
        yield router.host, router.port, "end what listens there or choose another with --port"
    for router in plan.routers:
        yield (
            router.host,
            router.admin_port,
            "end what listens there or choose another with --admin-port",
        )
    fix = "end what listens there (on this address or on all)"
    for pod in plan.pods:
        yield pod.sidecar.host, pod.sidecar.http_port, fix
        for port in pod.sidecar.control_ports:
            yield pod.sidecar.host, port, fix
        for engine in pod.engines:
            yield engine.host, engine.http_port, fix
