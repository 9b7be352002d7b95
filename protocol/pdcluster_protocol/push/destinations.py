"""Where decode ranks' memory lies: their registrations, checked, and the addresses in them.

A registration is peer input that will be written to: counts and item lengths must equal ours, and
addresses are computed only from what was checked.
"""

from __future__ import annotations

import msgspec

from pdcluster_protocol.errors import LayoutMismatch
from pdcluster_protocol.layout import KVLayout
from pdcluster_protocol.messages import RegisterKVArgs
from pdcluster_protocol.push.routes import Routes
from pdcluster_protocol.rank_mapping import RankMapping
from pdcluster_protocol.ranks import SlotTable
from pdcluster_protocol.topology import RankCoordinate


def is_state(kind: str) -> bool:
    """Whether a region travels as a state component (SGLang: `dsa`) instead of as KV."""
    return kind == "indexer"


class Destination(msgspec.Struct, frozen=True):
    """One decode rank's memory under one transport session."""

    session: str
    incarnation: str
    region_bases: tuple[int, ...]
    """Absolute address of page 0 per region, in layout order."""
    buffer_bases: tuple[int, ...]
    """Absolute address of slot 0 per metadata buffer."""
    page_count: int
    slot_count: int
    slot_bytes: int
    """From a slot to the next where its rows lie side by side; 0: in each buffer its own row."""
    rank_mapping: RankMapping
    coordinate: RankCoordinate
    """Its place in its replica; the data-parallel rank is not said and does not matter."""
    layout: KVLayout
    """What it holds of the whole model's rows."""
    mapping: int = 0

    def follows(self, earlier: Destination) -> bool:
        """Whether the same process has mapped its memory anew since `earlier`."""
        return self.incarnation == earlier.incarnation and self.mapping > earlier.mapping


def register_kv_args(
    layout: KVLayout,
    *,
    base_address: int,
    page_count: int,
    slot_count: int,
    metadata: SlotTable,
    template: RegisterKVArgs,
) -> RegisterKVArgs:
    """Our own registration: `template` (address, session, ranks) filled with addresses."""
    kv = [i for i, region in enumerate(layout.regions) if not is_state(region.kind)]
    state = [i for i, region in enumerate(layout.regions) if is_state(region.kind)]

    def bases(regions: list[int]) -> tuple[int, ...]:
        return tuple(base_address + layout.region_offset(i, page_count) for i in regions)

    def lengths(regions: list[int]) -> tuple[int, ...]:
        return tuple(layout.item_bytes(i) for i in regions)

    def layers(regions: list[int]) -> tuple[int, ...]:
        return tuple(layout.regions[i].layer for i in regions)

    return msgspec.structs.replace(
        template,
        kv_pointers=bases(kv),
        kv_item_lengths=lengths(kv),
        kv_layer_ids=layers(kv),
        state_pointers=(bases(state),) if state else (),
        state_item_lengths=(lengths(state),) if state else (),
        state_layer_ids=(layers(state),) if state else (),
        aux_pointers=tuple(
            base_address + metadata.row_offset(buffer, 0) for buffer in range(len(metadata.rows))
        ),
        layout_digest=layout.digest(),
        page_count=page_count,
        slot_count=slot_count,
        slot_bytes=metadata.slot_bytes,
    )


def require_destination(
    routes: Routes, *, metadata_rows: tuple[int, ...], args: RegisterKVArgs, incarnation: str
) -> Destination:
    """Check a registration against what the rank it comes from must hold.

    Raises:
        LayoutMismatch: naming what differs with both values.
    """
    rank_mapping, coordinate = routes.of(args)
    layout = routes.layout(rank_mapping, coordinate)
    kv = [i for i, region in enumerate(layout.regions) if not is_state(region.kind)]
    state = [i for i, region in enumerate(layout.regions) if is_state(region.kind)]
    state_pointers = args.state_pointers[0] if args.state_pointers else ()
    state_lengths = args.state_item_lengths[0] if args.state_item_lengths else ()
    if args.layout_digest and args.layout_digest != layout.digest():
        raise LayoutMismatch(f"layout: ours is {layout.digest()}, decode's is {args.layout_digest}")
    for what, ours, theirs in (
        ("kv regions", len(kv), len(args.kv_pointers)),
        ("indexer regions", len(state), len(state_pointers)),
        ("metadata buffers", len(metadata_rows), len(args.aux_pointers)),
        ("metadata slots", *_slots(metadata_rows, args)),
        ("kv item lengths", tuple(layout.item_bytes(i) for i in kv), args.kv_item_lengths),
        ("indexer item lengths", tuple(layout.item_bytes(i) for i in state), state_lengths),
    ):
        if ours != theirs:
            raise LayoutMismatch(f"{what}: ours are {ours}, decode's are {theirs}")
    bases = [0] * len(layout.regions)
    for index, address in zip(kv, args.kv_pointers, strict=True):
        bases[index] = address
    for index, address in zip(state, state_pointers, strict=True):
        bases[index] = address
    return Destination(
        rank_mapping=rank_mapping,
        coordinate=coordinate,
        layout=layout,
        session=args.session,
        incarnation=incarnation,
        region_bases=tuple(bases),
        buffer_bases=args.aux_pointers,
        page_count=args.page_count,
        slot_count=args.slot_count,
        slot_bytes=args.slot_bytes,
        mapping=args.mapping,
    )


def _slots(rows: tuple[int, ...], args: RegisterKVArgs) -> tuple[object, object]:
    """How the rows of slot 0 must lie when one write is to fill them all, and how they do."""
    if not args.slot_bytes or not args.aux_pointers:
        return 0, args.slot_bytes
    wanted = SlotTable(args.aux_pointers[0], rows)
    pointers = tuple(wanted.row_offset(buffer, 0) for buffer in range(len(rows)))
    return (wanted.slot_bytes, pointers), (args.slot_bytes, args.aux_pointers)
