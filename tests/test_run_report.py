"""The report of runs: what is read, what is shown, that nothing shown can be code, and the command."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import subprocess
import sys
import warnings
from dataclasses import asdict, dataclass, field, replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import test_cli
from run_directories import (
    BLOCKS,
    EVIL,
    PLUS,
    STAGES,
    USUAL,
    build_run,
    change_stage,
    epochs,
    measured,
    picks,
    predicted,
    prices,
    run_summary,
    samples,
    scores,
    summary_of,
    write_stage,
)
from test_cli import Run

from hetdpt.core.errors import FileError
from hetdpt.core.plan import KINDS, Budget, Plan
from hetdpt.report.charts import PageFigure
from hetdpt.report.headline import lead, title, trained
from hetdpt.report.run import RunRecord
from hetdpt.report.run_charts import blocks, frontier, layers_and_width, methods, recovery, surface, turns_of
from hetdpt.report.write import REPORTS, write_report, write_reports
from hetdpt.results import KeptBlock, Price
from hetdpt.store.stage_directory import CONFIG, FLOW, STAGE, SUMMARY, stage_directory

run = test_cli.run  # the fixture


@pytest.fixture
def full(tmp_path: Path) -> Path:
    return build_run(tmp_path / "demo")


# Reading


def test_a_run_is_read_whole(full: Path) -> None:
    record = RunRecord.read(full)
    assert (record.name, record.model, record.method, record.goals) == ("demo", "demo", "hetdpt", {"layers": 8})
    assert all(getattr(record.results, name) is not None for name in USUAL[:-1])
    assert record.is_finished
    assert record.next_stage is None
    assert record.warnings == ("the samples were measured on few images",)
    assert record.seconds == sum(stage.seconds for stage in record.stages)


def test_layers_go_in_their_order_and_those_without_a_turn_last(full: Path) -> None:
    change_stage(full, "select", picks=[*picks()[2:], {"kind": "attention", "block": 0, "score": 9.0}])
    turns = turns_of(RunRecord.read(full))
    assert len(turns) == 8
    assert list(turns)[:2] == [("activation", 7), ("activation", 1)]
    assert list(turns)[-2:] == [("attention", 9), ("activation", 4)], "no turn is known of these"
    assert ("attention", 0) not in turns, "it was picked, but is not in the plan"


def test_transfer_entropy_is_that_of_the_first_sample_that_has_it(full: Path) -> None:
    layers = [{"kind": "attention", "block": 3, "te": te} for te in (None, 0.5, 0.7)]
    rows = [{"budget": asdict(Budget(1, 0)), "accuracy": 90.0, "layers": [layer]} for layer in layers]
    change_stage(full, "collect", samples=rows)
    assert RunRecord.read(full).entropies == {("attention", 3): 0.5}


@pytest.mark.parametrize(
    ("last", "then", "changes"),
    [(*pair, {}) for pair in pairwise(USUAL)]
    + [(*pair, PLUS) for pair in (("fit", "balance"), ("balance", "select"), ("select", "narrow"))]
    + [(*pair, PLUS) for pair in (("narrow", "recover"), ("merge", "reduce"), ("reduce", "measure"))],
)
def test_an_unfinished_run_says_what_is_next(tmp_path: Path, last: str, then: str, changes: dict[str, Any]) -> None:
    run = build_run(tmp_path / "half", last, is_finished=False, **changes)
    write_reports(run)
    page = Page.read(run)
    assert f"Not finished: next stage is {then}" in page.text
    assert ("Before and after" in page.text) == (STAGES.index(last) >= STAGES.index("measure"))
    assert ("Removed layers" in page.text) == (STAGES.index(last) >= STAGES.index("select"))
    assert ("Layers and width" in page.text) == (changes == PLUS and STAGES.index(last) >= STAGES.index("balance"))
    assert f"Not finished: next stage is {then}" in (run / REPORTS["markdown"]).read_text()


def test_stages_that_a_run_does_not_have_are_not_waited_for(tmp_path: Path) -> None:
    other = build_run(tmp_path / "other", "analyse", is_finished=False, method="te-static", compare=[])
    assert RunRecord.read(other).next_stage == "select"
    assert not RunRecord.read(other).flow["compare"]
    given = build_run(tmp_path / "given", "analyse", is_finished=False, samples="samples.csv")
    assert RunRecord.read(given).next_stage == "fit"


def test_a_stage_that_is_begun_is_next(tmp_path: Path) -> None:
    run = build_run(tmp_path / "begun", "analyse", is_finished=False)
    write_stage(run, "collect", None)
    assert RunRecord.read(run).next_stage == "collect"
    write_reports(run)
    assert "not done" in Page.read(run).text


def test_a_method_without_a_split_has_a_report_without_a_surface(tmp_path: Path) -> None:
    run = build_run(tmp_path / "other", method="te-static", compare=[])
    write_reports(run)
    page = Page.read(run)
    assert page.headings == [
        "Before and after",
        "Removed layers",
        "Fine-tuning",
        "Time by kind of layer",
        "How to reproduce it",
        "Warnings",
    ]


def test_versions_that_differ_are_a_warning(full: Path) -> None:
    write_stage(full, "merge", {"merged": 5, "difference": 0.0}, torch="9.9")
    (warning,) = RunRecord.read(full).warnings[1:]
    assert warning == "stages ran with different versions of torch: 2.13.0, 9.9"


def test_what_is_no_run_or_a_damaged_one_is_refused(tmp_path: Path, full: Path) -> None:
    with pytest.raises(FileError, match=f"{tmp_path} is not a directory of hetdpt run: it has no config.yaml"):
        RunRecord.read(tmp_path)
    change_stage(full, "fit", degree="two")
    file = stage_directory(full, "fit") / STAGE
    with pytest.raises(FileError, match=rf"{file} was written by an older version of hetdpt; .* \(degree: .*integer"):
        RunRecord.read(full)
    (full / CONFIG).write_text("a: [")
    with pytest.raises(FileError, match="config.yaml are damaged"):
        RunRecord.read(full)


# The page


@dataclass
class Page(HTMLParser):
    """What a browser would make of a page."""

    ids: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    attributes: set[str] = field(default_factory=set)
    values: list[str] = field(default_factory=list)
    scripts: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    headings: list[str] = field(default_factory=list)
    source: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.source)
        self.close()

    @classmethod
    def read(cls, run: Path) -> Page:
        return cls(source=(run / REPORTS["html"]).read_text())

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.said).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            self.attributes.add(name)
            self.values.append(value or "")
            if name == "id":
                self.ids.append(value or "")
            if name == "href":
                self.links.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.tags.pop()

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] == ["script"]:
            self.scripts.append(data)
        elif self.tags[-1:] != ["style"]:
            self.said.append(data)
        if self.tags[-1:] == ["h2"]:
            self.headings.append(data)

    def handle_endtag(self, tag: str) -> None:
        while self.tags and self.tags.pop() != tag:
            pass


def pictures_of(source: str) -> list[ElementTree.Element]:
    """Return the pictures of a page, read as XML, which is less patient than a browser."""
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg .*?</svg>", source, re.DOTALL)]


def wide(figure: PageFigure, number: int = 0) -> ElementTree.Element:
    """Return a chart of the page as it is on a desk."""
    return ElementTree.fromstring(figure.pictures[number][0])


def classes(picture: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [one for one in picture.iter() if name in one.get("class", "").split()]


def hints(picture: ElementTree.Element) -> list[str]:
    return [one.findtext("title") or "" for one in classes(picture, "mark")]


def test_the_page_shows_what_was_found(full: Path) -> None:
    assert write_reports(full) == {"html": "report.html", "markdown": "report.md", "json": "report.json"}
    text = Page.read(full).text
    for words in (
        "1.43× faster", "0.84 points less accurate", "Goal met: 8 layers removed", "95 % interval 1.40 – 1.46",
        "cpu (Intel(R) Xeon(R), 2 threads), float32, batch 8", "360 validation images", "96.02 – 97.82",
        "Removed: 3 attention layers and 5 activations of 24 removable layers", "5 FFNs became one linear layer each",
        "a polynomial through 20 samples, each after brief fine-tuning, measured on 287 training images", "Of degree 2",
        "The best of 9 splits in 41 % of the bootstrap draws", "attention-only", "fine-tuned for 5 epochs",
        f"hetdpt run --config {full}/config.yaml", "torch 2.13.0", "the samples were measured on few images",
    ):  # fmt: skip
        assert words in text, words


def test_width_and_tokens_are_shown(tmp_path: Path) -> None:
    run = build_run(tmp_path / "demo", **PLUS, depths=[0, 4, 8])
    write_reports(run)
    page, markdown = Page.read(run), (run / REPORTS["markdown"]).read_text()
    for words in (
        "chosen by the method hetdpt, and 31 % of its width.", "Goal met: at most 32M MACs",
        "Tokens are reduced: 8 tokens fewer after each attention",
        "Tried with 0, 4 and 8 layers removed. Chosen: 3 attention layers and 5 activations, since with 8 layers "
        "removed it is the most accurate. Accuracies are of 287 training images that were held out; one image is "
        "0.35 points.",
        "Parts of its sizes removed: embedding 31 %, hidden 31 %, heads 31 %, head dims 16 %, found in 9 trials for",
    ):  # fmt: skip
        assert words in page.text, words
        assert words in markdown, words
    assert "After the removal of the layers and width, the model was fine-tuned for 5 epochs." in page.text
    assert "--macs 32M --method hetdpt --tokens tome:8 --plus --depths 0,4,8" in page.text
    row = "| 3+5 ✓ | 68.00 % | 94.00 % | 1.62× | 31.9 M | 497 k | 30 % | 31 % | 31 % | 16 % |"
    assert row in markdown.splitlines()
    assert "Layers and width" in page.headings
    assert "Other budgets" not in page.headings


def test_width_after_a_given_number_of_layers_was_not_weighed_against_them(tmp_path: Path) -> None:
    run = build_run(tmp_path / "demo", **PLUS | {"layers": 8})
    write_reports(run)
    page = Page.read(run)
    assert "Removed width" in page.headings
    assert "Layers and width" not in page.headings
    assert "The final model has lost width too." in page.text


def test_a_run_that_lost_no_layers_says_so(tmp_path: Path) -> None:
    run = build_run(tmp_path / "demo", **PLUS | {"layers": 0, "tokens": None})
    write_reports(run)
    text, markdown = Page.read(run).text, (run / REPORTS["markdown"]).read_text()
    assert "Removed: no layers, but 31 % of its width." in text
    assert "then an FFN with an activation. No layer was removed." in text
    assert "After the removal of width, the model was fine-tuned" in text
    assert "with its turn" not in text
    assert "FFN became" not in text
    assert "- attention of blocks: none" in markdown
    assert "no layer is removed" in wide(blocks(RunRecord.read(run))).get("aria-label", "")


def test_tokens_that_only_this_run_lost_are_told_where_methods_are_compared(tmp_path: Path) -> None:
    run = build_run(tmp_path / "demo", tokens="tome:8")
    write_reports(run)
    assert "this run, with fewer tokens" in Page.read(run).text
    assert "The final model has fewer tokens, too." in Page.read(run).text


@pytest.mark.parametrize("changes", [{}, PLUS])
def test_the_page_is_sound(tmp_path: Path, changes: dict[str, Any]) -> None:
    full = build_run(tmp_path / "demo", **changes)
    write_reports(full)
    page = Page.read(full)
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    assert not page.tags, "every element is closed"
    pictures = pictures_of(page.source)
    assert len(pictures) > 20
    for picture in pictures:
        is_aside = picture.get("aria-hidden") == "true"
        assert is_aside or picture.get("aria-label"), "a picture is said in words too"


def test_the_page_asks_no_network_and_runs_no_script_but_its_own(full: Path) -> None:
    write_reports(full)
    page = Page.read(full)
    assert "://" not in page.source
    assert set(re.findall(r"url\((.*?)\)", page.source)) == {"#hatch"}
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert not {"src", "srcset", "style"} & page.attributes
    data, script = page.scripts
    checksum = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(value for value in page.values if value.startswith("default-src 'none'"))
    assert f"script-src 'sha256-{checksum}'" in policy
    assert json.loads(data) == json.loads((full / REPORTS["json"]).read_text())


def test_what_is_shown_is_never_code(tmp_path: Path) -> None:
    run = build_run(tmp_path / "demo", model=EVIL, data=EVIL, compare=[EVIL, "random"])
    site = {"kind": "attention", "block": 0, "path": EVIL}
    change_stage(run, "analyse", processor=EVIL, sites=[site])
    change_stage(run, "measure", processor=EVIL, breakdown={"dense": {EVIL: 1.0}, "pruned": {EVIL: 0.5}})
    change_stage(run, "fit", pruned_formula=EVIL)
    write_stage(run, "save", {"model": EVIL}, **{EVIL: EVIL})
    goal = {"wanted": {}, "is_met": False, "text": EVIL, "next": None}
    (run / SUMMARY).write_text(json.dumps({**summary_of({"method": EVIL}), "goal": goal, "warnings": [EVIL]}))
    write_reports(run)
    page = Page.read(run)
    assert len(page.scripts) == 2
    assert "<img" not in page.source
    assert not [name for name in page.attributes if name.startswith("on")]
    assert page.source.count("<!--") == 0
    assert json.loads(page.scripts[0])["runs"][0]["config"]["model"] == EVIL
    assert page.text.count(" ".join(EVIL.split())) > 10
    plain = re.sub(r"(`{3,}).*?\1", "", (run / REPORTS["markdown"]).read_text(), flags=re.DOTALL)
    assert "<" not in plain
    assert not re.search(r"(?<!\\)`", plain)


@pytest.mark.parametrize(
    ("speedup", "accuracy", "words"),
    [
        (1.5, 98.06, "1.50× faster, just as accurate"),
        (1.5, 98.3, "1.50× faster, 0.24 points more accurate"),
        (0.9, 90.0, "0.90× the speed, 8.06 points less accurate"),
        (1.03, 98.06, "No certain speedup, just as accurate"),
    ],
)
def test_the_headline_says_it_as_it_is(full: Path, speedup: float, accuracy: float, words: str) -> None:
    pruned = {**measured()["pruned"], "accuracy": scores(accuracy)}
    change_stage(
        full, "measure", pruned=pruned, speedup={"value": speedup, "low": speedup - 0.05, "high": speedup + 0.05}
    )
    assert title(RunRecord.read(full)) == words


def test_a_change_of_accuracy_is_said_in_images(full: Path) -> None:
    write_reports(full)
    assert "Of 360 images, 3 fewer are right." in Page.read(full).text
    pruned = {**measured()["pruned"], "accuracy": scores(98.06)}
    change_stage(full, "measure", pruned=pruned)
    write_reports(full)
    assert "Of 360 images, as many are right." in Page.read(full).text


def test_a_breakdown_that_is_longer_than_its_batch_is_doubted(full: Path) -> None:
    write_reports(full)
    assert "busy with something else" not in Page.read(full).text
    change_stage(full, "measure", breakdown={"dense": {"other": 4.1}, "pruned": {"other": 30.0}})
    write_reports(full)
    said = "the layers of the pruned model took 30.00 ms for a batch, but the whole model 2.88 ms"
    assert said in Page.read(full).text


def test_a_goal_that_was_missed_says_by_how_much_and_what_to_try(full: Path) -> None:
    text, command = "missed by 5 %", f"hetdpt run --config {full / CONFIG} --set 'budget=[4, 6]' --out {full}-next"
    further = {"budget": {"attention": 4, "activation": 6}}
    goal = {"wanted": {"speedup": 1.5}, "is_met": False, "text": text, "next": further}
    write_reports(full, run_summary(goal=goal))
    assert f"Goal missed: {text}" in Page.read(full).text
    assert command in Page.read(full).text
    markdown = (full / REPORTS["markdown"]).read_text()
    assert f"**Goal missed: {text}**" in markdown
    assert f"```\n{command}\n```" in markdown


@pytest.mark.parametrize(
    ("kept", "text"),
    [
        ("best", "training did not help: 59.90 % before, 51.30 % after it; the model from before training is kept"),
        ("last", "training made the model worse: 59.90 % before, 51.30 % after it; --keep best keeps the better one"),
    ],
)
def test_a_goal_is_not_met_without_a_word_if_training_did_harm(full: Path, kept: str, text: str) -> None:
    change_stage(full, "recover", start=59.9, last=51.3, best=59.9, best_epoch=0)
    change_stage(full, "merge", kept=kept)
    write_reports(full, run_summary())
    assert f"Goal met: 8 layers removed. Warning: {text}" in Page.read(full).text
    assert f". Warning: {text}**" in (full / REPORTS["markdown"]).read_text()


def test_a_learning_rate_that_was_found_is_told(full: Path) -> None:
    change_stage(full, "recover", lr_found=3e-5, notes=["learning rate 3e-05, by the loss on held-out images"])
    write_reports(full)
    assert "Learning rate 3e-05, by the loss on held-out images." in Page.read(full).text


# Pictures


def test_layers_that_went_are_marked(full: Path) -> None:
    picture = wide(blocks(RunRecord.read(full)))
    assert (len(classes(picture, "kept")), len(classes(picture, "removed"))) == (16, 8)
    turns = [int(one.findtext(".//text") or 0) for one in classes(picture, "removed")]
    assert sorted(turns) == [*range(1, 9)]
    said = next(hint for hint in hints(picture) if hint.startswith("block 9: attention"))
    assert said == "block 9: attention\nblocks.9.attn\nremoved, number 2 of 8\nscore 0.0246"
    stays = next(hint for hint in hints(picture) if hint.startswith("block 0: activation"))
    assert stays == "block 0: activation\nblocks.0.mlp.act\nkept\ntransfer entropy 0.06 where it was sampled"
    assert "removed: attention of blocks 2, 5, 9; activation of blocks 1, 4, 6, 7, 10" in picture.get("aria-label", "")


def test_the_surface_shows_samples_the_choice_and_guesses(full: Path) -> None:
    record = RunRecord.read(full)
    fit, allocation = record.results.fit, record.results.allocate
    assert fit is not None
    assert allocation is not None
    picture = wide(surface(record))
    assert len(hints(picture)) == (BLOCKS + 1) ** 2
    assert len(classes(picture, "hatched")) == sum(cell.is_beyond for cell in fit.surface)
    assert len(classes(picture, "tied")) == len(allocation.tied) > 0
    assert len(classes(picture, "sample")) == len(samples())
    said = next(hint for hint in hints(picture) if hint.startswith("3 attention + 5 activation"))
    cell = next(cell for cell in fit.surface if cell.budget == Budget(3, 5))
    assert f"predicted {cell.accuracy:.2f} %\n95 % interval {cell.low:.2f} – {cell.high:.2f}" in said
    assert said.endswith("\nchosen")
    strength = {one.findtext("title"): float(one.find(".//path").get("opacity", 1)) for one in classes(picture, "heat")}
    assert max(strength, key=lambda hint: strength[hint]).startswith("0 attention + 0 activation")
    assert max(strength.values()) <= 1


def test_what_was_tried_for_layers_or_width_is_drawn_and_the_chosen_one_marked(tmp_path: Path) -> None:
    record = RunRecord.read(build_run(tmp_path / "demo", **PLUS))
    found = record.results.balance
    assert found is not None
    figure = layers_and_width(record)
    for picture in (wide(figure), wide(figure, 1)):
        assert [hint.split("\n")[0] for hint in hints(picture)] == [
            "no layers removed", "2 attention layers and 2 activations removed",
            "3 attention layers and 5 activations removed",
        ]  # fmt: skip
        assert [hint.endswith("\nchosen") for hint in hints(picture)] == [False, False, True]
        assert len(classes(picture, "chosen")) == 1
        places = [one.find(".//path[@transform]").get("transform", "") for one in classes(picture, "best")]
        heights = [float(place.removesuffix(")").split()[1]) for place in places]
        assert heights == sorted(heights, reverse=True), "both rise with the layers"
    said = next(hint for hint in hints(wide(surface(record))) if hint.startswith("3 attention + 5"))
    assert said.endswith("\nchosen")


def test_a_frontier_without_times_counts_layers(full: Path) -> None:
    untimed = {**asdict(prices()), "dense": {"macs": 1, "params": 1, "ms": None}}
    untimed |= {kind: [{"macs": 0, "params": 0, "ms": None}] * BLOCKS for kind in KINDS}
    with_times = frontier(RunRecord.read(full)).pictures[0][0]
    change_stage(full, "fit", prices=untimed)
    without = frontier(RunRecord.read(full)).pictures[0][0]
    assert "layers removed" in without
    assert "layers removed" not in with_times
    assert "×</text>" in with_times
    assert "×</text>" not in without


def test_a_training_that_went_astray_is_drawn_as_far_as_there_are_numbers(full: Path) -> None:
    change_stage(
        full, "recover", epochs=[*epochs()[:3], {"number": 3, "epochs": 5, "loss": math.nan, "last": math.inf}]
    )
    figure = recovery(RunRecord.read(full))
    assert not re.search(r"\b(nan|inf)\b", "".join(text for pair in figure.pictures for text in pair))
    assert [hint.split("\n")[0] for hint in hints(wide(figure, 1))] == ["epoch 1", "epoch 2"]


def test_an_interval_without_ends_is_no_interval(full: Path) -> None:
    stage = stage_directory(full, "fit")
    cells = [{**cell, "low": -math.inf, "high": math.inf} for cell in predicted()["fit"]["surface"]]
    change_stage(full, "fit", surface=cells)
    assert "Infinity" in (stage / STAGE).read_text()
    write_reports(full)
    assert not re.search(r"\binf\b", Page.read(full).source)


def test_the_method_of_the_run_is_compared_too(full: Path) -> None:
    picture = wide(methods(RunRecord.read(full)))
    assert [hint.split("\n")[0] for hint in hints(picture)] == ["dense", "random", "attention-only", "hetdpt"]


def test_a_tail_is_drawn_and_said(full: Path) -> None:
    saved = Price(1_000_000, 0, 0.1)
    kept = KeptBlock(patches=saved, attention=saved, activation=saved, fitted=saved, unmerged=None)
    chosen = RunRecord.read(full).results.select
    assert chosen is not None
    change_stage(full, "analyse", prices=asdict(replace(prices(), kept=(kept,) * BLOCKS)))
    change_stage(full, "select", plan=asdict(replace(chosen.plan, tail=3)))
    write_reports(full)
    record = RunRecord.read(full)
    assert f"patches are not updated from block {BLOCKS - 3} on" in wide(blocks(record)).get("aria-label", "")
    assert "only the class token is updated, patches are not (a fitted tail)" in Page.read(full).text
    assert f"chosen by the method {chosen.method}, with a tail of 3" in Page.read(full).text
    change_stage(full, "select", plan=asdict(Plan(tail=3)))
    assert lead(RunRecord.read(full)).endswith("Removed: no layers, with a tail of 3.")
    assert trained(RunRecord.read(full)).startswith("The model was fine-tuned for ")


@pytest.mark.parametrize("width", [312, 820])
@pytest.mark.parametrize("count", [1, 12, 40])
def test_blocks_stay_inside_their_picture(full: Path, width: float, count: int) -> None:
    sites = [{"kind": kind, "block": block, "path": "x"} for block in range(count) for kind in KINDS]
    change_stage(full, "analyse", blocks=count, sites=sites)
    picture = ElementTree.fromstring(blocks(RunRecord.read(full)).pictures[0][width == 312])
    assert picture.get("viewBox", "").split()[2] == str(width)
    boxes = [" ".join(path.get("d", "") for path in one.iter("path")) for one in classes(picture, "mark")]
    assert len(boxes) == 2 * count
    sides = [[float(x) for x in re.findall(r"[ML] ([\d.]+)", box)] for box in boxes]
    assert max(map(max, sides)) <= width
    assert min(max(xs) - min(x for x in xs if x > 12) for xs in sides) > 24, "a finger finds it; small ones are crosses"


# Several runs


def test_several_runs_are_side_by_side(tmp_path: Path, full: Path) -> None:
    other = build_run(tmp_path / "there" / "demo", layers=None, speedup=1.5, method="te-static", compare=[])
    change_stage(other, "measure", processor="another")
    half = build_run(tmp_path / "half", "fit", is_finished=False, **PLUS)
    records = [RunRecord.read(run) for run in (full, other, half)]
    write_report(records, tmp_path / "all.html")
    page = Page(source=(tmp_path / "all.html").read_text())
    assert page.source.count('<details class="run">') == 3
    assert "3 runs compared" in page.text
    assert "measured in 2 different ways" in page.text
    assert "at least 1.5× faster" in page.text
    assert "hetdpt + width + tome:8" in page.text
    assert page.headings == ["Side by side", str(full), str(other), "half"], "two have the same name"
    assert len(page.ids) == len(set(page.ids))
    write_report(records, tmp_path / "all.md")
    lines = (tmp_path / "all.md").read_text().splitlines()
    assert lines[0] == "# 3 runs compared"
    assert len({line.count(" | ") for line in lines[2:7]}) == 1
    write_report(records, tmp_path / "all.json")
    assert [run["directory"] for run in json.loads((tmp_path / "all.json").read_text())["runs"]] == [
        str(full), str(other), str(half),
    ]  # fmt: skip


@pytest.mark.slow
def test_runs_may_have_any_name(tmp_path: Path, full: Path) -> None:
    names = "模型", "a\x1b[31m", "$x^2$ & <b>"
    others = [build_run(tmp_path / name) for name in names]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_report([RunRecord.read(run) for run in (full, *others)], tmp_path / "all.html")
    page = Page(source=(tmp_path / "all.html").read_text())
    assert all(page.text.count(name) > 1 for name in names)
    assert page.source.count('class="picture"') > 20


# Files


def test_json_has_the_same_keys_for_every_run(tmp_path: Path, full: Path) -> None:
    half = build_run(tmp_path / "half", "analyse", is_finished=False)
    one, two = (RunRecord.read(run).to_dict() for run in (full, half))
    assert one.keys() == two.keys()
    assert [*one["stages"]] == [*two["stages"]] == [*STAGES]
    assert one["stages"]["fit"]["result"]["degree"] == 2
    assert two["stages"]["fit"] is None
    assert two["summary"] is None


def test_json_has_null_for_what_is_no_number(full: Path) -> None:
    change_stage(full, "merge", difference=math.nan)
    write_reports(full)
    found = json.loads((full / REPORTS["json"]).read_text(), parse_constant=pytest.fail)
    assert found["runs"][0]["stages"]["merge"]["result"] == {"merged": 5, "difference": None}


def test_markdown_has_the_numbers(full: Path) -> None:
    write_reports(full)
    text = (full / REPORTS["markdown"]).read_text()
    assert text.startswith("# demo: 1.43× faster, 0.84 points less accurate\n")
    for words in (
        "| accuracy | 98.06 % | 97.22 % | −0.84 points |",
        "- attention of blocks: 2, 5, 9",
        "- activation of blocks: 1, 4, 6, 7, 10",
        "- the samples were measured on few images",
        "Versions: hetdpt 0.1.0, python 3.11.4, torch 2.13.0, timm 1.0.30.",
    ):
        assert words in text


def test_a_report_is_written_before_the_summary_is(tmp_path: Path) -> None:
    run = build_run(tmp_path / "demo", "compare", is_finished=False)
    write_stage(run, "report", None)
    write_reports(run, run_summary())
    assert "Goal met" in Page.read(run).text
    assert sorted(file.name for file in run.iterdir() if file.is_file()) == [CONFIG, FLOW, *sorted(REPORTS.values())]


def test_reports_need_no_torch() -> None:
    code = "import sys, hetdpt.report.write; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# The command


def test_the_command_writes_the_reports_of_a_run(run: Run, full: Path) -> None:
    found = run("report", full)
    assert found.out == (
        "demo: 1.43× faster, 0.84 points less accurate\n"
        f"written to {full}/report.html, {full}/report.md, {full}/report.json\n"
    )
    before = (full / "report.html").stat().st_mtime_ns
    assert run("report", full).code == 0
    assert (full / "report.html").stat().st_mtime_ns > before


def test_the_command_compares_runs(run: Run, tmp_path: Path, full: Path) -> None:
    other, out = build_run(tmp_path / "other"), tmp_path / "new" / "all.html"
    assert run("report", full, other, "--out", out).code == 0
    assert "2 runs compared" in out.read_text()
    run("report", full, other, "--out", out).is_refused(
        f"{out} exists already; give another path, or allow overwriting"
    )
    assert run("report", full, other, "--out", out, "--overwrite").code == 0
    run("report", full, other).is_refused(
        "a report of 2 runs belongs to none of them; say where, such as --out report.html"
    )


def test_the_command_refuses_in_a_sentence(run: Run, tmp_path: Path, full: Path) -> None:
    run("report", tmp_path).is_refused(
        f"{tmp_path} is not a directory of hetdpt run: it has no config.yaml; give one that has"
    )
    run("report", full, "--out", "x.pdf").is_refused(
        "a report is a file that ends in .html, .md, .json, but x.pdf does not"
    )
