"""What follows for the figures that the paper prints: each claim of docs/paper.md as a row of numbers.

A claim is computed from the figures as printed (``reference/paper_tables.json``, ``reference/reference.json``) and from
the costs counted by ``paper.py costs``. Printed figures are not repeated in the rows: paper and computed do not mix.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

from evidence import Key, Results, Values
from paper_models import GIANT, SWIN, SWIN_ROWS, create
from paper_printed import REFERENCE, printed, reference, rows_of, said
from paper_swin import choices

import hetdpt
from hetdpt.selection.predictor.polynomial import Predictor

COUNTERS = {"macs": "products_counted", "macs_without_products": "products_left_out"}
TORCH_PRUNING = {"torch_pruning_macs": "class_known", "torch_pruning_macs_without_products": "class_unknown"}
KEPT = ", norm1 kept"
# How each group is read where its MACs are counted in full: (variant of the dense row, variant of the others)
IN_FULL = {
    "DeiT-B": ("two heads", "two heads"),
    "DeiT-S": ("two heads", "two heads"),
    "Swin-S": ("timm", "layers chosen by us"),
    "Swin-B": ("timm", "layers chosen by us"),
    "DINOv2-giant": ("timm", "whole branches"),
}
SAMPLES = {"map_listing_16": "16 rows of the listing", "map_table_22": "22 rows of the table"}
Claim = tuple[Key, Values]


def claims(costs: Results) -> Iterator[Claim]:
    """Yield every claim: its key, and what was computed."""
    yield from readings(costs)
    yield from quotients()
    yield reduction(costs)
    yield from efficiencies(costs)
    yield from plus_at_printed_size(costs)
    yield from giant_choices()
    yield from swin_choices()
    yield from predictors()
    yield samples()
    yield formula()
    yield from short_runs()
    yield from attention_alone(costs)
    yield tokens()


def agrees(value: float, figure: float, digits: int) -> bool:
    """Whether a value is printed as this figure.

    >>> agrees(12.277, 11.8, 1), agrees(11.796, 11.8, 1), agrees(1.0342, 1.1, 2)
    (False, True, False)
    """
    return f"{value:.{digits}f}" == f"{figure:.{digits}f}"


def readings(costs: Results) -> Iterator[Claim]:
    """Yield for every printed row which of our models has both its MACs and its parameters, and by which counter."""
    places = {(row.key["table"], row.key["group"], row.key["row"]): None for row in costs.rows}
    for table, group, name in places:
        figures = printed(table, group, name)
        rows = costs.where(table=table, group=group, row=name)
        digits = 2 if table == 6 else 1
        same = [row for row in rows if agrees(row.values["params"] / 1e6, figures["params_m"], digits)]
        found = {"same_params": _either_norm([row.key["variant"] for row in same])}
        for title, counters in (("same_both", COUNTERS), ("torch_pruning", TORCH_PRUNING)):
            for counter, label in counters.items() if "macs_g" in figures else ():
                hits = [row for row in same if agrees(row.values[counter] / 1e9, figures["macs_g"], 1)]
                found[f"{title}_{label}"] = _either_norm([row.key["variant"] for row in hits])
        yield {"claim": "reading", "table": table, "group": group, "row": name}, found


def _either_norm(variants: list[str]) -> str:
    """Return the variants as a text; where the norm may be gone or kept, that is said once.

    >>> _either_norm(["two heads", "two heads, norm1 kept"]), _either_norm([])
    ('two heads', 'none')
    """
    plain = [one for one in variants if one.removesuffix(KEPT) not in variants or not one.endswith(KEPT)]
    return "; ".join(plain) or "none"


def quotients() -> Iterator[Claim]:
    """Yield for every table how many speedups are not the ratio of the throughputs, and what the ratio is of those."""
    for table in (6, 8, 9):
        rows = rows_of(table)
        ratios = [row["throughput"] / _dense(table, row["group"])["throughput"] for row in rows]
        off = [(row, ratio) for row, ratio in zip(rows, ratios, strict=True) if not agrees(ratio, row["speedup"], 2)]
        yield {"claim": "speedup is a quotient", "table": table}, {"rows": len(rows), "off": len(off)}
        for row, ratio in off:
            place = {"table": table, "group": row["group"], "row": row["row"]}
            yield {"claim": "speedup is no quotient", **place}, {"ratio": round(ratio, 4)}


def reduction(costs: Results) -> Claim:
    """Return by how many percent HetDPT-B of 8 layers has fewer MACs, counted in several ways."""
    printed_macs = [printed(8, "DeiT-B", name)["macs_g"] for name in ("DeiT-B (Dense)", "HetDPT (8 layers)")]
    one, two = (_cost(costs, 8, "DeiT-B", "DeiT-B (Dense)", heads)["macs"] for heads in ("one head", "two heads"))
    pruned = _cost(costs, 8, "DeiT-B", "HetDPT (8 layers)", "two heads")["macs"]
    return {"claim": "reduction"}, {
        "of_printed": round(100 * (1 - printed_macs[1] / printed_macs[0]), 2),
        "two_heads_of_one": round(100 * (1 - pruned / one), 2),
        "two_heads_of_two": round(100 * (1 - pruned / two), 2),
    }


def efficiencies(costs: Results) -> Iterator[Claim]:
    """Yield the speedup on the paper's GPU over the ratio of MACs, of those printed and of all of them."""
    for group, (dense_variant, variant) in IN_FULL.items():
        table = 6 if group == "DINOv2-giant" else 8
        dense = _dense(table, group)
        whole = _cost(costs, table, group, dense["row"], dense_variant)["macs"]
        for row in costs.where(table=table, group=group, variant=variant):
            if row.key["row"] != dense["row"]:
                figures = printed(table, group, row.key["row"])
                yield _efficiency(table, figures, dense, whole / row.values["macs"])
    whole = _cost(costs, 9, "DeiT-B-KD", "DeiT-B-KD", "two heads")["macs"]
    for variant in ("published ratios", "products left out"):
        for row in costs.where(table=9, variant=variant):
            figures = printed(9, "DeiT-B-KD", row.key["row"])
            yield _efficiency(9, figures, _dense(9, "DeiT-B-KD"), whole / row.values["macs"])


def _efficiency(table: int, figures: dict[str, Any], dense: dict[str, Any], in_full: float) -> Claim:
    speedup = figures["throughput"] / dense["throughput"]
    found = {"ratio_in_full": round(in_full, 4), "of_macs_in_full": round(speedup / in_full, 4)}
    if "macs_g" in figures:
        ratio = dense["macs_g"] / figures["macs_g"]
        found |= {"ratio_as_printed": round(ratio, 4), "of_printed_macs": round(speedup / ratio, 4)}
    return {"claim": "efficiency", "table": table, "group": figures["group"], "row": figures["row"]}, found


def plus_at_printed_size(costs: Results) -> Iterator[Claim]:
    """Yield the MACs that a narrow model has at the printed number of parameters, in G, by both counters.

    Nearly all parameters are weights of linear layers, used once for each token: MACs go with them. So our model, near
    the printed size, is scaled to it.
    """
    for row in costs.where(table=9, group="DeiT-B-KD"):
        if row.key["variant"] in ("products left out", "published ratios"):
            scale = 1e6 * printed(9, "DeiT-B-KD", row.key["row"])["params_m"] / row.values["params"]
            found = {counter: round(scale * row.values[counter] / 1e9, 3) for counter in COUNTERS}
            yield {"claim": "at the printed parameters", "row": row.key["row"]}, {**found, "scale": round(scale, 4)}


def giant_choices() -> Iterator[Claim]:
    """Yield how many attention layers and FFNs, removed in which way, leave the parameters printed for the giant."""
    model = create(GIANT, is_empty=True)
    dense, block = hetdpt.count_params(model), model.get_submodule("blocks.0")
    size = {name: hetdpt.count_params(part) for name, part in block.named_children()}
    one_map = (width := block.get_submodule("norm1").weight.numel()) * width + width
    attention = {
        "attention alone": size["attn"],
        "attention and LayerScale": size["attn"] + size["ls1"],
        "attention, norm and LayerScale": size["attn"] + size["ls1"] + size["norm1"],
    }
    ffn = {
        "FFN alone": size["mlp"],
        "FFN and LayerScale": size["mlp"] + size["ls2"],
        "FFN, norm and LayerScale": size["mlp"] + size["ls2"] + size["norm2"],
        "FFN made one linear layer": size["mlp"] - one_map,
        "FFN made one linear layer, LayerScale folded": size["mlp"] + size["ls2"] - one_map,
        "FFN made one linear layer, norm and LayerScale folded": size["mlp"] + size["ls2"] + size["norm2"] - one_map,
    }
    for row, layers in (("NOSE (12 layers)", 12), ("HetDPT (15 layers)", 15)):
        figure = printed(6, "DINOv2-giant", row)["params_m"]
        tried = {
            (f"{count} attention ({how})", f"{layers - count} FFN ({other})" if layers > count else "no FFN"): left
            for (how, saved), (other, less), count in product(attention.items(), ffn.items(), range(layers + 1))
            if agrees((left := dense - count * saved - (layers - count) * less) / 1e6, figure, 2)
        }
        number = len(attention) * len(ffn) * (layers + 1)
        text = "; ".join(" + ".join(pair) for pair in tried) or "none"
        yield {"claim": "giant", "row": row}, {"tried": number, "agreeing": len(tried), "which": text}


def swin_choices() -> Iterator[Claim]:
    """Yield how many choices of layers of a Swin leave the printed MACs and parameters, and their numbers of layers."""
    for group, name in SWIN.items():
        row, layers = SWIN_ROWS[group]
        figures = printed(8, group, row)
        there = choices(name) if layers is None else choices(name).of(layers)
        for counter, products in (("products counted", True), ("products left out", False)):
            found = there.meeting(figures["macs_g"], figures["params_m"], products=products)
            splits = Counter((int(one[0::2].sum()), int(one[1::2].sum())) for one in found)
            yield (
                {"claim": "swin", "group": group, "counter": counter},
                {
                    "tried": len(there.counts),
                    "agreeing": len(found),
                    "least_layers": int(found.sum(axis=1).min()),
                    "most_layers": int(found.sum(axis=1).max()),
                    "splits": ", ".join(f"{attention} + {activation}" for attention, activation in sorted(splits)),
                },
            )


def predictors() -> Iterator[Claim]:
    """Yield what MAP comes to on both of the paper's tables of samples, with ratios as printed and as meant."""
    for (name, title), exact in product(SAMPLES.items(), (False, True)):
        predictor = hetdpt.fit_predictor(reference()[name]["rows"], blocks=12, exact=exact)
        found: Values = {
            "degree": predictor.degree,
            "mae": round(predictor.mae, 4),
            "rmse": round(predictor.rmse, 4),
        }
        for layers in (8, 10):
            (best, first), (_, second) = _best_two(predictor, layers)
            found |= {f"split_{layers}": best, f"margin_{layers}": round(first - second, 3)}
        yield {"claim": "map", "samples": title, "ratios": "exact" if exact else "two decimals"}, found


def samples() -> Claim:
    """Return how the paper's two tables of samples differ, layers removed as attention + activation.

    ``activation_first`` are samples that Algorithm 2 does not give, which removes an attention layer first.
    """
    small, large = (_by_layers(name) for name in SAMPLES)
    differing = [f"{a} + {t}" for (a, t), top1 in small.items() if top1 != large[a, t]]
    more = [f"{a} + {t}" for a, t in large if (a, t) not in small]
    early = [f"{a} + {t}" for a, t in large if 0 < a < t]
    return {"claim": "samples"}, {
        "differing": ", ".join(differing),
        "more": ", ".join(more),
        "activation_first": ", ".join(early),
    }


def _by_layers(name: str) -> dict[tuple[int, int], float]:
    """Return the samples of a table by the layers removed."""
    return {(round(12 * (1 - a)), round(12 * (1 - t))): top1 for a, t, top1 in reference()[name]["rows"]}


def _best_two(predictor: Predictor, layers: int) -> list[tuple[str, float]]:
    """Return the two best splits of so many layers (paper, Algorithm 3) and what accuracy is predicted for them."""
    budgets = [hetdpt.Budget(count, layers - count) for count in range(layers + 1)]
    predicted = predictor.predict([predictor.ratios(budget) for budget in budgets])
    order = sorted(zip(budgets, predicted, strict=True), key=lambda pair: -pair[1])
    return [(f"{budget.attention} + {budget.activation}", float(value)) for budget, value in order[:2]]


def formula() -> Claim:
    """Return how the printed formula of MAP differs from its unrounded coefficients."""
    predictor = hetdpt.fit_predictor(reference()["map_listing_16"]["rows"], blocks=12, exact=False)
    figures = json.loads((REFERENCE / "map.json").read_text())["paper_listing_16"]
    cut = [term for term, figure in figures["retained"].items() if not agrees(predictor.coefficients[term], figure, 2)]
    pruned = predictor.pruned_coefficients
    other = [term for term, figure in figures["pruned"].items() if not agrees(pruned[term], figure, 2)]
    return {"claim": "formula"}, {
        "retained_off": ", ".join(cut),
        "pruned_off": ", ".join(other),
        "of_p": round(pruned["p"], 4),
        "constant": round(pruned["1"], 4),
    }


def short_runs() -> Iterator[Claim]:
    """Yield by how many points the samples of MAP differ from as many attention layers less after the whole training.

    The paper's theory calls this the bias of short training and takes it for the same everywhere.
    """
    short = _by_layers("map_table_22")
    rows = {0: "DeiT-B (Dense)", 5: "NOSE (5 layers)", 6: "NOSE (6 layers)"}
    for layers, row in rows.items():
        gap = short[layers, 0] - printed(8, "DeiT-B", row)["top1"]
        yield {"claim": "bias of short training", "attention": layers}, {"points": round(gap, 2)}


def attention_alone(costs: Results) -> Iterator[Claim]:
    """Yield how many attention layers alone must go for the speedup at which the paper compares.

    By MACs, and by the time that a layer saves according to the paper's own throughputs of NOSE.
    """
    for group, row, layers, wanted in (
        ("DeiT-S", "NOSE (5 layers)", 5, said("single_type_small")["speedup"]),
        ("DeiT-B", "NOSE (6 layers)", 6, said("single_type_base")["speedup"]),
    ):
        dense = _dense(8, group)
        whole = _cost(costs, 8, group, dense["row"], "two heads")["macs"]
        saved = (whole - _cost(costs, 8, group, row, "two heads")["macs"]) / layers / whole  # part of all, for a layer
        time = (1 - dense["throughput"] / printed(8, group, row)["throughput"]) / layers
        needed = 1 - 1 / wanted
        yield (
            {"claim": "attention alone", "group": group},
            {
                "layers_by_macs": round(needed / saved, 1),
                "layers_by_throughput": round(needed / time, 1),
                "ratio_without_any": round(1 / (1 - 12 * saved), 3),
            },
        )


def tokens() -> Claim:
    """Return what the throughput with token pruning is relative to the three that it may be compared with."""
    text = said("tokens_appendix")
    others = {
        "to_called_dense": text["baseline"],
        "to_hetdpt": printed(8, "DeiT-B", "HetDPT (10 layers)")["throughput"],
        "to_dense": printed(8, "DeiT-B", "DeiT-B (Dense)")["throughput"],
    }
    return {"claim": "tokens"}, {name: round(text["throughput"] / other, 4) for name, other in others.items()}


def _dense(table: int, group: str) -> dict[str, Any]:
    """Return the first row of a group as printed."""
    found: dict[str, Any] = next(row for row in rows_of(table) if row["group"] == group)
    return found


def _cost(costs: Results, table: int, group: str, row: str, variant: str) -> Values:
    found = costs.find(table=table, group=group, row=row, variant=variant)
    assert found, f"{row} of {group}, {variant}, was not counted"
    return found.values
