"""Registrations: addresses out, checks in, and where a page lies in the peer's memory."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdcluster_protocol.errors import LayoutMismatch
from pdcluster_protocol.layout import KVLayout
from pdcluster_protocol.messages import RegisterKVArgs
from pdcluster_protocol.push.destinations import Destination, register_kv_args, require_destination
from pdcluster_protocol.push.routes import Routes
from pdcluster_protocol.ranks import RankPlace
from pdcluster_protocol.topology import RankCoordinate
from support.ledgers import LAYOUT, PEER, SLOTS, node_setup

BASE = 1 << 32
TEMPLATE = RegisterKVArgs(PEER, "127.64.0.2:15000", (), (), ())


def registration(layout: KVLayout = LAYOUT, **changes: Any) -> RegisterKVArgs:
    args = register_kv_args(
        layout,
        base_address=BASE,
        page_count=16,
        slot_count=4,
        metadata=SLOTS,
        template=TEMPLATE,
    )
    return msgspec.structs.replace(args, **changes)


def checked(args: RegisterKVArgs, layout: KVLayout = LAYOUT) -> Destination:
    place = RankPlace(coordinate=RankCoordinate(), layout=layout, metadata=SLOTS)
    routes = Routes(node_setup(layout=layout, ranks=(place,)))
    return require_destination(routes, metadata_rows=SLOTS.rows, args=args, incarnation="i")


def test_the_indexer_travels_as_state_and_the_rest_as_kv() -> None:
    args = registration()

    assert (BASE, BASE + 4096) == args.kv_pointers
    assert (24, 8) == args.kv_item_lengths
    assert ((BASE + 8192,),) == args.state_pointers
    assert ((12,),) == args.state_item_lengths
    assert ((0, 0), ((1,),)) == (args.kv_layer_ids, args.state_layer_ids)
    assert (BASE + 20000, BASE + 20016) == args.aux_pointers
    assert (PEER, "127.64.0.2:15000") == (args.reply_to, args.session)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (0, 2, 1), (0, 1), (2,)], ids=str)
def test_each_region_is_found_again_where_it_lies(order: tuple[int, ...]) -> None:
    layout = KVLayout(4, "float32", tuple(LAYOUT.regions[i] for i in order))
    found = checked(registration(layout), layout)

    expected = tuple(BASE + layout.region_offset(i, 16) for i in range(len(order)))
    assert expected == found.region_bases
    assert (BASE + 20000, BASE + 20016) == found.buffer_bases
    assert ("127.64.0.2:15000", "i", 16, 4) == (
        found.session,
        found.incarnation,
        found.page_count,
        found.slot_count,
    )


def test_a_plain_peer_without_a_digest_is_checked_by_counts_and_lengths() -> None:
    plain = registration(layout_digest="", page_count=0, slot_count=0)

    assert 0 == checked(plain).page_count


def test_a_peer_with_a_table_for_each_buffer_is_taken_too() -> None:
    found = checked(registration(aux_pointers=(5000, 9000), slot_bytes=0))

    assert (5000, 9000) == found.buffer_bases
    assert 0 == found.slot_bytes
    assert 24 == checked(registration()).slot_bytes


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"layout_digest": "0" * 16}, f"layout: ours is {LAYOUT.digest()}, decode's is 0000"),
        ({"kv_pointers": (BASE,)}, "kv regions: ours are 2, decode's are 1"),
        ({"state_pointers": ()}, "indexer regions: ours are 1, decode's are 0"),
        ({"state_pointers": ((1, 2),)}, "indexer regions: ours are 1, decode's are 2"),
        ({"aux_pointers": (1, 2, 3)}, "metadata buffers: ours are 2, decode's are 3"),
        ({"kv_item_lengths": (24, 9)}, r"kv item lengths: ours are \(24, 8\), .*\(24, 9\)"),
        ({"kv_item_lengths": (24,)}, r"kv item lengths: ours are \(24, 8\), .*\(24,\)"),
        ({"state_item_lengths": ((13,),)}, r"indexer item lengths: .*\(12,\), .*\(13,\)"),
        ({"slot_bytes": 25}, r"metadata slots: ours are \(24, .*decode's are \(25, "),
        ({"aux_pointers": (BASE + 20000, BASE + 20017)}, r"metadata slots: ours are \(24, "),
        ({"aux_pointers": (), "slot_bytes": 24}, "metadata buffers: ours are 2, decode's are 0"),
        ({"state_item_lengths": ()}, r"indexer item lengths: .*\(12,\), .*\(\)"),
    ],
    ids=str,
)
def test_a_registration_that_differs_is_refused_with_both_values(
    changes: dict[str, Any], what: str
) -> None:
    with pytest.raises(LayoutMismatch, match=what):
        checked(registration(**changes))
