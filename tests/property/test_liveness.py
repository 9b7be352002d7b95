"""Any history of pings, silence and declarations keeps the rules of liveness."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdcluster_protocol.limits import Limits
from pdcluster_protocol.liveness import PeerNode
from pdcluster_protocol.messages import PeerState
from pdcluster_protocol.sidecar_messages import Ping

steps = st.lists(
    st.tuples(
        st.floats(0, 12, allow_nan=False),
        st.one_of(
            st.just("tick"),
            st.just("die"),
            st.just("hear"),
            st.lists(st.integers(0, 3), max_size=3).map(tuple),
        ),
    ),
    max_size=30,
)


@given(steps)
def test_a_change_is_told_exactly_when_the_state_changes(
    history: list[tuple[float, object]],
) -> None:
    limits = Limits()
    node = PeerNode("i", limits, now=0.0)
    now = 0.0
    for pause, step in history:
        now += pause
        before = node.state
        if step == "tick":
            changed = node.tick(now)
        elif step == "die":
            changed = node.declared_dead("told", now)
        elif step == "hear":
            node.heard(now)
            changed = None
        else:
            assert isinstance(step, tuple)
            changed = node.pinged(Ping("i", step), now)

        assert (changed is None) == (node.state is before)
        assert changed is None or changed.state is node.state
        assert before is not PeerState.DEAD or node.state is PeerState.DEAD
        assert (node.deadline() is None) == (node.state is PeerState.DEAD)
        if node.state is PeerState.ALIVE and step == "tick":
            due = node.deadline()
            assert due is not None
            assert due > now
