"""`pdctl`: one command line for a PDCluster.

    plan -f FILE            print the plan as YAML: every process with its configuration
    size -f FILE            bytes per token, pages, pool, does it fit
    up -f FILE [--detach]   run the plan as processes on this machine
    ps, down                what runs, and ending it
    generate TEXT           stream tokens from a running cluster

Everything wrong with what the user wrote ends in one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdcluster_protocol.errors import ConfigError, PDClusterError

if TYPE_CHECKING:
    from pdcluster_operator.api.v1alpha1 import PDCluster

EXIT_CONFIG = 2
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
DOWN_SECONDS = 10.0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pdctl",
        description="Prefill/decode clusters: plan, size, run, ask.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (
        ("plan", "print the plan as YAML"),
        ("size", "bytes per token, pages, pool, does it fit"),
        ("up", "run the plan as processes on this machine"),
    ):
        command = commands.add_parser(name, help=text, allow_abbrev=False)
        command.add_argument("-f", "--file", type=Path, required=True, help="the PDCluster (YAML)")
        if name == "size":
            command.add_argument(
                "--memory-gb",
                type=float,
                default=None,
                help="memory of one DP rank in GB; absent: this machine's",
            )
        if name == "up":
            _add_up_flags(command)
    for name, text in (("ps", "what runs"), ("down", "end what runs")):
        command = commands.add_parser(name, help=text, allow_abbrev=False)
        command.add_argument("--name", help="which cluster, when several run")
        if name == "ps":
            command.add_argument("--json", action="store_true", help="for programs")
    generate = commands.add_parser("generate", help="stream tokens", allow_abbrev=False)
    generate.add_argument("prompt")
    generate.add_argument("--max-tokens", type=int, default=64)
    generate.add_argument("--temperature", type=float, default=0.0)
    generate.add_argument("--model", help="absent: the only one served")
    generate.add_argument("--url", help="the router; absent: the cluster that runs here")
    generate.add_argument("--name", help="which cluster, when several run")
    return parser


def _add_up_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--detach", action="store_true", help="return when ready; end with down")
    command.add_argument("--port", type=int, default=8000, help="the router's port on 127.0.0.1")
    command.add_argument("--admin-port", type=int, help="of the router; absent: the port after it")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    options = build_parser().parse_args(argv)
    try:
        return _run(options)
    except ConfigError as error:
        print(f"pdctl: {error.detail}", file=sys.stderr)
        return EXIT_CONFIG
    except PDClusterError as error:
        print(f"pdctl: {error.reason}: {error.detail}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_FAILED
    except OSError as error:
        print(f"pdctl: {error}", file=sys.stderr)
        return EXIT_FAILED


def _run(options: argparse.Namespace) -> int:
    match options.command:
        case "plan":
            return _plan(options)
        case "size":
            return _size(options)
        case "up":
            return _up(options)
        case "ps":
            return _ps(options)
        case "down":
            return _down(options)
        case "generate":
            return _generate(options)
        case _:
            raise ConfigError(f"command {options.command!r} is unknown")


def _load(options: argparse.Namespace) -> PDCluster:
    from pdcluster_operator.api.reading import load_pdcluster

    return load_pdcluster(options.file)


def _plan(options: argparse.Namespace) -> int:
    from pdcluster_operator.plan import make_plan
    from pdctl.plan_text import plan_yaml

    print(plan_yaml(make_plan(_load(options))), end="")
    return 0


def _size(options: argparse.Namespace) -> int:
    from pdctl.proc import memory_bytes
    from pdctl.size import size_table

    if options.memory_gb is not None and not 0 < options.memory_gb < 1e6:
        raise ConfigError(f"--memory-gb is {options.memory_gb}; it must be positive")
    memory = memory_bytes() if options.memory_gb is None else int(options.memory_gb * 1e9)
    print(size_table(_load(options), options.file.resolve().parent, memory_bytes=memory))
    return 0


def _up(options: argparse.Namespace) -> int:
    from pdctl.up import UpOptions, up

    admin_port = options.port + 1 if options.admin_port is None else options.admin_port
    for flag, port in (("--port", options.port), ("--admin-port", admin_port)):
        if not 1 <= port <= 65535:
            raise ConfigError(f"{flag} is {port}; it must be in [1, 65535]")
    if options.port == admin_port:
        raise ConfigError(f"--admin-port is {admin_port}; it must differ from --port")
    return up(
        _load(options),
        UpOptions(
            source_folder=options.file.resolve().parent,
            port=options.port,
            admin_port=admin_port,
            detach=options.detach,
        ),
    )


def _ps(options: argparse.Namespace) -> int:
    from pdctl.control import runs
    from pdctl.table import process_table

    found = [run for run in runs() if options.name in {None, run.spec.cluster}]
    if options.json:
        from pdctl.listing import listing

        print(listing(found))
        return 0
    for run in found:
        print(f"{run.spec.cluster}  {run.spec.endpoint}  {run.spec.folder}")
        print(process_table(run.spec, run.state))
    if not found:
        print("nothing runs")
    return 0


def _down(options: argparse.Namespace) -> int:
    from pdctl.control import find_run, stop

    run = find_run(options.name)
    stop(run, deadline_seconds=DOWN_SECONDS)
    print(f"{run.spec.cluster} ended")
    return 0


def _generate(options: argparse.Namespace) -> int:
    from pdctl.asking import generate, only_model, request
    from pdctl.control import find_run

    if options.max_tokens < 1:
        raise ConfigError(f"--max-tokens is {options.max_tokens}; it must be at least 1")
    url = (options.url or find_run(options.name).spec.endpoint).rstrip("/")
    model = options.model or only_model(url)
    body = request(model, options.prompt, options.max_tokens)
    generate(url, {**body, "temperature": options.temperature})
    return 0


if __name__ == "__main__":
    sys.exit(main())
