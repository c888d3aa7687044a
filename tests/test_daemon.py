"""The daemon that imports the sink before it forks Spark's workers. In Spark: tests/standalone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.support.commands import run


def preloaded(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A new process that has imported kafka_sink.daemon, but whose PySpark daemon only says that it runs."""
    before = """
        import os, sys, types
        from kafka_sink import daemon
        stand_in = types.ModuleType("pyspark.daemon")
        stand_in.manager = lambda: print("manager runs in", "pandas" in sys.modules)
        sys.modules["pyspark.daemon"] = stand_in
        os.execv = lambda path, arguments: (print("exec", *arguments[1:], flush=True), os._exit(0))
        sys.argv = ["daemon", "pyspark.worker"]
    """
    program = textwrap.dedent(before) + textwrap.dedent(code)
    return run([sys.executable, "-c", program], {**os.environ, "OMP_NUM_THREADS": "1", **environment})


def path_with(folder: Path, module: str, code: str) -> str:
    """PYTHONPATH with this module first."""
    (folder / f"{module}.py").write_text(code)
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def test_no_import_starts_a_thread_and_users_settings_of_jemalloc_stay() -> None:
    done = preloaded(
        "daemon.main(); print(daemon.is_single_threaded(), os.environ.get('JE_ARROW_MALLOC_CONF'))"
    )
    assert done.stdout.splitlines()[-1] == "True None", done.stderr
    assert done.stdout.startswith("manager runs")
    code = "daemon.preload(); print(os.environ['JE_ARROW_MALLOC_CONF'])"
    assert preloaded(code, JE_ARROW_MALLOC_CONF="narenas:1").stdout.strip() == "narenas:1"


def test_sparks_own_daemon_runs_if_an_import_starts_a_thread(tmp_path: Path) -> None:
    threaded = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    path = path_with(tmp_path, "threaded", threaded)
    done = preloaded("daemon.MODULES = ('threaded',); daemon.main()", PYTHONPATH=path)
    assert done.stdout.strip() == "exec -m pyspark.daemon pyspark.worker"
    assert "pyspark.daemon runs in its place" in done.stderr


def test_sparks_own_daemon_runs_if_proc_cannot_be_read() -> None:
    refuse = "daemon.MODULES = (); os.listdir = lambda path: open('/no/such/file'); daemon.main()"
    done = preloaded(refuse)
    assert done.stdout.strip() == "exec -m pyspark.daemon pyspark.worker", done.stderr


def test_modules_that_cannot_be_imported_are_left_to_the_workers(tmp_path: Path) -> None:
    done = preloaded(
        "daemon.MODULES = ('broken', 'no_such', 'json.tool'); daemon.preload(); "
        "print('json.tool' in sys.modules)",
        PYTHONPATH=path_with(tmp_path, "broken", "raise RuntimeError('broken')\n"),
    )
    assert done.stdout.strip() == "True"
