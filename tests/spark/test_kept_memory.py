"""Catches: settings that have no effect, and a worker that keeps a task's memory."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys

import pytest

_BATCH = 8 * 1024 * 1024
_PROGRAM = f"""
import resource
from kafka_sink.spark.kept_memory import memory_kept

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        bytes(bytearray({_BATCH}))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()

before = resident()
with memory_kept():
    faults()
    print(faults())
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_large_batches_reuse_memory_and_a_task_leaves_none() -> None:
    run = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    faults, left = map(int, run.stdout.split())
    pages = 20 * _BATCH // resource.getpagesize()
    assert faults < pages / 10
    assert left < _BATCH
