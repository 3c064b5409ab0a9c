"""The search for a frontier in a run directory that processes of one or several machines share.

run.json      the settings, the same for all processes
move_prices.json   what layers, tails, features, heads and tokens cost, timed by one process
damages/      one file for each group of damages, in the order in which the search asks for them
claims/       which process measures what

Every process runs the whole search, and reads the damages that others measured or that it measured before a kill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from hetdpt.core.progress import StageProgress
from hetdpt.flow.execution import Execution
from hetdpt.selection.frontier import DamageJob
from hetdpt.selection.move_prices import MovePrices
from hetdpt.store.jobs import Guard, Task

DAMAGES, PRICES = "damages", "move_prices.json"


def shared_prices(
    directory: Path, measure: Callable[[], MovePrices], progress: StageProgress | None = None
) -> MovePrices:
    """Return the prices in ``directory``, measured by the first process that asks for them."""
    task = Task.to_file("prices", None, directory / PRICES, MovePrices, lambda _: measure())
    [done] = Execution(progress=progress).run(directory, [task])
    return done.result


class SharedDamages:
    """Measures damages together with all processes of ``directory``, and keeps them there; a ``Measure``."""

    def __init__(self, directory: Path, progress: StageProgress | None = None) -> None:
        self.directory, self.execution = directory, Execution(progress=progress)
        self.is_behind = True
        """Whether all damages asked for so far had been measured before."""

    def __call__(self, jobs: Sequence[DamageJob]) -> list[list[float]]:
        """Return the damages of ``jobs``."""
        tasks = [self._task(job) for job in jobs]
        self.is_behind = self.is_behind and all(task.read() is not None for task in tasks)
        found = {done.subject: done.result for done in self.execution.run(self.directory, tasks)}
        return [[found[job.name][subject] for subject in job.subjects] for job in jobs]

    def _task(self, job: DamageJob) -> Task[str, dict[str, float]]:
        return Task.to_file(
            job.name,
            job.name,
            self.directory / DAMAGES / f"{job.name}.json",
            dict[str, float],
            partial(_measured, job),
            is_complete=lambda found: {*found} == {*job.subjects},
        )


def _measured(job: DamageJob, _: Guard) -> dict[str, float]:
    return dict(zip(job.subjects, job.run(), strict=True))
