"""The contract of every goal: written, parsed, met and reported; and goals that are given together."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from hetdpt.core.errors import PredictError
from hetdpt.core.goals import GOALS, Amount, Goal, GoalFields, Measures, Wanted, describe, show

every_goal = pytest.mark.parametrize("goal", GOALS.values(), ids=lambda goal: goal.name)
BAD = ("", "many", "-3", "3,2", "1e", "nan", "inf", "3.2GM", "%", "0%", "101%", True, -1, float("nan"), float("inf"))


def test_each_goal_is_a_setting_and_looks_at_something_measured() -> None:
    assert {field.name for field in fields(GoalFields)} == GOALS.keys()
    assert {goal.name for goal in GOALS.values()} <= {field.name for field in fields(Measures)}


@every_goal
def test_what_is_formatted_is_parsed_to_the_same(goal: Goal) -> None:
    texts = [goal.example, "8", *(["3.2G", "70%", "33.3 %", "1.1e6", "512k", "0.07M"] if goal.is_cost else [])]
    for value in (*texts, 3219068928):
        amount = goal.parse(value)
        assert goal.parse(goal.format(value)) == amount
        assert goal.format(goal.format(value)) == goal.format(value)
    assert goal.parse(goal.example) == goal.parse(goal.parse(goal.example).value)


@every_goal
@pytest.mark.parametrize("value", BAD, ids=repr)
def test_what_is_no_goal_is_refused_in_a_sentence(goal: Goal, value: Any) -> None:
    with pytest.raises(PredictError) as error:
        goal.parse(value, f"--{goal.name}")
    assert str(error.value) == f"--{goal.name} is {value!r}; expected {goal.expected}"
    assert goal.example in goal.expected


@every_goal
def test_it_is_met_or_missed(goal: Goal) -> None:
    wanted = goal.parse(goal.example).value
    better, worse = (1.1, 0.9) if goal.direction == "at least" else (0.9, 1.1)
    there, near, far = (Measures(**{goal.name: factor * wanted}) for factor in (1.0, better, worse))
    assert goal.is_met(there, wanted)
    assert goal.is_met(near, wanted) == (goal.direction != "exactly")
    assert not goal.is_met(far, wanted)
    assert goal.is_met(far, wanted, tolerance=0.2)
    assert not goal.is_met(Measures(), wanted)  # what nobody knows is not met
    both = Wanted({goal.name: wanted})
    assert both.miss(there) == 0 < both.miss(far)
    assert (both.missed(there), both.missed(far)) == ([], [goal.name])


@every_goal
@pytest.mark.parametrize("factor", [0.123456789, 1.0, 1.0001234, 7.7777777])
def test_what_is_shown_can_be_asked_for(goal: Goal, factor: float) -> None:
    reached = goal.parse(goal.example).value * factor
    reached = round(reached) if goal.is_count else reached
    shown = goal.attainable(reached)
    assert shown == pytest.approx(reached, rel=1e-3)  # four digits
    assert goal.is_met(Measures(**{goal.name: reached}), shown)
    assert goal.show(shown) == show(Measures(**{goal.name: reached}))


@every_goal
def test_it_is_described_as_it_was_written(goal: Goal) -> None:
    assert goal.example in describe({goal.name: goal.example}) == describe({goal.name: goal.parse(goal.example).value})
    assert goal.help.startswith("Goal: ")
    assert goal.help.endswith(".")


def test_shares_are_of_the_dense_model() -> None:
    assert GOALS["macs"].parse("57%").of(4e9) == 2.28e9  # to the bit, so that a split with just as much meets it
    assert Amount(57.0, is_share=True).of(None) == 57.0
    assert GoalFields(macs="70%", layers=3).amounts() == {"layers": Amount(3), "macs": Amount(70.0, is_share=True)}


def test_goals_together() -> None:
    wanted = Wanted({"macs": 3e9, "layers": 4})
    assert list(wanted.conditions) == ["layers", "macs"]
    assert wanted.miss(Measures(layers=2, macs=6e9)) == 1.5
    assert wanted.missed(Measures(layers=4, macs=6e9)) == ["macs"]
    for bad, text in (
        ({}, "no goal was given; expected layers, .*, or several of them"),
        ({"joules": 3.0}, "joules is not a goal; expected layers, "),
        ({"layers": 2.5}, "layers is 2.5; expected a whole number of at least 0, such as 8"),
        ({"macs": "3G"}, "macs is '3G'; expected a number"),
    ):
        with pytest.raises(PredictError, match=text):
            Wanted(bad)  # type: ignore[arg-type]
