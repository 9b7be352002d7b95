"""What is checked before a run: ports, the Mooncake wheel and its libraries, weights."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pdcluster_operator.api.reading import load_pdcluster
from pdcluster_operator.place import Place, place_locally
from pdcluster_operator.plan import Plan, make_plan
from pdcluster_protocol.errors import ConfigError
from pdctl.model_config import require_weights
from pdctl.preflight import (
    can_listen,
    explain_import,
    installed_mooncake,
    require_free_ports,
    require_mooncake,
)

ROOT = Path(__file__).parents[3]
WHEEL = "mooncake-transfer-engine-non-cuda"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.64.250.1", 0)) as server:
        yield server


def placed(port: int) -> Plan:
    """The local example in slot 250, its prefill's control channel at `port`."""
    place = Place(
        slot=250,
        run_folder="/r",
        source_folder="/s",
        router_port=0,
        admin_port=0,
        transport_ranges=(1, 2),
    )
    plan = place_locally(make_plan(load_pdcluster(ROOT / "examples/local.yaml")), place)
    pods = tuple(
        msgspec.structs.replace(
            pod, sidecar=msgspec.structs.replace(pod.sidecar, control_port=port)
        )
        for pod in plan.pods
    )
    return msgspec.structs.replace(plan, pods=pods)


def test_a_busy_port_is_named_with_its_address(listener: socket.socket) -> None:
    port = listener.getsockname()[1]

    with pytest.raises(ConfigError, match=f"port {port} on 127.64.250.1 is busy; end what"):
        require_free_ports(placed(port))


def test_a_busy_router_port_names_the_flag(listener: socket.socket) -> None:
    host, port = listener.getsockname()
    plan = placed(9000)
    router = msgspec.structs.replace(plan.routers[0], host=host, port=port)

    with pytest.raises(ConfigError, match="choose another with --port"):
        require_free_ports(msgspec.structs.replace(plan, routers=(router,)))


def test_a_port_is_free_again_after_its_listener_closed(listener: socket.socket) -> None:
    host, port = listener.getsockname()
    assert not can_listen(host, port)

    listener.close()

    assert can_listen(host, port)


def test_no_wheel_and_two_wheels_are_refused_with_the_command_that_repairs() -> None:
    with pytest.raises(ConfigError, match="is not installed; pip install"):
        require_mooncake([])
    with pytest.raises(ConfigError, match=f"2 Mooncake wheels.*pip uninstall -y a {WHEEL} && pip"):
        require_mooncake(["a", WHEEL])


def test_the_installed_wheel_is_found() -> None:
    assert [WHEEL] == installed_mooncake()


def test_an_import_that_fails_in_its_process_is_explained(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ImportError: libnuma.so.1: cannot open' >&2\nexit 1\n")
    python.chmod(0o700)

    with pytest.raises(ConfigError, match=r"misses libnuma\.so: apt-get install libnuma1"):
        require_mooncake([WHEEL], python=str(python))


@pytest.mark.parametrize(
    ("expected", "stderr"),
    [
        ("apt-get install libibverbs1", "ImportError: libibverbs.so.1: cannot open shared object"),
        ("apt-get install libcurl4", "x\nImportError: libcurl.so.4: cannot open shared object"),
        ("pdcluster[mooncake-cpu] instead", "ImportError: libcuda.so.1: cannot open shared object"),
        (f"--force-reinstall --no-deps {WHEEL}", "ModuleNotFoundError: No module mooncake.engine"),
        ("it ended without a word", ""),
    ],
)
def test_import_errors_name_their_remedy(expected: str, stderr: str) -> None:
    assert expected in explain_import(stderr, WHEEL)


def test_a_folder_without_weights_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"model folder .*glm-5\.3 has no weights"):
        require_weights("file://models/glm-5.3", ROOT / "examples")


def test_builtin_models_and_folders_with_weights_pass(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("")

    require_weights("builtin://tiny-llama", tmp_path)
    require_weights("file://.", tmp_path)
