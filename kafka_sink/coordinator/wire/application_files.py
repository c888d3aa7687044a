"""Names of the files that planning and the coordinator share in the application's folder."""

from __future__ import annotations

from pathlib import Path


def known_cluster_marker(folder: Path, token: str, key: str) -> Path:
    """This file exists while the coordinator with this token serves the cluster.

    Planning writes it; the coordinator deletes it when it forgets the cluster.
    """
    return folder / f"said-{token}-{key}"


def starts_file(folder: Path) -> Path:
    """The file that counts how often a coordinator was started."""
    return folder / "starts"
