"""Plots can be read: nothing is cut off or crosses its frame."""

from __future__ import annotations

from pathlib import Path

from benchmarks import charts
from benchmarks.__main__ import DRAWN, redraw


def test_a_label_stays_inside_the_frame(tmp_path: Path) -> None:
    made, [[axes]] = charts.figure("A title", ["conditions"], (4, 2))
    drawn = charts.bars(axes, ["one", "another"], [1.0, 0.5], color=charts.OURS)
    charts.label(axes, drawn, ["a label as long as a bar or two", "0.5"])
    charts.save(made, tmp_path / "plot.png")
    made.draw_without_rendering()
    right = max(text.get_window_extent().x1 for text in axes.texts)
    assert right <= axes.get_window_extent().x1


def test_a_long_title_and_long_conditions_are_not_cut_off(tmp_path: Path) -> None:
    made, _ = charts.figure("Rows at the brokers " * 10, ["8,000 keyed rows of 400 bytes, " * 20], (5, 4))
    charts.save(made, tmp_path / "plot.png")
    made.draw_without_rendering()
    whole = made.bbox
    assert len(made.texts) >= 2
    for text in made.texts:
        box = text.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= whole.x1


def test_charts_are_redrawn_from_the_kept_figures(tmp_path: Path) -> None:
    """Catches: figures of an earlier version, which lack what the plot shows."""
    redraw(DRAWN, tmp_path)
    assert {f"{name}.png" for name in DRAWN} <= {one.name for one in tmp_path.iterdir()}
