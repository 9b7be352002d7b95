"""A fault plan is read strictly: a test that injects nothing by a typing error proves nothing."""

from __future__ import annotations

import re

import pytest

from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.fault_plan import (
    TEXT_LENGTH_MAX,
    Fault,
    FaultPlan,
    parse_fault_plan,
    require_faults,
)
from support.guards import ROOT


def test_a_plan_says_seed_delay_and_shares() -> None:
    plan = parse_fault_plan("seed=7,late=0.2,FlippedByte=0.05,Drop=0.01", field="f")

    assert FaultPlan(7, {Fault.FLIPPED_BYTE: 0.05, Fault.DROP: 0.01}, 0.2) == plan


def test_a_seed_alone_is_an_honest_plan() -> None:
    assert FaultPlan(1, {}) == parse_fault_plan("seed=1\n", field="f")


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ("'' is no NAME=NUMBER", ""),
        ("'FlippedByte' is no NAME=NUMBER", "seed=1,FlippedByte"),
        ("'' is no NAME=NUMBER", "seed=1,"),
        ("has no seed; write seed=1", "FlippedByte=0.1"),
        ("seed stands twice", "seed=1,seed=2"),
        ("Drop stands twice", "seed=1,Drop=0.1,Drop=0.2"),
        ("seed is '-1'", "seed=-1"),
        ("seed is '1.5'", "seed=1.5"),
        ("late is ''", "seed=1,late="),
        ("late is 0 s; above 0", "seed=1,late=0"),
        ("late is 61 s; above 0, at most 60", "seed=1,late=61"),
        (
            "'flippedbyte' is no fault; seed, late and these are: Drop, Delay",
            "seed=1,flippedbyte=1",
        ),
        ("' Drop' is no fault", "seed=1, Drop=0.1"),
        ("Drop is 'nan'; it must be a plain number", "seed=1,Drop=nan"),
        ("Drop is '1e400'", "seed=1,Drop=1e400"),
        ("the shares of faults add up to 1.4; at most 1", "seed=1,Drop=0.7,Delay=0.7"),
        ("has 1007 characters; at most 1000", "seed=1," + "9" * TEXT_LENGTH_MAX),
    ],
)
def test_a_wrong_plan_is_refused_by_name(expected: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_fault_plan(text, field="f")

    assert caught.value.detail.startswith("f")
    assert expected in caught.value.detail


@pytest.mark.parametrize("text", ["", "seed=1", "@plans/now"])
def test_nothing_a_plan_and_a_file_are_what_may_be_asked_for(text: str) -> None:
    require_faults(text, field="f")


@pytest.mark.parametrize(
    ("expected", "text"), [("f is '@'; a path must follow", "@"), ("no NAME=NUMBER", " ")]
)
def test_anything_else_is_refused(expected: str, text: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        require_faults(text, field="f")


def test_the_documentation_tabulates_every_fault() -> None:
    text = (ROOT / "docs/concepts/verification.md").read_text(encoding="utf-8")

    assert sorted(Fault) == sorted(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
