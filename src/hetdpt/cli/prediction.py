"""What the command predict has found, on the screen and as files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetdpt.cli.show import print_, table
from hetdpt.core.format import amount, estimate, percent, split_text, times

if TYPE_CHECKING:
    from hetdpt.results import Prices, Split
    from hetdpt.selection.predictor.allocate import Allocation
    from hetdpt.selection.predictor.polynomial import Predictor

PREDICT = "predict.json"  # by which a directory of ours is known
SHOWN = 20  # rows of a table
NAMED = 8  # splits in a sentence


@dataclass(frozen=True)
class Prediction:
    """All that the command has found."""

    predictor: Predictor
    frontier: tuple[Split, ...]
    allocation: Allocation | None
    prices: Prices | None

    @property
    def is_timed(self) -> bool:
        return self.prices is not None and self.prices.dense.ms is not None

    @property
    def values(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        from hetdpt.report.frontier import summary

        return summary(self.predictor, self.frontier, self.allocation, self.prices)


def write_prediction(found: Prediction, out: Path, overwrite: bool) -> None:
    """Write all of it to the directory ``out``, at once."""
    from hetdpt.report.frontier import CHOICE, COLUMNS, draw, values_of
    from hetdpt.results import PRICES_FILE
    from hetdpt.store.atomic import new_directory
    from hetdpt.store.csv_file import write_csv

    best = found.allocation.best if found.allocation else None
    with new_directory(out, PREDICT, overwrite) as scratch:
        (scratch / PREDICT).write_text(json.dumps(found.values, indent=1) + "\n", encoding="utf-8")
        write_csv(scratch / "frontier.csv", COLUMNS, map(values_of, found.frontier))
        draw(found.frontier, found.predictor, scratch / "frontier.png", found.prices, best)
        if found.allocation:
            choice = (values_of(split, is_choice=True) for split in found.allocation.table)
            write_csv(scratch / "splits.csv", CHOICE, choice)
        if found.prices:
            (scratch / PRICES_FILE).write_text(found.prices.to_json() + "\n", encoding="utf-8")


def print_prediction(found: Prediction, most: int | None) -> None:
    """Print the fit, the splits of the budget and the frontier; ``most`` rows of each table."""
    _print_fit(found.predictor)
    if found.allocation:
        _print_allocation(found.allocation, most)
    each = "speedup" if found.is_timed else "number of layers"
    _print_splits(f"frontier: what to remove for each {each}", found.frontier, most)
    tied = "tied: the best cannot be told from it; " if found.allocation else ""
    click.echo(f"{tied}beyond: far from the samples, so extrapolated")
    if found.prices and found.is_timed:
        where = found.prices.measured or "nobody has noted on which device"
        click.echo(f"speedups are predicted by the time of each layer ({where})")
    for text in found.allocation.warnings if found.allocation else found.predictor.warnings:
        click.echo(f"warning: {text}", err=True)


def _print_fit(predictor: Predictor) -> None:
    click.echo(f"{len(predictor.points)} samples of a model with {predictor.blocks} blocks")
    rows = table("error on samples left out, two at a time, in points", "degree", "MAE", "RMSE", "")
    rows.columns[-1].justify = "left"
    for row in predictor.tried:
        note = "chosen" if row.degree == predictor.degree else f"not eligible: {row.why_not}" if row.why_not else ""
        rows.add_row(str(row.degree), f"{row.mae:.4f}", f"{row.rmse:.4f}", note)
    print_(rows)
    click.echo(
        f"{predictor.formula}\n{predictor.pruned_formula}\n"
        "P is the accuracy in percent; a and t are the parts of attention and activation layers that are kept,\n"
        "p = 1 - a and q = 1 - t those that are removed"
    )


def _print_allocation(allocation: Allocation, most: int | None) -> None:
    """Print the table of splits that meet the budget, and the one to take."""
    from hetdpt.selection.predictor.allocate import DRAWS

    _print_splits(f"what to remove for {allocation.wanted}, by prediction", allocation.table, most, is_choice=True)
    best = allocation.best
    others = [split for split in allocation.table if split.is_tied and split != allocation.table[0]]
    remove = f"remove {best.budget.attention} attention and {best.budget.activation} activation layers: predicted "
    remove += estimate(percent(best.accuracy), best.low, best.high, 2)
    if allocation.rechecked:
        return click.echo(f"{remove}; {percent(best.measured)} measured, the best of {len(allocation.rechecked)}")
    click.echo(
        f"{remove}; wins {percent(100 * best.share, 0)} of {DRAWS:,} bootstrap draws"
        + (f"; cannot be told from: {_names(others)}" if others else "")
    )


def _print_splits(title: str, splits: Sequence[Split], most: int | None, is_choice: bool = False) -> None:
    is_priced = any(split.macs is not None for split in splits)
    is_timed = any(split.speedup is not None for split in splits)
    columns = ["attention", "activation", "layers", "predicted", "95 % interval", *(["wins"] if is_choice else [])]
    columns += [*(["MACs", "params"] if is_priced else []), *(["speedup"] if is_timed else []), ""]
    rows = table(title, *columns)
    rows.columns[-1].justify, rows.show_edge = "left", False  # so that it fits in 120 columns
    for split in splits[:most]:
        counts = split.budget.attention, split.budget.activation, split.layers
        cells = [*map(str, counts), f"{split.accuracy:.2f}", f"[{split.low:.2f}, {split.high:.2f}]"]
        cells += [percent(100 * split.share, 1)] if is_choice else []
        cells += _costs(split)
        rows.add_row(*cells, _note(split, is_first=is_choice and split == splits[0]))
    print_(rows)
    if most is not None and len(splits) > most:
        click.echo(f"{len(splits) - most} more; --all prints them too")


def _costs(split: Split) -> list[str]:
    cells = [] if split.macs is None or split.params is None else [amount(split.macs, 2), amount(split.params, 2)]
    if split.speedup is None:
        return cells
    return [*cells, times(split.speedup, 3, "x")]


def _note(split: Split, is_first: bool) -> str:
    known = (
        (is_first, "best"),
        (split.is_tied and not is_first, "tied"),
        (split.is_beyond, "beyond"),
        (split.measured is not None, f"measured {split.measured:.2f}" if split.measured is not None else ""),
    )
    return ", ".join(text for is_so, text in known if is_so)


def _names(splits: Iterable[Split]) -> str:
    names = [split_text(split.budget) for split in splits]
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
