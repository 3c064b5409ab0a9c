"""What our figures and their panels have in common. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetdpt.core.errors import FileError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg")


def require_figure(path: Path) -> None:
    """Raise ``FileError`` unless ``path`` is called as a figure is."""
    if path.suffix.lower() not in SUFFIXES:
        raise FileError(f"a figure is a file that ends in {' or '.join(SUFFIXES)}, but {path.name} does not")


def tidy(panel: Axes, columns: int) -> None:
    """Give a panel of accuracy its label, its grid, two sides alone, and the legend below in so many ``columns``."""
    panel.set_ylabel("accuracy [%]")
    panel.grid(color="#DDDDDD", linewidth=0.6)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    below: Any = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.08)}
    panel.legend(frameon=False, fontsize="small", ncols=columns, columnspacing=1.6, **below)
