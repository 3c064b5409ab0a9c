"""Run directories, read into frozen values for a report. No torch here, and nothing is computed again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any, get_args, get_type_hints

from hetdpt.core.errors import FileError
from hetdpt.core.goals import GOALS
from hetdpt.core.plan import Kind
from hetdpt.results import Results, RunSummary, from_json, to_json
from hetdpt.store.settings import read_settings
from hetdpt.store.stage_directory import CONFIG, STAGE, SUMMARY, StageRecord, read_flow, read_stages


@dataclass(frozen=True)
class RunRecord:
    """A run as it stands: its settings, and the results of its stages."""

    directory: Path
    config: dict[str, Any]
    """The settings in ``config.yaml``."""
    config_text: str
    flow: dict[str, bool]
    """The names of all stages in order, and whether the run has each."""
    stages: tuple[StageRecord, ...]
    """The stages that have begun or are done, in order."""
    results: Results = field(default_factory=Results)
    summary: RunSummary | None = None
    """None until the run is finished."""

    @classmethod
    def read(cls, directory: Path, summary: RunSummary | None = None) -> RunRecord:
        """Return the run in ``directory``; ``FileError`` if it holds none, or a damaged one.

        ``summary`` is that of ``summary.json``, if it is not written yet.
        """
        stages = tuple(read_stages(directory))
        if summary is None and (directory / SUMMARY).is_file():
            summary = RunSummary.read(directory)
        text, config = _read_config(directory / CONFIG)
        return cls(directory, config, text, read_flow(directory), stages, _results(stages), summary)

    @property
    def name(self) -> str:
        """The name of its directory."""
        return self.directory.resolve().name

    @property
    def model(self) -> str:
        return str(self.config.get("model", ""))

    @property
    def data(self) -> str:
        return str(self.config.get("data", ""))

    @property
    def metric(self) -> str:
        """What its accuracies are: ``accuracy``, or agreement with the dense model where images have no labels."""
        return self.results.analyse.metric if self.results.analyse else "accuracy"

    @property
    def is_labelled(self) -> bool:
        return self.metric == "accuracy"

    @property
    def method(self) -> str:
        return str(self.config.get("method", ""))

    @property
    def goals(self) -> dict[str, Any]:
        """The goals of the run, by name."""
        return {name: self.config[name] for name in GOALS if self.config.get(name) is not None}

    @property
    def is_finished(self) -> bool:
        return self.summary is not None

    @property
    def next_stage(self) -> str | None:
        """The next stage to run; None if none is left."""
        done = {stage.name for stage in self.stages if stage.is_done}
        left = [name for name, is_needed in self.flow.items() if is_needed and name not in done]
        return None if self.is_finished or not left else left[0]

    @cached_property
    def entropies(self) -> dict[tuple[Kind, int], float]:
        """Transfer entropy of the layers removed for samples, by kind and block: of the first sample that has it."""
        found: dict[tuple[Kind, int], float] = {}
        for sample in self.results.collect.samples if self.results.collect else ():
            for layer in sample.layers:
                if layer.te is not None:
                    found.setdefault((layer.kind, layer.block), layer.te)
        return found

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes the numbers doubtful, a sentence each."""
        latest = self.summary or self.results.allocate or self.results.fit
        warnings = list(latest.warnings) if latest else []
        for package, found in self.versions.items():
            if len(found) > 1:
                warnings.append(f"stages ran with different versions of {package}: {', '.join(found)}")
        return tuple(warnings)

    @property
    def versions(self) -> dict[str, tuple[str, ...]]:
        """The versions of each package that stages ran with."""
        found: dict[str, dict[str, None]] = {}
        for stage in self.stages:
            for package, version in stage.versions.items():
                found.setdefault(package, {})[version] = None
        return {package: tuple(versions) for package, versions in found.items()}

    @property
    def seconds(self) -> float:
        """Time spent on all stages."""
        return sum(stage.seconds for stage in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain JSON, with the same keys for every run; what is missing is None."""
        records = {stage.name: stage for stage in self.stages}
        values: dict[str, Any] = _plain(
            {
                "name": self.name,
                "directory": str(self.directory),
                "is_finished": self.is_finished,
                "next_stage": self.next_stage,
                "config": self.config,
                "summary": to_json(self.summary) if self.summary else None,
                "stages": {name: _values(records[name]) if name in records else None for name in self.flow},
                "versions": self.versions,
                "seconds": self.seconds,
                "warnings": self.warnings,
            }
        )
        return values


def _results(stages: Iterable[StageRecord]) -> Results:
    types = {name: get_args(hint)[0] for name, hint in get_type_hints(Results).items()}
    done = (stage for stage in stages if stage.name in types and stage.is_done)
    return Results(
        **{stage.name: from_json(types[stage.name], stage.result, stage.directory / STAGE) for stage in done}
    )


def _read_config(file: Path) -> tuple[str, dict[str, Any]]:
    if not (values := read_settings(file)):
        raise FileError(f"{file} cannot be read (no settings); give another run")
    return file.read_text(encoding="utf-8"), values


def _values(stage: StageRecord) -> dict[str, Any]:
    values = asdict(stage) | {"is_done": stage.is_done, "fingerprint": stage.fingerprint}
    del values["name"], values["directory"]
    return values


def _plain(value: Any) -> Any:
    """Return plain JSON, with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return value if isfinite(value) else None
    return value if isinstance(value, str | int | None) else str(value)
