"""Every way in, with a small budget; `make fuzz` plays the same properties for long."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fuzz.catalogue import TARGETS
from fuzz.loop import Broken, main, run
from fuzz.mutation import EDIT_STRATEGY, Edit, Kind, Parts, edited
from fuzz.target import Target

EXAMPLES = {"objects": 15, "prefill node": 40, "decode node": 40}
"""Those whose inputs take milliseconds; the others get `EXAMPLES_MANY`."""
EXAMPLES_MANY = 100
LOOP_INPUTS = 1500
LOOP_SEED = 7

every_target = pytest.mark.parametrize("target", TARGETS, ids=[one.name for one in TARGETS])


@every_target
def test_every_target_takes_its_own_corpus_somewhere(target: Target) -> None:
    taken = [target.check(list(parts)) for parts in target.corpus]

    assert any(taken)


@every_target
def test_a_bent_input_is_taken_or_refused_and_nothing_worse(target: Target) -> None:
    @settings(max_examples=EXAMPLES.get(target.name, EXAMPLES_MANY), database=None)
    @given(index=st.integers(0, len(target.corpus) - 1), edits=st.lists(EDIT_STRATEGY, max_size=4))
    @example(index=0, edits=[])
    def bend(index: int, edits: list[Edit]) -> None:
        target.check(edited(target.corpus[index], edits))

    bend()


def test_the_loop_plays_all_targets_and_most_inputs_reach_both_ends() -> None:
    tallies = run(TARGETS, inputs=LOOP_INPUTS, seed=LOOP_SEED)

    assert {target.name for target in TARGETS} == tallies.keys()
    assert LOOP_INPUTS <= sum(tally.inputs for tally in tallies.values())
    for name, tally in tallies.items():
        if tally.inputs > 50:
            assert 0 < tally.taken < tally.inputs, name


def _fragile(parts: Parts) -> bool:
    if b"\xff" in b"".join(parts):
        raise ValueError("the fault that was planted")
    return True


def test_an_input_that_breaks_a_property_ends_the_loop_and_can_be_drawn_again() -> None:
    target = Target("planted", ((b"abc",),), _fragile)
    with pytest.raises(Broken, match="the fault that was planted") as found:
        run([target], inputs=5000, seed=LOOP_SEED)

    first = found.value.index
    with pytest.raises(Broken) as again:
        run([target], inputs=1, seed=LOOP_SEED, first=first)
    assert (first, found.value.parts) == (again.value.index, again.value.parts)


def test_an_input_that_takes_too_long_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz.loop.INPUT_SECONDS_MAX", -1.0)

    with pytest.raises(Broken, match="processor time"):
        run([TARGETS[0]], inputs=1, seed=LOOP_SEED)


def test_growth_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz.loop.GROWTH_BYTES_MAX", 1 << 20)
    monkeypatch.setattr("fuzz.loop.WARM_INPUTS", 10)
    kept: list[bytes] = []

    def keep(_: Parts) -> bool:
        # More than a process that has run other tests could find in what it has freed.
        kept.append(b"x" * (1 << 20))
        return True

    with pytest.raises(MemoryError, match="bytes more"):
        run([Target("keeper", ((b"a",),), keep)], inputs=100, seed=LOOP_SEED)


def test_the_command_prints_its_seed_and_one_line_a_target(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert 0 == main(["--inputs", "20", "--seed", "5", "--target", "frames"])

    told = capsys.readouterr().out
    assert "seed 5, 20 inputs, 1 targets" in told
    assert "frames" in told.splitlines()[-2]


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_of_edit_can_be_applied_to_anything(kind: Kind) -> None:
    structured = [msgspec.json.encode({"a": [1, {"b": None}]}), msgspec.msgpack.encode([{"c": 2}])]
    changed = []
    for parts in ([], [b""], [b"a12b"], structured):
        for number in range(40):
            edit = Edit(kind, number, number * 7, bytes([number]) * (number % 5))
            changed.append(edited(parts, [edit]) != parts)

    assert any(changed)
