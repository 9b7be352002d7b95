"""One engine from its parts: memory, node, threads' bodies. Nothing runs yet when this returns."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

import msgspec

from pdcluster_engine.checking import CheckedNode
from pdcluster_engine.environment import memory_bytes
from pdcluster_engine.executor import Executor
from pdcluster_engine.inbox import Inbox
from pdcluster_engine.legs import LegTable
from pdcluster_engine.link import Link
from pdcluster_engine.loop import Node, OwnerLoop
from pdcluster_engine.memory.arena import Arena
from pdcluster_engine.memory.device import (
    DeviceArena,
    device_memory_bytes,
    record_on,
    require_device,
)
from pdcluster_engine.memory.finality import FinalityGate
from pdcluster_engine.memory.metadata import RankMetadata
from pdcluster_engine.memory.ranks import RankMemory, rank_slices, reserve_ranks, row_spread
from pdcluster_engine.model.loading import LoadedModel
from pdcluster_engine.model.port import RankArena
from pdcluster_engine.native import NativeEngine
from pdcluster_engine.parts import Parts
from pdcluster_engine.ports import RankPort
from pdcluster_engine.scheduling.worker import Bounds, ModelThread
from pdcluster_engine.sizes import check_context, page_count, slot_count
from pdcluster_engine.telemetry import Telemetry
from pdcluster_engine.transport.fault_source import inject_faults
from pdcluster_engine.transport.open import open_in_process, open_transport
from pdcluster_engine.transport.port import Transport
from pdcluster_protocol.config import EngineConfig
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.ids import Role
from pdcluster_protocol.ledger import NodeSetup
from pdcluster_protocol.limits import Limits
from pdcluster_protocol.messages import EngineHello
from pdcluster_protocol.nodes import decode_node, prefill_node
from pdcluster_protocol.topology import RankCoordinate


class Assembly(msgspec.Struct, frozen=True):
    """What a process runs: two thread bodies and the face for HTTP."""

    engine: NativeEngine
    loop: OwnerLoop
    compute: ModelThread
    inbox: Inbox
    arenas: tuple[Arena | DeviceArena, ...]
    gate: FinalityGate | None
    """The body of one more thread where the device is asynchronous."""


def assemble(config: EngineConfig, model: LoadedModel, *, telemetry: Telemetry) -> Assembly:
    """Reserve the memory and wire the parts.

    Raises:
        ConfigError: the sizes or the transport cannot work on this machine.
    """
    check_context(config, model_max=model.runner.max_context)
    device = require_device(config.device)
    memory = device_memory_bytes(device) if device.type == "cuda" else memory_bytes()
    slices = rank_slices(config, model.layout)
    layouts = [held.layout for _, held in slices]
    pages = page_count(config, layouts, memory_bytes=memory)
    slots = slot_count(config)
    ranks = reserve_ranks(device, slices, pages=pages, slots=slots)
    model.runner.attach([RankArena(rank.slice, rank.arena) for rank in ranks], pages)
    metadata = RankMetadata([rank.metadata for rank in ranks])
    setup = NodeSetup(
        layout=model.layout,
        page_count=pages,
        slot_count=slots,
        parallel=config.parallel,
        ranks=tuple(rank.place for rank in ranks),
        spread=row_spread(config.parallel),
        timeouts=config.timeouts,
        limits=Limits(),
        verify=config.checksum != "Off",
        scatter_seed=config.scatter_seed,
    )
    bare = prefill_node(setup) if config.role is Role.PREFILL else decode_node(setup)
    node: Node = CheckedNode(bare) if config.check_invariants else bare
    inbox = Inbox()
    record = record_on(device)
    gate = None if record is None else FinalityGate(record, inbox.post_when_room)
    compute = ModelThread(
        model.runner,
        model.tokenizer,
        metadata=metadata,
        post=inbox.post_when_room if gate is None else gate.post,
        telemetry=telemetry,
        bounds=Bounds(
            chunk_tokens=config.chunk,
            sequences_max=config.sequences,
            orders_max=setup.limits.rooms_max,
        ),
    )
    parts = Parts(
        legs=LegTable(legs_max=setup.limits.rooms_max),
        inbox=inbox,
        ports=_ports(
            config, ranks, _greeting(config, model, pages), node=node, telemetry=telemetry
        ),
        compute=compute,
        metadata=metadata,
        telemetry=telemetry,
    )
    loop = _owner(config, node, parts)
    engine = NativeEngine(inbox=inbox, legs=parts.legs, loop=loop)
    return Assembly(engine, loop, compute, inbox, tuple(rank.arena for rank in ranks), gate)


def _owner(config: EngineConfig, node: Node, parts: Parts) -> OwnerLoop:
    """The body of the owner thread."""
    return OwnerLoop(
        node,
        parts,
        executor=Executor(parts, digests=config.checksum != "Off"),
        sequences_max=config.sequences,
        shared=config.parallel.dp > 1,
    )


def _ports(
    config: EngineConfig,
    ranks: Sequence[RankMemory],
    greeting: EngineHello,
    *,
    node: Node,
    telemetry: Telemetry,
) -> tuple[RankPort, ...]:
    """A link and a transport for each rank; they share the engine's transport ports evenly."""
    share = (config.transport_port_max - config.transport_port_min + 1) // len(ranks)
    ports = []
    for index, rank in enumerate(ranks):
        hello = msgspec.structs.replace(
            greeting, coordinate=rank.coordinate, session=secrets.token_hex(8)
        )
        first = config.transport_port_min + index * share
        transport = _transport(
            config, rank.arena, telemetry, port_min=first, port_max=first + share - 1
        )
        ports.append(RankPort(index, _link(config, hello, node), transport))
    return tuple(ports)


def _link(config: EngineConfig, greeting: EngineHello, node: Node) -> Link:
    """A link that greets with what it knows at each connection."""

    def hello() -> EngineHello:
        return msgspec.structs.replace(
            greeting, incarnation=link.incarnation, rooms=node.open_keys()
        )

    link = Link(config.link_path, hello=hello, queue_max=Limits().link_queue_max)
    return link


def _transport(
    config: EngineConfig,
    arena: Arena | DeviceArena,
    telemetry: Telemetry,
    *,
    port_min: int,
    port_max: int,
) -> Transport:
    if isinstance(arena, DeviceArena):
        if config.faults:
            raise ConfigError(f"faults need host memory, and device is {config.device}")
        if config.transport != "mooncake":
            raise ConfigError(
                f"transport is {config.transport}, which shares host memory; with device "
                f"{config.device} it must be mooncake"
            )
        return open_in_process(
            arena.memory(),
            host=config.host,
            port_min=port_min,
            port_max=port_max,
            protocol=config.transport_protocol,
        )
    transport = open_transport(
        config.transport,
        arena_fd=arena.fd,
        arena_nbytes=arena.nbytes,
        host=config.host,
        port_min=port_min,
        port_max=port_max,
        protocol=config.transport_protocol,
    )
    if not config.faults:
        return transport
    return inject_faults(
        transport,
        config.faults,
        arena_fd=arena.fd,
        arena_nbytes=arena.nbytes,
        counter=telemetry.injected_faults,
    )


def _greeting(config: EngineConfig, model: LoadedModel, pages: int) -> EngineHello:
    """What is the same in every hello; each rank adds its place and session, `link` the rest."""
    return EngineHello(
        instance=config.instance,
        role=config.role,
        coordinate=RankCoordinate(dp=config.dp_rank),
        parallel=config.parallel,
        layout=model.layout,
        incarnation="",
        session="",
        http_port=config.http_port,
        fingerprint=config.fingerprint,
        allocation=config.allocation,
        served_name=config.served_name,
        max_context=config.max_context,
        page_count=pages,
        tokenizer_digest=model.tokenizer.digest(),
        tokenizer_files=model.tokenizer.files(),
        pid=os.getpid(),
        spread=row_spread(config.parallel),
    )
