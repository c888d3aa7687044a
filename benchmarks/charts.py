"""The style of the benchmarks' plots: titles and conditions that fit, labels inside the frame.

Figures are opaque, so that they can be read on light and dark pages alike.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OURS, OTHER, LIGHT = "#2f6fb5", "#9a9a9a", "#a9c9ea"
BROKER, ALERT, SHADE = "#dfb765", "#c0392b", "#e9e9e9"
SECOND, THIRD = "#3f9b55", "#8a63b8"
_INK, _QUIET = "#1f2328", "#57606a"
# Characters of the title and of the small print that fit an inch of the figure's width.
_TITLE_CHARACTERS, _SMALL_CHARACTERS = 9, 17
_STYLE: Any = {
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": "#8c959f",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "xtick.color": _QUIET,
    "ytick.color": _INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "grid.color": "#d0d7de",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


def figure(
    title: str,
    conditions: Sequence[str],
    size: tuple[float, float],
    rows: int = 1,
    columns: int = 1,
    **subplots: Any,
) -> tuple[Any, Any]:
    """A figure and its axes as a matrix. ``size`` is in inches; each of ``conditions`` starts a line."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    mpl.rcParams.update(_STYLE)
    made, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **subplots)
    made.suptitle(
        textwrap.fill(title, int(size[0] * _TITLE_CHARACTERS)), x=0.01, ha="left", fontsize=12, weight="bold"
    )
    small = "\n".join(textwrap.fill(line, int(size[0] * _SMALL_CHARACTERS)) for line in conditions)
    made.supxlabel(small, x=0.01, ha="left", fontsize=7.5, color=_QUIET)
    made.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    return made, axes


def spark_of(conditions: str) -> str:
    """The version of PySpark, for a title."""
    version = re.search(r"pyspark ([\d.]+)", conditions)
    return f"PySpark {version[1]}" if version else ""


def bars(axes: Any, names: Sequence[str], values: Sequence[float], **look: Any) -> Any:
    """Bars from top to bottom. Looks are those of ``Axes.barh``, in the order of ``names``."""
    drawn = axes.barh(range(len(names)), values, **{"height": 0.66, **look})
    axes.set_yticks(range(len(names)), names)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    return drawn


def label(axes: Any, drawn: Any, texts: Sequence[str]) -> None:
    """Texts next to the ends of bars."""
    axes.bar_label(drawn, texts, padding=3, fontsize=8)


def save(made: Any, file: Path) -> None:
    """Widens axes whose texts would cross the frame, and writes the file."""
    from matplotlib import pyplot

    for axes in made.axes:
        for text in axes.texts:
            # The layout would otherwise make the frame narrower instead of the bars.
            text.set_in_layout(False)
    made.draw_without_rendering()
    for axes in made.axes:
        frame = axes.get_window_extent()
        right = max((text.get_window_extent().x1 for text in axes.texts), default=0.0)
        if right <= frame.x1 or axes.get_xscale() != "linear":
            continue
        # A text keeps its size while the bar that it follows gets shorter.
        start, end = axes.get_xlim()
        needed = end
        for text in axes.texts:
            box = text.get_window_extent()
            share = 1 - (box.width + 6) / frame.width
            at = start + (end - start) * (box.x0 - frame.x0) / frame.width
            needed = max(needed, start + (at - start) / share)
        axes.set_xlim(start, needed)
    made.savefig(file, dpi=130)
    pyplot.close(made)
