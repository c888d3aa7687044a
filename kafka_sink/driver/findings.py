"""What the doctor reports. Imports nothing, as libraries may be missing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How bad a finding is. A job fails on a PROBLEM."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "PROBLEM"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    level: Level
    text: str

    def __str__(self) -> str:
        return f"{self.level.value:>8}  {self.text}"
