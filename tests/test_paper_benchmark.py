"""The paper's figures: as printed, as counted, and what docs/paper.md says of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import paper
import paper_claims
import paper_swin
import paper_trim
import pytest
from evidence import RESULTS, Recorder, Results
from paper_models import DEIT, Subject, subjects
from paper_printed import _paper, printed, reference, rows_of

import hetdpt
from hetdpt.core.plan import Plan
from hetdpt.measurement.costs import Costs
from hetdpt.measurement.speed import Rounds

COSTS, CLAIMS = (Results.read(RESULTS / f"paper_{name}.json") for name in ("costs", "claims"))
PAPER = Path(__file__).parents[2] / "shared" / "paper" / "000_d32e1aa76b8001bc.txt"
needs_paper = pytest.mark.skipif(not PAPER.is_file(), reason="the paper's source is not here")


def cost(table: int, group: str, row: str, variant: str) -> dict[str, Any]:
    found = COSTS.find(table=table, group=group, row=row, variant=variant)
    assert found
    return found.values


def claim(**key: Any) -> dict[str, Any]:
    found = CLAIMS.where(**key)
    assert len(found) == 1, key
    return found[0].values


# --- as printed ------------------------------------------------------------------------------------------------------


@needs_paper
def test_printed_figures_stand_on_the_lines_that_are_named() -> None:
    lines = PAPER.read_text().split("\n")
    for table in _paper()["tables"].values():
        for row in table["rows"]:
            line = re.sub(r"\\textbf\{([^}]*)\}", r"\1", lines[row["line"] - 1]).rstrip("\\ ")
            name, *cells = (cell.strip() for cell in line.split("&"))
            figures = [value for key, value in row.items() if key not in ("line", "group", "row")]
            assert (name, [float(cell) for cell in cells]) == (row["row"], figures)
    for text in _paper()["text"].values():
        assert text["quote"] in lines[text["line"] - 1]


@needs_paper
def test_the_small_tables_have_the_figures_of_the_large_ones() -> None:
    lines = PAPER.read_text().split("\n")
    for small, large in (("comparison_deit_swin", 8), ("comparison_sota_fang", 9)):
        begin = next(number for number, line in enumerate(lines) if f"tab:{small}}}" in line)
        end = next(number for number in range(begin, len(lines)) if "end{tabular}" in lines[number])
        cells = [re.sub(r"[^\d.&]", "", line).split("&")[1:] for line in lines[begin:end]]
        rows = [[float(cell) for cell in row] for row in cells if len(row) == 5 and row[-1]]
        known = {tuple(round(row[name], 1) for name in ("top1", "macs_g", "params_m")) for row in rows_of(large)}
        assert len(rows) >= 8
        assert {(row[0], row[1], row[3]) for row in rows} <= known


def test_the_two_files_of_printed_figures_agree() -> None:
    speeds = reference()["paper_speed_h800"]
    assert speeds["HetDPT-B 8"] == printed(8, "DeiT-B", "HetDPT (8 layers)")["throughput"]
    assert speeds["HetDPT Swin-B"] == printed(8, "Swin-B", "HetDPT")["throughput"]
    by_size = {(row["macs_g"], row["params_m"]): row for row in rows_of(9)}
    for _, top1, macs, speed, params in reference()["paper_hetdpt_plus"]["rows"]:
        row = by_size[macs, params]
        assert (row["top1"], row["throughput"]) == (top1, speed)


# --- as counted ------------------------------------------------------------------------------------------------------


def test_costs_are_the_facts_of_the_reference() -> None:
    facts = {(row["model"], tuple(row["attention"]), tuple(row["activation"])): row for row in reference()["costs"]}
    checked = 0
    for (table, group, row), (size, what) in DEIT.items():
        plan = hetdpt.published_plan(what) if isinstance(what, str) else what
        for heads, model in (("one head", f"{size}_patch16_224"), ("two heads", f"{size}_distilled_patch16_224")):
            if fact := facts.get((model, plan.attention, plan.activation)):
                found = cost(table, group, row, heads)
                assert (found["params"], found["macs"]) == (fact["params"], fact["macs"])
                assert found["macs_without_products"] == fact["macs_without_attention_products"]
                if plan.attention:
                    assert cost(table, group, row, f"{heads}, norm1 kept")["params"] == fact["params_if_norm1_kept"]
                checked += 1
    assert checked >= len(facts)
    giant = reference()["dinov2_giant"]
    assert cost(6, "DINOv2-giant", "DINO-V2-Giant (Dense)", "timm")["params"] == giant["dense_params"]
    assert cost(6, "DINOv2-giant", "HetDPT (15 layers)", "whole branches")["params"] == giant["pruned_params"]
    for group, fact in zip(("Swin-S", "Swin-B"), reference()["swin_dense"].values(), strict=True):
        found = cost(8, group, f"SwinTransformer-{group[-1]} (Dense)", "timm")
        assert (found["macs"] / 1e9, found["params"] / 1e6) == (fact["macs_g"], fact["params_m"])


def test_a_row_is_counted_again_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = next(row for row in subjects("DeiT-S") if (row.row, row.variant) == ("HetDPT (8 layers)", "two heads"))
    monkeypatch.setattr(paper, "subjects", lambda group: iter([one]))
    paper.count(Recorder(tmp_path / "paper_costs.json"), is_quick=True)
    [found] = Results.read(tmp_path / "paper_costs.json").rows
    assert found.values == cost(8, "DeiT-S", "HetDPT (8 layers)", "two heads")


def test_torch_pruning_leaves_out_the_products_of_a_class_it_does_not_know() -> None:
    subject = Subject(0, "", "", "", "vit_tiny_patch16_224")
    model = subject.build()
    known, unknown = (paper.torch_pruning_macs(model, subject, is_class_known=known) for known in (True, False))
    costs = Costs.of(model, subject.input_size)
    products = costs.macs - costs.macs_without_attention_products
    assert known - unknown == pytest.approx(products, rel=0.03)  # softmax and scaling are counted with them
    for block in model.blocks:
        block.attn.__class__ = type("Attention", (type(block.attn),), {})
    assert paper.torch_pruning_macs(model, subject, is_class_known=True) == unknown


# --- what follows ----------------------------------------------------------------------------------------------------


def test_claims_follow_from_the_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper_claims, "swin_choices", lambda: iter(()))  # a minute; it has tests of its own
    found = list(paper_claims.claims(COSTS))
    assert len(found) == len(CLAIMS.rows) - 4
    for key, values in found:
        assert claim(**key) == values


def test_another_count_is_another_claim() -> None:
    wrong = [
        replace(row, values={**row.values, "macs_without_products": round(1.01 * row.values["macs_without_products"])})
        for row in COSTS.rows
    ]
    found = {tuple(key.values()): values for key, values in paper_claims.readings(replace(COSTS, rows=tuple(wrong)))}
    assert found["reading", 8, "DeiT-B", "HetDPT (8 layers)"]["same_both_products_left_out"] == "none"
    right = claim(claim="reading", table=8, group="DeiT-B", row="HetDPT (8 layers)")
    assert right["same_both_products_left_out"] == "two heads"


@pytest.mark.parametrize(("table", "group", "row"), DEIT)
def test_dense_rows_count_the_products_and_pruned_rows_do_not(table: int, group: str, row: str) -> None:
    found = claim(claim="reading", table=table, group=group, row=row)
    is_dense = not (row.startswith(("NOSE", "HetDPT")))
    heads = "one head" if table == 8 or row == "DeiT-S-KD" else "two heads"
    assert found["same_both_products_counted"] == (heads if is_dense else "none")
    assert found["same_both_products_left_out"] == ("none" if is_dense else "two heads")
    assert found["torch_pruning_class_known" if is_dense else "torch_pruning_class_unknown"] != "none"


def test_other_rows_are_read_as_the_page_says() -> None:
    for row in ("TNT-S", "PVTv2-B2"):
        assert claim(claim="reading", table=9, row=row)["same_both_products_counted"] == "none"
        assert claim(claim="reading", table=9, row=row)["same_both_products_left_out"] == "timm"
    cait = claim(claim="reading", table=9, row="Cait-S24")
    assert {cait["same_both_products_counted"], cait["same_both_products_left_out"]} == {"none"}
    assert cait["torch_pruning_class_known"] == "timm"
    for group in ("Swin-S", "Swin-B"):
        dense = claim(claim="reading", group=group, row=f"SwinTransformer-{group[-1]} (Dense)")
        assert (dense["same_both_products_counted"], dense["torch_pruning_class_known"]) == ("timm", "none")
        assert (
            CLAIMS.where(claim="reading", group=group)[1].values["same_both_products_counted"] == "layers chosen by us"
        )
    for size in ("4.2G", "2.6G", "1.2G"):
        found = claim(claim="reading", row=f"Isomorphic-Pruning{size}")
        assert found["same_both_products_counted"] == "published ratios"
        assert found["same_both_products_left_out"] == "none"


@pytest.mark.parametrize(
    ("ours", "other", "is_less"), [("3.7G", "4.2G", True), ("2.4G", "2.6G", True), ("1.1G", "1.2G", False)]
)
def test_plus_rows_fit_without_the_products(ours: str, other: str, is_less: bool) -> None:
    found = claim(claim="at the printed parameters", row=f"HetDPT+-{ours}")
    figure = printed(9, "DeiT-B-KD", f"HetDPT+-{ours}")["macs_g"]
    assert abs(found["macs_without_products"] / figure - 1) < 0.02 < 0.07 < found["macs"] / figure - 1
    assert found["scale"] == pytest.approx(1, abs=0.025)  # its sizes are multiples of 8
    rival = claim(claim="at the printed parameters", row=f"Isomorphic-Pruning{other}")
    assert (found["macs"] < rival["macs"]) is is_less
    printed_lead = printed(9, "DeiT-B-KD", f"Isomorphic-Pruning{other}")["macs_g"] - figure
    assert printed_lead > rival["macs"] - found["macs"]


def test_what_the_page_says_of_speedups() -> None:
    def efficiency(row: str, **key: Any) -> dict[str, Any]:
        return claim(claim="efficiency", row=row, **key)

    for group, row in (("DeiT-B", 8), ("DeiT-B", 10), ("DeiT-S", 6), ("DeiT-S", 8)):
        found = efficiency(f"HetDPT ({row} layers)", group=group)
        assert found["of_printed_macs"] < found["of_macs_in_full"]
        assert 0.97 <= found["of_macs_in_full"] < 1
    for one in CLAIMS.where(claim="efficiency"):
        if one.key["row"].startswith("NOSE") or one.key["group"] in ("Swin-S", "Swin-B", "DINOv2-giant"):
            assert one.values["of_macs_in_full"] > 1.01
    for ours, other in (("3.7G", "4.2G"), ("1.1G", "1.2G")):
        depth, width = efficiency(f"HetDPT+-{ours}"), efficiency(f"Isomorphic-Pruning{other}")
        assert depth["of_printed_macs"] < width["of_printed_macs"]
        assert depth["of_macs_in_full"] > width["of_macs_in_full"]
    for group, row in (("Swin-S", "HetDPT (10 layers)"), ("Swin-B", "HetDPT")):
        dense = cost(8, group, f"SwinTransformer-{group[-1]} (Dense)", "timm")["macs"] / 1e9
        assert dense / (printed(8, group, row)["macs_g"] - 0.05) < printed(8, group, row)["speedup"]
    assert [one.key["row"] for one in CLAIMS.where(claim="speedup is no quotient")] == ["WD-Pruning (0.2-24)"]


def test_what_the_page_says_of_the_rest() -> None:
    found = claim(claim="reduction")
    assert round(found["of_printed"]) == 33
    assert round(found["two_heads_of_one"], 1) == 30.1
    for row, which in (("NOSE (12 layers)", "12 attention"), ("HetDPT (15 layers)", "8 attention")):
        giant = claim(claim="giant", row=row)
        assert giant["agreeing"] == 1
        assert giant["which"].startswith(f"{which} (attention, norm and LayerScale)")
    assert "7 FFN (FFN, norm and LayerScale)" in claim(claim="giant", row="HetDPT (15 layers)")["which"]
    assert claim(claim="attention alone", group="DeiT-B")["layers_by_macs"] > 12
    assert claim(claim="attention alone", group="DeiT-B")["ratio_without_any"] < 1.58
    assert 7 < claim(claim="attention alone", group="DeiT-S")["layers_by_throughput"] < 8
    points = [claim(claim="bias of short training", attention=layers)["points"] for layers in (0, 5, 6)]
    assert points == sorted(points, reverse=True)
    assert points[0] == 0
    tokens = claim(claim="tokens")
    assert tokens["to_called_dense"] == pytest.approx(tokens["to_hetdpt"], rel=0.01)
    assert tokens["to_dense"] > 1.9
    assert claim(claim="samples")["differing"] == "4 + 0, 0 + 1"


@needs_paper
def test_the_ablation_has_the_accuracies_of_the_tables_of_plans() -> None:
    text = PAPER.read_text()
    text = text[text.index("label{tab:ab}") :]
    found = [float(cell) for cell in re.findall(r"(\d\d\.\d)", text[: text.index("end{tabular}")])]
    order = ("hetdpt", "map+te", "importance-only", "te-static")
    plans = reference()["paper_plans"]
    assert found == [
        plans[model][layers][name][2] for model, layers in (("deit_small", "8"), ("deit_base", "10")) for name in order
    ]


# --- which layers of a Swin ------------------------------------------------------------------------------------------


def test_a_choice_of_swin_layers_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = np.array(
        [[0, 0, 0, 0, 3, 1, 0, 0], [1, 0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 2, 2, 0, 0], [0, 0, 0, 0, 1, 0, 0, 0]]
    )
    costs = np.array([[7.31e9, 7e9, 40e6], [7.29e9, 7e9, 40e6], [7.3e9, 7e9, 40.04e6], [7.3e9, 7e9, 41e6]])
    monkeypatch.setattr(paper_swin, "choices", lambda name: paper_swin.Choices(counts, costs))
    assert paper_swin.even_choice("", 7.3, 40.0, 4).tolist() == counts[2].tolist()  # even, and all in stage 3
    assert len(paper_swin.choices("").meeting(7.0, 40.0)) == 0
    assert len(paper_swin.choices("").meeting(7.0, 40.0, products=False)) == 3
    plan = paper_swin.plan_of_counts(counts[1])
    assert (plan.attention, plan.activation) == ((1, 21), (3, 21))


@pytest.mark.slow
def test_claims_on_the_swins_follow_from_all_choices() -> None:
    for key, values in paper_claims.swin_choices():
        assert claim(**key) == values


# --- speed -----------------------------------------------------------------------------------------------------------


def test_a_group_is_timed_and_has_its_efficiency(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plan = "vit_tiny_patch16_224", Plan(attention=range(6), activation=range(6))
    rows = [Subject(0, "X", "X (Dense)", "timm", name), Subject(0, "X", "half", "two heads", name, plan)]
    monkeypatch.setattr(paper, "subjects", lambda group: iter(rows))
    paper.time_group(Recorder(tmp_path / "paper_speed.json"), "X", batch=1, runs=2)
    [found] = Results.read(tmp_path / "paper_speed.json").rows
    assert found.key == {"group": "X", "row": "half", "batch": 1}
    assert found.values["mac_ratio"] > 1.5
    assert found.values["efficiency"][0] == pytest.approx(
        found.values["speedup"][0] / found.values["mac_ratio"], abs=1e-4
    )


def test_the_giant_is_put_together_from_a_block() -> None:
    of = {"block": 10.0, "no attention": 7.0, "no FFN": 4.0}
    assert paper._left(of, 40, 8, 7) == 40 * 10 - 8 * 3 - 7 * 6
    assert paper._left(of, 1, 1, 0) == 7


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ("DeiT-S", ["DeiT-S (Dense)", "NOSE (4 layers)", "NOSE (5 layers)", "HetDPT (6 layers)", "HetDPT (8 layers)"]),
        (
            "DeiT-B-KD",
            ["DeiT-B-KD", *(f"Isomorphic-Pruning{size}" for size in ("4.2G", "2.6G", "1.2G"))]
            + [f"HetDPT+-{size}" for size in ("3.7G", "2.4G", "1.1G")],
        ),
    ],
)
def test_the_models_that_are_timed_begin_with_the_dense_one(group: str, expected: list[str]) -> None:
    assert [subject.row for subject in paper.timed(group)] == expected


# --- tokens that nothing reads left out -------------------------------------------------------------------------------

TRIMMED = {  # ratios of MACs before and after, by hand from the formula of the issue
    ("DeiT-B", "dense"): (1.0, 1.074),
    ("DeiT-S", "paper/deit_small-6"): (1.295, 1.448),
    ("DeiT-S", "paper/deit_small-8"): (1.436, 1.627),
    ("DeiT-B", "paper/deit_base-8"): (1.438, 1.613),
    ("DeiT-B", "paper/deit_base-10"): (1.615, 1.696),
    ("DeiT-B", "paper/deit_base-10/te-static"): (1.615, 1.884),
    ("DeiT-B", "paper/deit_base-6/attention-only"): (1.218, 1.330),
}


def test_trimmed_plans_have_the_ratios_of_macs_that_were_predicted() -> None:
    found = Results.read(RESULTS / "paper_trim.json")
    for (model, plan), expected in TRIMMED.items():
        row = found.find(model=model, plan=plan)
        assert row
        assert (round(row.values["mac_ratio"], 3), round(row.values["trimmed_mac_ratio"], 3)) == expected
    assert len([row for row in found.rows if "runtime" not in row.key]) == 20  # both dense models and 18 plans


def test_a_plan_is_counted_again_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = paper_trim.Subject("DeiT-S", "paper/deit_small-8")
    monkeypatch.setattr(paper_trim, "subjects", lambda: [one])
    recorder = Recorder(tmp_path / "paper_trim.json")
    paper_trim.count_trimmed(recorder)
    [row] = Results.read(recorder.file).rows
    committed = Results.read(RESULTS / "paper_trim.json").find(**one.key)
    assert committed
    assert row.values == committed.values


def test_the_share_of_the_ratio_is_that_of_the_trimmed_model() -> None:
    times = {("dense", False): 6.0, ("dense", True): 5.0, ("p", False): 4.0, ("p", True): 3.0}
    macs = {("dense", False): 600, ("dense", True): 500, ("p", False): 400, ("p", True): 250}
    row = paper_trim.row_of("p", {name: np.array([one, one]) for name, one in times.items()}, macs)
    assert (row["speedup"][0], row["efficiency"][0]) == (1.5, 1.0)
    assert (row["trimmed_speedup"][0], row["trimmed_mac_ratio"]) == (2.0, 2.4)
    assert row["trimmed_efficiency"][0] == pytest.approx(2 / 2.4, abs=1e-4)
    assert (row["gain"][0], row["mac_gain"]) == (pytest.approx(4 / 3, abs=1e-4), 1.6)


def test_plans_are_timed_with_and_without_trimming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(paper_trim.SIZES, "DeiT-S", "deit_tiny")
    plans = [paper_trim.Subject("DeiT-S", name) for name in ("dense", "paper/deit_small-8")]
    monkeypatch.setattr(paper_trim, "published_plans", lambda: {plans[1].plan: Plan((9, 10, 11), (10, 11))})
    recorder = Recorder(tmp_path / "paper_trim.json")
    for _ in range(2):
        paper_trim.time_trimmed(recorder, "eager", 1, plans, Rounds(2, 0), tmp_path)
        dense, pruned = Results.read(recorder.file).rows
        monkeypatch.setattr(paper_trim, "_interleave", None)  # the second time nothing runs
    assert dense.key == {"model": "DeiT-S", "plan": "dense", "runtime": "eager", "batch": 1}
    assert dense.values["speedup"] == [1.0, 1.0, 1.0]
    assert 1.04 < dense.values["trimmed_mac_ratio"] < 1.1 < 1.3 < pruned.values["trimmed_mac_ratio"]
