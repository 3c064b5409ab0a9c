"""The report in a browser: Chromium without a window, told what to do through a pipe; no library is needed for that."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from run_directories import EVIL, PLUS, build_run, change_stage, frontier

from hetdpt.report.frontier import PAGE, Words, write_frontier
from hetdpt.report.run import RunRecord
from hetdpt.report.write import REPORTS, write_report, write_reports

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe")
LAUNCH = (
    "import os, sys; i, o, *words = sys.argv[1:]; os.dup2(int(o), 4); os.dup2(int(i), 3); os.execv(words[0], words)"
)
"""Becomes the browser, which reads commands from its descriptor 3 and answers to 4."""
PATIENCE = 20.0  # seconds until an answer is missed
PHONE = 360  # pixels
SEEN = "one => one.checkVisibility() && one.getClientRects().length"  # the first knows what is folded up
TROUBLE = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Network.loadingFailed")

pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"no browser is installed: none of {', '.join(NAMES)}")


class Page:
    """One page of a browser that runs: what it is told, what it says, what it asks of the network."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._rest, self._number = send, receive, b"", 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.tell("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.tell("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.tell(f"{domain}.enable")

    def tell(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol; return the answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]  # type: ignore[no-any-return]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._receive, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        one, _, self._rest = self._rest.partition(b"\0")
        return json.loads(one)  # type: ignore[no-any-return]

    def open(self, file: Path, width: int = 1200, height: int = 900, is_dark: bool = False) -> None:
        """Show ``file`` in a window of that size."""
        self.events.clear()
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.tell("Emulation.setEmulatedMedia", features=[scheme])
        self.tell("Page.navigate", url=file.resolve().as_uri())
        self.wait("document.readyState === 'complete'")

    def resize(self, width: int, height: int) -> None:
        self.tell(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def run(self, script: str) -> Any:
        """Return what a script comes to."""
        answer = self.tell("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        end = time.monotonic() + PATIENCE
        while not self.run(condition):
            assert time.monotonic() < end, condition
            time.sleep(0.02)

    def move_to(self, x: float, y: float) -> None:
        self._place = x, y
        self.tell("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self) -> None:
        """Press the mouse where it is."""
        for kind in ("mousePressed", "mouseReleased"):
            where = {"x": self._place[0], "y": self._place[1]}
            self.tell("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **where)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.tell("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def point_at(self, query: str) -> None:
        """Move the mouse to the middle of what ``query`` finds first of all that is visible."""
        self.move_to(-1, -1)
        x, y = self.run(
            f"""(() => {{
                const isSeen = {SEEN};
                const one = [...document.querySelectorAll({json.dumps(query)})].find(isSeen);
                one.scrollIntoView({{ block: "center", behavior: "instant" }});
                const box = one.getBoundingClientRect();
                return [box.left + box.width / 2, box.top + box.height / 2];
            }})()"""
        )
        self.move_to(x, y)

    @property
    def tip(self) -> str | None:
        """The hint that is shown, line by line."""
        text: str | None = self.run("tip.hidden ? null : [...tip.children].map(row => row.textContent).join('\\n')")
        return text

    def count(self, query: str) -> int:
        """Return how many elements are visible."""
        found = f"[...document.querySelectorAll({json.dumps(query)})].filter({SEEN}).length"
        return int(self.run(found))

    @property
    def trouble(self) -> list[Any]:
        """What went wrong since the page was opened."""
        return [event for event in self.events if event.get("method") in TROUBLE]

    @property
    def requests(self) -> list[str]:
        """The addresses that were asked for since the page was opened."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def screenshot(self, file: Path, is_whole: bool = True) -> None:
        shot = self.tell("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)
        file.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser() -> Iterator[Page]:
    """Give a page of a new browser, which ends with the block."""
    assert BROWSER is not None
    (their_input, ours), (answers, their_output) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = [sys.executable, "-c", LAUNCH, str(their_input), str(their_output), BROWSER, *FLAGS]
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(
            [*words, f"--user-data-dir={profile}"], pass_fds=(their_input, their_output), stdout=quiet, stderr=quiet
        )
        os.close(their_input)
        os.close(their_output)
        try:
            yield Page(ours, answers)
        finally:
            os.close(ours)  # which ends it
            os.close(answers)
            process.wait(PATIENCE)


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reports of a run, of one with names that would like to be code, of one that lost width too, and of all."""
    where = tmp_path_factory.mktemp("reports")
    plain, evil = build_run(where / "plain"), build_run(where / "evil", model=EVIL, data=EVIL, compare=[EVIL])
    change_stage(evil, "measure", processor=EVIL, breakdown={"dense": {EVIL: 1.0}, "pruned": {EVIL: 0.5}})
    plus = build_run(where / "plus", **PLUS)
    for run in (plain, evil, plus):
        write_reports(run)
    half = build_run(where / "half", "fit", is_finished=False)
    write_report([RunRecord.read(run) for run in (plain, evil, plus, half)], where / "all.html")
    for name, found in (("frontier", frontier()), ("bare", frontier(False, EVIL))):
        (where / name).mkdir()
        write_frontier(where / name, found, Words(model=(EVIL,)))
    return where


@pytest.fixture(scope="module")
def report(directory: Path) -> Path:
    return directory / "plain" / REPORTS["html"]


@pytest.mark.parametrize("name", ["plain/report.html", "evil/report.html", "plus/report.html", "all.html"])
@pytest.mark.parametrize(("width", "is_dark"), [(1200, False), (1200, True), (PHONE, False)])
def test_a_page_is_without_trouble(page: Page, directory: Path, name: str, width: int, is_dark: bool) -> None:
    page.open(directory / name, width, is_dark=is_dark)
    page.run("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert page.run("document.documentElement.scrollWidth <= innerWidth"), "the page does not scroll sideways"
    assert page.run("tip.parentElement === document.body"), "its script has run"
    assert page.count(".picture") >= 7
    assert {*page.requests} - {"data:,"} == {(directory / name).resolve().as_uri()}, "its icon is in it"
    assert page.trouble == []


def test_trouble_would_be_noticed(page: Page, tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text("<img src='missing.png'><script>console.error('x'); nothing()</script>")
    page.open(tmp_path / "bad.html")
    assert {event["method"] for event in page.trouble} >= {"Runtime.exceptionThrown", "Runtime.consoleAPICalled"}
    assert len(page.requests) == 2


def test_pointing_shows_a_hint(page: Page, report: Path) -> None:
    page.open(report)
    assert page.tip is None
    page.point_at("#run-0-layers .mark.removed")
    assert page.tip == ("block 1: activation\nblocks.1.mlp.act\nremoved, number 4 of 8\nscore 0.0492"), (
        "nothing was sampled of it"
    )
    page.point_at("#run-0-surface .mark")
    assert (page.tip or "").startswith("0 attention + 0 activation removed\npredicted")
    page.point_at("h1")
    assert page.tip is None


@pytest.mark.parametrize("width", [PHONE, 1200])
def test_a_hint_stays_on_the_page(page: Page, report: Path, width: int) -> None:
    page.open(report, width)
    for query in ("#run-0-layers .mark:last-of-type", "#run-0-layers .mark", "#run-0-frontier .mark.ink"):
        page.point_at(query)
        left, right = page.run("(() => { const box = tip.getBoundingClientRect(); return [box.left, box.right]; })()")
        assert 0 < left < right < width


def test_keys_go_from_mark_to_mark(page: Page, report: Path) -> None:
    page.open(report)
    page.run("document.querySelector('#run-0-surface .wide .mark[tabindex=\"0\"]').focus()")
    assert (page.tip or "").startswith("0 attention + 0 activation")
    for key in ("ArrowRight", "ArrowRight", "ArrowUp"):
        page.press(key)
    assert (page.tip or "").startswith("2 attention + 1 activation")
    assert page.run("document.querySelectorAll('#run-0-surface .wide .mark[tabindex=\"0\"]').length") == 1
    page.press("Escape")
    assert page.tip is None


@pytest.mark.parametrize(
    ("section", "name"), [("recovery", "moving average"), ("frontier", "samples"), ("methods", "random")]
)
def test_a_button_hides_a_series_and_shows_it_again(page: Page, report: Path, section: str, name: str) -> None:
    page.open(report)
    button, series = f'#run-0-{section} [data-toggles="{name}"]', f'#run-0-{section} [data-series="{name}"]'
    all_ = f"#run-0-{section} [data-series]"
    before = page.count(all_)
    for shown in (0, 1):
        page.run(f"document.querySelector({json.dumps(button)}).click()")
        assert page.count(series) == shown
        assert page.count(all_) == before - 1 + shown
        assert (
            page.run(f"document.querySelector({json.dumps(button)}).getAttribute('aria-pressed')")
            == str(bool(shown)).lower()
        )


@pytest.mark.parametrize("is_dark", [False, True])
def test_the_page_is_light_or_dark_as_the_system_until_the_button_is_pressed(
    page: Page, report: Path, is_dark: bool
) -> None:
    page.open(report, is_dark=is_dark)
    light, dark = "rgb(252, 251, 249)", "rgb(20, 23, 27)"
    paper = "getComputedStyle(document.body).backgroundColor"
    assert page.run(paper) == (dark if is_dark else light)
    page.run("theme.click()")
    assert page.run(paper) == (light if is_dark else dark)
    assert page.run("theme.getAttribute('aria-pressed')") == str(not is_dark).lower()
    page.run("theme.click()")
    assert page.run(paper) == (dark if is_dark else light)


def test_letters_can_be_told_from_the_paper(page: Page, report: Path) -> None:
    """Contrast as in WCAG 2: 4.5 for small letters."""
    for is_dark in (False, True):
        page.open(report, is_dark=is_dark)
        paper = colour(page.run("getComputedStyle(document.body).backgroundColor"))
        for query in ("body", ".lead", ".caption", ".tiles strong", "nav a", ".warning span", "thead th"):
            ink = colour(page.run(f"getComputedStyle(document.querySelector('{query}')).color"))
            assert contrast(ink, paper) >= 4.5, (query, is_dark, contrast(ink, paper))


def colour(text: str) -> list[float]:
    return [int(part) / 255 for part in text.removeprefix("rgb(").removesuffix(")").split(",")]


def contrast(one: list[float], two: list[float]) -> float:
    def light(rgb: list[float]) -> float:
        parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in rgb]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    low, high = sorted((light(one), light(two)))
    return (high + 0.05) / (low + 0.05)


def test_a_phone_gets_pictures_of_its_own(page: Page, report: Path) -> None:
    page.open(report)
    assert (page.count(".wide .picture") > 5, page.count(".narrow .picture")) == (True, 0)
    page.open(report, PHONE)
    assert (page.count(".wide .picture"), page.count(".narrow .picture") > 5) == (0, True)
    size = page.run("parseFloat(getComputedStyle(document.querySelector('.narrow .t')).fontSize)")
    scale = page.run("document.querySelector('.narrow .picture').getScreenCTM().a")
    assert size * scale >= 11, "letters of pictures can be read"


def test_runs_open_one_by_one(page: Page, directory: Path) -> None:
    page.open(directory / "all.html")
    assert page.count("details.run .tiles") == 0
    page.run("document.querySelector('details.run summary').click()")
    assert page.count("details.run .tiles") == 1
    page.point_at("#run-0-layers .mark.removed")
    assert (page.tip or "").startswith("block 1: activation")


# The page of a frontier

SHOWN = "[...picked.children].filter(one => !one.hidden).map(one => one.id).join()"


@pytest.mark.parametrize("name", ["frontier", "bare"])
@pytest.mark.parametrize(("width", "is_dark"), [(1200, True), (PHONE, False)])
def test_the_page_of_a_frontier_is_without_trouble(
    page: Page, directory: Path, name: str, width: int, is_dark: bool
) -> None:
    page.open(directory / name / PAGE, width, is_dark=is_dark)
    assert page.run("document.documentElement.scrollWidth <= innerWidth"), "the page does not scroll sideways"
    assert page.count(".picture") == (2 if name == "frontier" else 1)
    assert page.count("article") == 1
    assert {*page.requests} - {"data:,"} == {(directory / name / PAGE).resolve().as_uri()}
    assert page.trouble == []


def test_a_point_is_picked_by_mouse_by_keys_and_in_the_table(page: Page, directory: Path) -> None:
    page.open(directory / "frontier" / PAGE)
    assert page.run(SHOWN) == "point-03", "the first that is 1.5 times as fast"
    page.point_at('.mark[data-picks="point-01"]')
    assert (page.tip or "").startswith("1.20×, point 1 of 4\ndamage 0.01\naccuracy 97.00 %")
    page.click()
    assert page.run(SHOWN) == "point-01"
    page.run("document.querySelector('.wide .mark.picked').focus()")
    page.press("ArrowRight")
    assert page.run(SHOWN) == "point-01", "the arrows only point"
    page.press("Enter")
    assert page.run(SHOWN) == "point-02"
    page.point_at('tr[data-picks="point-04"] td')
    page.click()
    assert page.run(SHOWN) == "point-04"
    assert page.count(".mark.picked") == 2, "in both charts"
    page.run("document.querySelector('#point-04 [data-picks]').click()")
    assert page.run("location.hash") == "#point-03"
    assert page.run("document.activeElement.closest('article').id") == "point-03"
    assert page.trouble == []


def test_a_point_has_an_address(page: Page, directory: Path, tmp_path: Path) -> None:
    page.open(directory / "frontier" / PAGE)
    page.run("location.hash = '#point-02'")
    page.tell("Page.reload")
    page.wait(f"document.readyState === 'complete' && {SHOWN} === 'point-02'")


def test_a_command_is_copied(page: Page, directory: Path) -> None:
    page.open(directory / "frontier" / PAGE)
    page.run("document.querySelector('article:not([hidden]) [data-copies]').click()")
    page.wait(
        "['Copied', 'Selected'].includes(document.querySelector('article:not([hidden]) [data-copies]').textContent)"
    )
    text = page.run("getSelection().toString()")
    assert text.startswith("hetdpt apply ")
    assert EVIL in text.replace("'\"'\"'", "'")
