"""Stories are bounded in both directions and follow a key that is renamed."""

from __future__ import annotations

from pdcluster_protocol.story import Stories, Transition
from support.ledgers import key


def step(name: str) -> Transition:
    return Transition(0.0, "lamp", "Off", name, "On")


def triggers(stories: Stories, room: int) -> list[str]:
    return [transition.trigger for transition in stories.of(key(room))]


def test_the_newest_steps_of_a_key_are_kept() -> None:
    stories = Stories(keys_max=2, length_max=2)
    for name in "abc":
        stories.add(key(1), step(name))

    assert ["b", "c"] == triggers(stories, 1)


def test_the_oldest_key_goes_first() -> None:
    stories = Stories(keys_max=2, length_max=2)
    for room in (1, 2, 3):
        stories.add(key(room), step("a"))

    assert [[], ["a"], ["a"]] == [triggers(stories, room) for room in (1, 2, 3)]
    assert [key(2), key(3)] == [kept for kept, _ in stories.all()]


def test_a_step_reads_like_a_sentence() -> None:
    assert "lamp: Off --press--> On" == str(step("press"))
    with_detail = Transition(0.0, "lamp", "Off", "press", "On", "at night")
    assert "lamp: Off --press--> On (at night)" == str(with_detail)
