"""Who joined, which incarnation they are, and who may pair with them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdcluster_protocol.control_api import PodCard
from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ids import RankAddress
from pdcluster_protocol.instance import pairing_refusal
from pdcluster_protocol.layout import KVLayout, Region
from pdcluster_protocol.messages import Load, Pulse
from pdcluster_protocol.topology import Parallelism, RankCoordinate
from support.instances import LAYOUT, hello, instance, plan


def test_the_first_rank_gets_a_minted_incarnation_and_the_others_the_same() -> None:
    node = instance()

    first = node.join(hello(0), minted="i-1", now=0.0)
    second = node.join(hello(1), minted="i-2", now=0.0)
    assert ("i-1", RankAddress("127.64.0.1", 9000), "") == (
        first.incarnation,
        first.address,
        first.refused,
    )
    assert ("i-1", RankAddress("127.64.0.1", 9001)) == (second.incarnation, second.address)


def test_a_restarted_sidecar_adopts_the_incarnation_of_its_living_ranks() -> None:
    assert "old" == instance().join(hello(incarnation="old"), minted="i-1", now=0.0).incarnation


def test_the_death_of_one_rank_ends_the_instance_for_good() -> None:
    node = instance()
    node.join(hello(0), minted="i-1", now=0.0)
    node.join(hello(1), minted="i-2", now=0.0)

    assert "i-1" == node.lose(RankCoordinate(dp=1))
    assert {} == node.members
    assert "" == node.lose(RankCoordinate(dp=0))
    assert node.is_dead("i-1")
    late = node.join(hello(0, incarnation="i-1"), minted="i-3", now=0.0)
    assert "incarnation i-1 has ended; start anew" == late.refused
    assert {} == node.members
    assert "i-3" == node.join(hello(0), minted="i-3", now=0.0).incarnation


def test_a_rank_of_another_incarnation_does_not_join_the_present_one() -> None:
    node = instance()
    node.join(hello(0), minted="i-1", now=0.0)

    assert "start anew" in node.join(hello(1, incarnation="old"), minted="i", now=0.0).refused
    assert [RankCoordinate(dp=0)] == list(node.members)


def test_a_fresh_rank_in_the_place_of_a_member_proves_its_death() -> None:
    node = instance()
    node.join(hello(0), minted="i-1", now=0.0)

    assert "" == node.proves_death(hello(1))
    fresh = hello(0, session="another process")
    assert "rank (0, 0, 0, 0) has started anew" == node.proves_death(fresh)
    assert "" == node.proves_death(hello(0, incarnation="i-1"))
    assert "" == node.proves_death(hello(0, session="x", fingerprint="g"))


def test_a_member_that_greets_again_because_it_heard_no_answer_proves_nothing() -> None:
    node = instance()
    first = node.join(hello(0), minted="i-1", now=0.0)

    assert "" == node.proves_death(hello(0))
    assert first == node.join(hello(0), minted="i-2", now=1.0)


def test_a_fresh_rank_beside_an_adopted_one_proves_a_death_that_nobody_saw() -> None:
    node = instance()
    node.join(hello(0, incarnation="old"), minted="i-1", now=0.0)

    assert "while this sidecar was away" in node.proves_death(hello(1))
    assert "" == node.proves_death(hello(1, incarnation="old"))
    assert "old" == node.end()
    assert "" == node.proves_death(hello(1))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"instance": "x"}, "instance is 'x'"),
        ({"role": "decode"}, "role is 'decode'"),
        ({"parallel": Parallelism()}, "parallel"),
        ({"allocation": "PrefillComplete"}, "allocation"),
        ({"fingerprint": "g"}, "fingerprint is 'g'; this sidecar serves 'f'"),
        ({"coordinate": RankCoordinate(dp=2)}, r"coordinate.dp is 2; it must be in \[0, 1\]"),
        ({"coordinate": RankCoordinate(tp=1)}, "coordinate.tp is 1"),
        ({"coordinate": RankCoordinate(pp=-1)}, "coordinate.pp is -1"),
    ],
)
def test_a_rank_that_does_not_fit_is_refused_by_what_differs(
    changes: dict[str, Any], what: str
) -> None:
    answer = instance().join(hello(**changes), minted="i", now=0.0)

    assert "" == answer.incarnation
    with pytest.raises(AssertionError, match=what):
        raise AssertionError(answer.refused)


def test_ranks_of_different_layouts_do_not_make_an_instance() -> None:
    node = instance()
    node.join(hello(0), minted="i", now=0.0)
    other = msgspec.structs.replace(LAYOUT, page_size=32)

    assert "page_size" in node.join(hello(1, layout=other), minted="i", now=0.0).refused


def test_without_a_planned_fingerprint_the_first_ranks_binds_the_others() -> None:
    node = instance(fingerprint="")
    node.join(hello(0, fingerprint="a"), minted="i", now=0.0)

    assert "'a'" in node.join(hello(1, fingerprint="b"), minted="i", now=0.0).refused
    assert "a" == node.card(0.0).fingerprint


def test_it_is_ready_while_all_ranks_are_linked_and_move() -> None:
    node = instance()
    assert "0 of 2 ranks are linked" == node.unready(0.0)
    for dp in (0, 1):
        node.join(hello(dp), minted="i", now=0.0)
        node.pulse(RankCoordinate(dp=dp), Pulse(1, Load()), 0.0)

    assert "" == node.unready(1.0)
    node.pulse(RankCoordinate(dp=0), Pulse(2, Load()), 1.5)
    node.pulse(RankCoordinate(dp=1), Pulse(1, Load()), 1.5)
    assert "the loop of rank (1, 0, 0, 0) has not moved for 2.0 s" == node.unready(2.0)


def test_the_card_names_every_rank_and_where_it_is() -> None:
    node = instance()
    for dp in (1, 0):
        node.join(hello(dp), minted="i", now=0.0)
    card = node.card(0.0)

    assert ["127.64.0.1:9000", "127.64.0.1:9001"] == [str(rank.address) for rank in card.ranks]
    assert [30000, 30001] == [rank.http_port for rank in card.ranks]
    assert ("i", "s", "tiny", True) == (
        card.incarnation,
        card.session,
        card.served_name,
        card.ready,
    )


def test_loads_are_one_per_dp_rank() -> None:
    node = instance()
    for dp in (0, 1):
        node.join(hello(dp), minted="i", now=0.0)
        node.pulse(RankCoordinate(dp=dp), Pulse(5, Load(pages_free=dp + 1)), 0.0)

    assert [1, 2] == [load.pages_free for load in node.load_report(0.0).loads]
    assert (5, 5) == node.loops()


FOUR = Parallelism(tp=4, dp=4)
POD_1 = PodCard(1, RankAddress("127.64.0.2", 8998), "s-1")


def test_a_pod_has_its_share_of_the_ranks_and_ports() -> None:
    leader = plan(parallel=FOUR, nodes=2)
    other = plan(parallel=FOUR, nodes=2, node=1, http=POD_1.http, session="s-1")

    assert [0, 0, 1, 1] == [leader.node_of(RankCoordinate(dp=dp)) for dp in range(4)]
    assert (4, 2) == (leader.rank_count, other.rank_count)
    assert POD_1 == other.pod


def test_the_card_of_several_pods_names_each_ranks_own_host_and_session() -> None:
    node = instance(parallel=FOUR, nodes=2)
    for dp in range(4):
        pod = POD_1 if dp > 1 else None
        node.join(hello(dp, parallel=FOUR), minted="i", now=0.0, pod=pod)
    ranks = node.card(0.0).ranks

    assert [
        "127.64.0.1:9000",
        "127.64.0.1:9001",
        "127.64.0.2:9002",
        "127.64.0.2:9003",
    ] == [str(rank.address) for rank in ranks]
    assert ["", "", "s-1", "s-1"] == [rank.session for rank in ranks]


def test_a_rank_joins_from_its_own_pod_only() -> None:
    node = instance(parallel=FOUR, nodes=2)

    refused = node.join(hello(0, parallel=FOUR), minted="i", now=0.0, pod=POD_1).refused
    assert "coordinate.dp is 0; that rank belongs to pod 0" == refused
    refused = node.join(hello(2, parallel=FOUR), minted="i", now=0.0).refused
    assert "coordinate.dp is 2; that rank belongs to pod 1" == refused


def test_a_silent_pod_makes_the_instance_unready_and_then_ends_it() -> None:
    node = instance(nodes=2)
    node.join(hello(0), minted="i", now=0.0)
    node.join(hello(1), minted="i", now=0.0, pod=POD_1)
    for now in (1.0, 2.5, 9.0):
        for dp in (0, 1):
            node.pulse(RankCoordinate(dp=dp), Pulse(int(now * 10), Load()), now)
    node.heard(1, 1.0)

    assert "" == node.unready(2.9)
    node.pulse(RankCoordinate(dp=0), Pulse(99, Load()), 3.0)
    node.pulse(RankCoordinate(dp=1), Pulse(99, Load()), 3.0)
    assert "pod 1 has been silent for 2.0 s" == node.unready(3.0)
    assert "" == node.gone(10.9)
    assert "pod 1 has been silent for 10 s" == node.gone(11.0)
    assert "i" == node.end()
    assert "" == node.gone(99.0)


def test_the_tokenizer_is_kept_once() -> None:
    node = instance()
    node.join(hello(0), minted="i", now=0.0)

    assert ("t", {"tokenizer.json": b"{}"}) == node.tokenizer
    assert {} == node.members[RankCoordinate()].hello.tokenizer_files


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fingerprint": "g"}, Reason.FINGERPRINT_MISMATCH),
        ({"cluster": "d"}, Reason.FINGERPRINT_MISMATCH),
        ({"allocation": "PrefillComplete"}, Reason.POLICY_MISMATCH),
        ({"layout": msgspec.structs.replace(LAYOUT, dtype="fp8")}, Reason.LAYOUT_MISMATCH),
        ({"wire_min": 2, "wire_max": 3}, Reason.WIRE_ERROR),
        ({"wire_min": 0, "wire_max": 0}, Reason.WIRE_ERROR),
    ],
)
def test_a_pair_that_differs_is_refused_with_both_values(
    changes: dict[str, Any], reason: Reason
) -> None:
    node = instance()
    node.join(hello(), minted="i", now=0.0)
    ours = node.card(0.0)
    refusal = pairing_refusal(ours, msgspec.structs.replace(ours, **changes))

    assert refusal is not None
    assert reason is refusal[0]
    assert "ours " in refusal[1]


def test_equal_instances_may_pair() -> None:
    node = instance()
    node.join(hello(), minted="i", now=0.0)

    assert pairing_refusal(node.card(0.0), node.card(0.0)) is None


def test_sizes_that_exclude_each_other_are_refused_before_the_first_request() -> None:
    node = instance(parallel=Parallelism(tp=3))
    layout = KVLayout(64, "bfloat16", (Region(0, "latent", 128),))
    node.join(hello(parallel=Parallelism(tp=3), layout=layout), minted="i", now=0.0)
    ours = node.card(0.0)
    theirs = msgspec.structs.replace(
        ours, role="decode", instance="c-decode-0", parallel=Parallelism(tp=2)
    )
    expected = (
        Reason.LAYOUT_MISMATCH,
        "c-decode-0: attention TP is 3 on prefill and 2 on decode; one must divide the other",
    )

    assert expected == pairing_refusal(ours, theirs)
    assert expected[0] == (pairing_refusal(theirs, ours) or (None,))[0]
    meets = msgspec.structs.replace(theirs, parallel=Parallelism(tp=6))
    assert pairing_refusal(ours, meets) is None
