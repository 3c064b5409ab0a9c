"""The values that stages exchange: what they accept, what they refuse and in which words, their way through JSON."""

from __future__ import annotations

import json
import re
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetdpt.core.errors import PlanError
from hetdpt.core.plan import (
    Anatomy,
    Budget,
    Measurement,
    Plan,
    Removal,
    Sample,
    Site,
    with_class_token,
)
from hetdpt.core.published import published_plan, published_plans
from hetdpt.core.styles import PRESETS, styles_for

REFERENCE = json.loads((Path(__file__).parents[1] / "benchmarks" / "reference" / "reference.json").read_text())
DEIT_S = Anatomy(12, 384, tuple(range(12)), tuple(range(12)))

KEYS = ", ".join(sorted(field.name for field in fields(Plan)))

blocks = st.sets(st.integers(0, 60)).map(tuple)
removals = st.sampled_from([*PRESETS]) | st.tuples(
    st.sampled_from(styles_for("attention")), st.sampled_from(styles_for("activation"))
)
anatomies = st.builds(
    Anatomy,
    st.integers(0, 60),
    st.integers(0, 2048),
    blocks.map(sorted).map(tuple),
    blocks.map(sorted).map(tuple),
)
plans = st.builds(Plan, blocks, blocks, removals, st.none() | anatomies, tail=st.integers(0, 60))
keys = st.sampled_from(["attention", "activation", "removal", "anatomy", "tail", "other"])
leaves = st.none() | st.booleans() | st.integers() | st.text()
written = st.recursive(leaves, lambda part: st.lists(part) | st.dictionaries(keys, part))
# Time is not what is tested here, and the machine may be busy.
few = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def refused(text: str) -> Any:
    """Expect a ``PlanError`` that says exactly ``text``."""
    return pytest.raises(PlanError, match=f"^{re.escape(text)}$")


def test_blocks_are_sorted_whatever_holds_them() -> None:
    assert Plan(attention=(10, 1), activation=[8, 3, 5]).activation == (3, 5, 8)  # type: ignore[arg-type]
    assert Plan(attention={2, 1}).attention == (1, 2)  # type: ignore[arg-type]
    assert Plan(attention=range(3)).attention == (0, 1, 2)  # type: ignore[arg-type]
    assert Plan(attention=(10, 1)) == Plan(attention=(1, 10))
    assert hash(Plan(attention=[1, 10])) == hash(Plan(attention=(10, 1)))  # type: ignore[arg-type]


def test_a_plan_counts_and_answers() -> None:
    plan = Plan(attention=(1, 10), activation=(8,))
    assert (len(plan), plan.budget) == (3, Budget(2, 1))
    assert len(Plan()) == 0
    assert plan.removes(Site("attention", 1, "blocks.1.attn"))
    assert not plan.removes(Site("activation", 1, "blocks.1.mlp.act"))
    assert plan.removes(Site("activation", 8, "blocks.8.mlp.act"))


def test_values_are_frozen_and_comparable() -> None:
    plan = Plan(attention=(1,))
    with pytest.raises(FrozenInstanceError):
        plan.attention = (2,)  # type: ignore[misc]
    assert len({plan, Plan(attention=(1,)), Plan(activation=(1,)), Plan(attention=(1,), removal="norm")}) == 3
    assert Sample(Budget(1, 2), 80.1) == Sample(Budget(1, 2), 80.1)


def test_duplicates_are_refused() -> None:
    with refused("the plan lists attention 1, 3 more than once; name every block once"):
        Plan(attention=(3, 1, 1, 3, 2))
    with refused("the plan lists activation 0 more than once; name every block once"):
        Plan(activation=(0, 0))


@pytest.mark.parametrize("wrong", [(-1,), (1.0,), ("1",), (True,), "12", 3, None, {"1": 2}, ((1,),)])
def test_what_is_no_list_of_blocks_is_refused(wrong: Any) -> None:
    with refused(f"attention of a plan lists block numbers counted from 0, such as (1, 10), not {wrong!r}"):
        Plan(attention=wrong)


@pytest.mark.parametrize("name", PRESETS)
def test_a_removal_has_a_name_or_is_a_pair(name: str) -> None:
    plan = Plan(removal=name)
    styles = plan.style_of("attention").name, plan.style_of("activation").name
    assert styles == plan.styles == PRESETS[name].styles
    assert Plan(removal=PRESETS[name].styles).styles == plan.styles


@pytest.mark.parametrize(
    "wrong",
    [
        "skipp",
        ("skip",),
        ("skip", "identity", "drop"),
        ("identity", "skip"),
        ["skip", "identity"],
        1,
        None,
        (["skip"], 1),
    ],
)
def test_an_unknown_removal_is_refused(wrong: Any) -> None:
    text = (
        "removal is one of plain, norm, authors, calibrated or a pair (attention style of skip, norm, constant, "
        "position, linear; activation style of identity, calibrated, identity-keep, calibrated-keep, drop), "
        f"not {wrong!r}"
    )
    with refused(text):
        Plan(removal=wrong)


def test_styles_of_sites_are_those_that_differ() -> None:
    plan = Plan(attention=(1, 2), site_styles=(("attention", 2, "norm"), ("attention", 1, "skip")))
    assert plan.site_styles == (("attention", 2, "norm"),)
    assert plan == Plan.from_json(plan.to_json()) != Plan(attention=(1, 2))
    first = Site("attention", 1, "blocks.1.attn")
    assert plan.with_style(first, "norm").site_styles == (("attention", 1, "norm"), ("attention", 2, "norm"))
    assert plan.with_style(first, "skip") == plan
    assert not plan.needs_images
    assert plan.with_style(first, "linear").fitted == ("linear",)
    assert Plan(activation=(0,), site_styles=(("activation", 0, "calibrated-keep"),)).class_token == "keep"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ((("attention", 3, "norm"),), "expected a kind and a block that the plan removes"),
        ((("attention", 1, "identity"),), "and a style for that kind"),
        ((("colour", 1, "norm"),), "expected a kind"),
        ((("attention", 1),), r"is a list of \(kind, block, style\)"),
        ("attention", r"is a list of \(kind, block, style\)"),
        ((([], 1, {}),), r"is a list of \(kind, block, style\)"),
        ((("attention", "1", "norm"),), r"is a list of \(kind, block, style\)"),
    ],
)
def test_wrong_styles_of_sites_are_refused(wrong: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Plan(attention=(1,), site_styles=wrong)


@pytest.mark.parametrize(
    ("share", "keep"),
    [
        ("calibrated", ("constant", "calibrated-keep")),
        ("plain", ("skip", "identity-keep")),
        (("linear", "identity"), ("linear", "identity-keep")),
    ],
)
def test_the_class_token_keeps_its_ffn_or_shares_that_of_patches(share: Removal, keep: Removal) -> None:
    assert (with_class_token(share, "keep"), with_class_token(keep, "keep")) == (keep, keep)
    assert (with_class_token(share, "share"), with_class_token(keep, "share")) == (share, share)
    assert (Plan(removal=share).class_token, Plan(removal=keep).class_token) == ("share", "keep")


@pytest.mark.parametrize("removal", ["authors", ("skip", "drop")])
def test_other_removals_have_nothing_to_keep(removal: Removal) -> None:
    with refused(
        "the class token can keep its FFN with activation style 'identity' or 'calibrated', not with removal "
        f"{removal!r}; use class_token 'share'"
    ):
        with_class_token(removal, "keep")


@few
@given(plans)
def test_json_gives_the_same_plan_back(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_dict(json.loads(plan.to_json())) == plan


@few
@given(plans)
def test_an_equal_plan_has_equal_json(plan: Plan) -> None:
    shuffled = replace(plan, attention=plan.attention[::-1], activation=plan.activation[::-1])
    assert shuffled.to_json() == plan.to_json()


@few
@given(written)
def test_any_json_is_a_plan_or_a_plan_error(values: Any) -> None:
    try:
        plan = Plan.from_json(json.dumps(values))
    except PlanError:
        return
    assert Plan.from_json(plan.to_json()) == plan


def test_a_hand_written_plan_needs_only_what_it_removes() -> None:
    assert Plan.from_json('{"attention": [10, 1]}') == Plan(attention=(1, 10))
    assert Plan.from_json('{"removal": ["skip", "drop"]}') == Plan(removal=("skip", "drop"))
    assert Plan.from_json("{}") == Plan()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "{attention: [1]}",
            "a plan is a JSON object, but got invalid JSON (Expecting property name enclosed in double quotes: "
            "line 1 column 2 (char 1)); see Plan.to_json",
        ),
        (
            "",
            "a plan is a JSON object, but got invalid JSON (Expecting value: line 1 column 1 (char 0)); "
            "see Plan.to_json",
        ),
        ("[1, 10]", f"a plan is a JSON object with keys {KEYS}, not list"),
        ("null", f"a plan is a JSON object with keys {KEYS}, not NoneType"),
        ('{"atention": [1], "b": 2}', f"a plan has the keys {KEYS}, not atention, b"),
        ('{"tail": -1}', "tail of a plan is how many of the last blocks it has, such as 2, not -1"),
        ('{"tail": 1.5}', "tail of a plan is how many of the last blocks it has, such as 2, not 1.5"),
        ('{"tail": "2"}', "tail of a plan is how many of the last blocks it has, such as 2, not '2'"),
        ('{"tail": true}', "tail of a plan is how many of the last blocks it has, such as 2, not True"),
        ('{"attention": 1}', "attention of a plan lists block numbers counted from 0, such as (1, 10), not 1"),
        (
            '{"activation": [0.5]}',
            "activation of a plan lists block numbers counted from 0, such as (1, 10), not [0.5]",
        ),
        (
            '{"anatomy": {"blocks": 12}}',
            "anatomy of a plan is null or an object with the keys blocks, width, attention, activation, "
            "not {'blocks': 12}",
        ),
        (
            '{"anatomy": 12}',
            "anatomy of a plan is null or an object with the keys blocks, width, attention, activation, not 12",
        ),
        (
            '{"anatomy": {"blocks": "12", "width": 1, "attention": [], "activation": []}}',
            "blocks and width of a plan's anatomy are whole numbers, not "
            "{'blocks': '12', 'width': 1, 'attention': [], 'activation': []}",
        ),
    ],
)
def test_what_is_wrong_with_a_written_plan_is_said(text: str, says: str) -> None:
    with refused(says):
        Plan.from_json(text)


def test_nesting_without_end_is_not_a_crash() -> None:
    with pytest.raises(PlanError, match=r"^a plan is a JSON object, but got invalid JSON"):
        Plan.from_json("[" * 200_000)


def test_a_plan_written_before_there_were_tails_has_none() -> None:
    values = {"attention": [1], "activation": [], "removal": "plain", "anatomy": None, "fits": []}
    assert Plan.from_json(json.dumps(values)) == Plan(attention=(1,), tail=0)


def test_a_tail_is_part_of_a_plan() -> None:
    plan = Plan(attention=(1,), tail=2)
    assert (len(plan), plan.tail, plan.is_empty, plan.needs_images) == (1, 2, False, True)
    assert (Plan(tail=1).is_empty, Plan(tail=1).needs_images, Plan().is_empty) == (False, False, True)
    assert Plan.from_json(plan.to_json()) == plan != Plan(attention=(1,))
    Plan(tail=12).check(DEIT_S)
    with refused("the plan has a tail of 13 blocks but this model has 12 blocks; give a tail of at most 12"):
        Plan(tail=13).check(DEIT_S)


def test_a_plan_that_fits_is_accepted() -> None:
    Plan(attention=(0, 11), activation=(5,)).check(DEIT_S)
    Plan(attention=(0, 11), anatomy=DEIT_S).check(DEIT_S)
    Plan().check(DEIT_S)


def test_an_index_out_of_range_is_refused() -> None:
    with refused("the plan removes attention 12 but this model has blocks 0-11; was it made for a deeper model?"):
        Plan(attention=(3, 12)).check(DEIT_S)
    with refused("the plan removes activation 23 but this model has blocks 0-11; was it made for a deeper model?"):
        Plan(activation=(23,)).check(DEIT_S)


def test_a_site_that_is_not_offered_is_refused() -> None:
    anatomy = Anatomy(4, 64, (1, 3), ())
    text = "the plan removes attention 2 but block 2 of this model has no attention site; blocks that have one: 1, 3"
    with refused(text):
        Plan(attention=(1, 2)).check(anatomy)
    text = "the plan removes activation 0 but block 0 of this model has no activation site; blocks that have one: none"
    with refused(text):
        Plan(activation=(0,)).check(anatomy)


@pytest.mark.parametrize(
    "other", [replace(DEIT_S, width=768), replace(DEIT_S, blocks=24), replace(DEIT_S, attention=())]
)
def test_a_plan_for_another_model_is_refused(other: Anatomy) -> None:
    text = (
        f"the plan was made for a model with {DEIT_S}, but this one has {other}; "
        "make a plan for this model, or delete 'anatomy' from the plan to apply it anyway"
    )
    with refused(text):
        Plan(activation=(1,), anatomy=DEIT_S).check(other)
    Plan(activation=(1,)).check(other)


def test_values_are_spelt_for_people() -> None:
    assert str(DEIT_S) == "12 blocks of width 384 with 12 attention and 12 activation sites"
    speed = Measurement("throughput", 1234.5, "img/s", "cuda", "float16", 256, spread=12.34, runs=100)
    assert str(speed) == "throughput 1234 ± 12 img/s (cuda, float16, batch 256)"
    assert Site("activation", 3, "blocks.3.mlp.act").is_gated is False


def name_of(model: str, layers: str, method: str) -> str:
    return f"paper/{model}-{layers}" + ("" if method == "hetdpt" else f"/{method}")


def test_published_plans_are_those_of_the_paper() -> None:
    expected = {}
    for model, by_layers in REFERENCE["paper_plans"].items():
        if model == "columns":
            continue
        for layers, by_method in by_layers.items():
            for method, (attention, activation, _) in by_method.items():
                expected[name_of(model, layers, method)] = (attention, activation)
    for row in REFERENCE["costs"]:
        if row.get("paper_row", "").startswith("NOSE"):
            assert row["model"] == "deit_base_distilled_patch16_224"
            layers = str(len(row["attention"]))
            expected[name_of("deit_base", layers, "attention-only")] = (row["attention"], row["activation"])
    assert len(expected) == 18
    found = {name: (list(plan.attention), list(plan.activation)) for name, plan in published_plans().items()}
    assert found == expected


@pytest.mark.parametrize("name", published_plans())
def test_a_published_plan_removes_as_many_layers_as_its_name_says(name: str) -> None:
    plan = published_plan(name)
    assert plan == published_plans()[name]
    assert len(plan) == int(name.split("/")[1].rpartition("-")[2])
    assert plan.removal == "plain"
    assert plan.anatomy == (DEIT_S if "deit_small" in name else replace(DEIT_S, width=768))


def test_an_unknown_published_name_gives_near_matches() -> None:
    text = (
        "the paper has no plan called 'paper/deit_base-9'; it has 18, such as "
        "paper/deit_base-8, paper/deit_base-10, paper/deit_base-8/map+te"
    )
    with refused(text):
        published_plan("paper/deit_base-9")
    with pytest.raises(PlanError, match="it has 18, such as paper/deit_small-6, "):
        published_plan("zzz")
