"""What befalls the coordinator while tasks write: a round of each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.fault_rounds import FAULTS, run_round


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_no_row_and_no_hang(fault: str, tmp_path: Path) -> None:
    # Chance decides when; every run of the tests is another round.
    run_round(fault, int.from_bytes(os.urandom(4), "big"), tmp_path)
