"""The answers of a teacher to fixed views, asked once and kept in files: its logits and, if they count, its streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor

from hetdpt.core.format import amount, counted
from hetdpt.core.modules import memory_advice
from hetdpt.core.progress import StageProgress
from hetdpt.data.batches import TrainingBatches
from hetdpt.data.views import Batch
from hetdpt.store.arrays import ArrayFiles
from hetdpt.training.hidden import Streams
from hetdpt.training.processes import Accelerator

Array = np.ndarray[Any, Any]
LOGITS = "logits"
HINT = "use fewer images or views, or leave out cache_teacher"


@dataclass(frozen=True)
class TeacherAnswers:
    """What a teacher answers to fixed views of images, for every view and image."""

    logits: Array
    """(views, images, classes), float32."""
    streams: Mapping[int, Array]
    """By block: (views, images, tokens, channels), float16; normed, so that no channel is too large for it."""

    def logits_of(self, batch: Batch) -> Tensor:
        """Return the teacher's logits for a batch of these views, on the device of its images."""
        return _rows(self.logits, batch)

    def streams_of(self, batch: Batch) -> Streams:
        """Return the teacher's streams for a batch of these views, on the device of its images."""
        return {number: _rows(array, batch) for number, array in self.streams.items()}


def _rows(array: Array, batch: Batch) -> Tensor:
    return torch.from_numpy(array[batch.view, batch.indices.cpu().numpy()]).to(batch.images.device)


@dataclass(frozen=True)
class TeacherCache:
    """Where the answers of a teacher are kept, and who is told."""

    directory: Path | None = None
    """Where they stay after a training, to resume with; None: a temporary directory, for its time alone."""
    note: Callable[[str], None] | None = None
    """Shows a line: what is cached, its size and place."""
    progress: StageProgress | None = None

    @contextmanager
    def answers(self, asking: Asking, accelerator: Accelerator, identity: dict[str, Any]) -> Iterator[TeacherAnswers]:
        """Yield the answers to all fixed views, asked now if they are not in ``directory`` already.

        ``identity`` is all that decides the answers, as plain JSON; those of another identity are asked again.
        """
        with _shared(self.directory, accelerator) as directory:
            files = ArrayFiles(directory, asking.layout(accelerator), identity)
            if not files.is_filled:
                self._make(files, asking, accelerator)
                self._fill(files.open(writes=True), asking, accelerator)
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    files.seal()
                accelerator.wait_for_everyone()
            arrays = files.open()
            yield TeacherAnswers(arrays.pop(LOGITS), {int(name.split("-")[1]): arrays[name] for name in arrays})

    def _make(self, files: ArrayFiles, asking: Asking, accelerator: Accelerator) -> None:
        """Make the files, after what was there is removed and the space is known to suffice."""
        accelerator.wait_for_everyone()  # all have looked at what is there
        if accelerator.is_main_process:
            files.remove()
        accelerator.wait_for_everyone()
        files.require_space(HINT)
        if self.note and accelerator.is_main_process:
            views = f"{asking.batches.count:,} images x {counted(asking.views, 'view')}"
            self.note(f"caching the teacher: {views}, {amount(files.size)}B in {files.directory}")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            files.create()
        accelerator.wait_for_everyone()

    def _fill(self, arrays: dict[str, Array], asking: Asking, accelerator: Accelerator) -> None:
        """Write the answers to the views of this process."""
        done, total = 0, asking.views * asking.batches.count
        for view in range(asking.views):
            for batch in asking.batches.in_order(view):
                is_real = (batch.indices >= 0).numpy()
                for name, part in asking.answers(batch, accelerator).items():
                    arrays[name][view, batch.indices.numpy()[is_real]] = part[is_real]
                done += accelerator.num_processes * len(is_real)
                if self.progress and accelerator.is_main_process:
                    self.progress("caching the teacher, view", min(done, total), total)
        for array in arrays.values():
            assert isinstance(array, np.memmap)
            array.flush()


@dataclass(frozen=True)
class Asking:
    """A teacher and the images that it is asked about."""

    answer: Callable[[Tensor], tuple[Tensor, Streams]]
    """Gives its logits and streams for images, only the tokens that the student computes too."""
    batches: TrainingBatches
    views: int
    """Fixed views of each image."""

    def answers(self, batch: Batch, accelerator: Accelerator) -> dict[str, Array]:
        """Return the answers to a batch, by the name of the array that they belong to."""
        advice = f"{len(batch.images)} images at once do not fit in memory; lower --batch-size"
        with memory_advice(advice), accelerator.autocast():
            logits, streams = self.answer(batch.images.to(accelerator.device))
        parts = {f"block-{number:03d}": stream.half().cpu().numpy() for number, stream in streams.items()}
        return {LOGITS: logits.float().cpu().numpy(), **parts}

    def layout(self, accelerator: Accelerator) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the type and the shape of each array, by the answers to a first image."""
        first = next(self.batches.in_order())
        answers = self.answers(replace(first, images=first.images[:1]), accelerator)
        every = self.views, self.batches.count
        return {name: (str(part.dtype), (*every, *part.shape[1:])) for name, part in answers.items()}


@contextmanager
def _shared(directory: Path | None, accelerator: Accelerator) -> Iterator[Path]:
    """Yield ``directory`` or, if it is None, a temporary one that all processes share."""
    if directory is not None:
        yield directory
        return
    with TemporaryDirectory(prefix="hetdpt-teacher-", ignore_cleanup_errors=True) as scratch:
        shared = [scratch]
        yield Path(broadcast_object_list(shared)[0] if accelerator.num_processes > 1 else scratch)
