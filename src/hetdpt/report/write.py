"""Reports of runs as files: HTML, Markdown or JSON by the name of the file. No torch here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetdpt.core.errors import FileError
from hetdpt.report.markdown import render_markdown
from hetdpt.report.page import render
from hetdpt.report.run import RunRecord
from hetdpt.results import RunSummary
from hetdpt.store.atomic import require_new, write_text

REPORTS = {"html": "report.html", "markdown": "report.md", "json": "report.json"}


def write_reports(directory: Path, summary: RunSummary | None = None) -> dict[str, str]:
    """Write the page, the Markdown and the JSON of a run into it; return their names.

    ``summary`` is that of ``summary.json``, if it is not written yet.
    """
    record = RunRecord.read(directory, summary)
    for name in REPORTS.values():
        write_report([record], directory / name, overwrite=True)
    return dict(REPORTS)


def write_report(records: Sequence[RunRecord], target: Path, overwrite: bool = False) -> None:
    """Write one report of all ``records``, whole or not at all."""
    makers = {".html": _html, ".md": render_markdown, ".json": _json}
    if (make := makers.get(target.suffix.lower())) is None:
        raise FileError(f"a report is a file that ends in {', '.join(makers)}, but {target.name} does not")
    require_new(target, overwrite)
    text = make(records)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, text)


def values_of(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Return the runs as plain JSON."""
    return {"runs": [record.to_dict() for record in records]}


def _html(records: Sequence[RunRecord]) -> str:
    return render(records, values_of(records))


def _json(records: Sequence[RunRecord]) -> str:
    return json.dumps(values_of(records), indent=1, allow_nan=False) + "\n"
