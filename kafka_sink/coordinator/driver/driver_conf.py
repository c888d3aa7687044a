"""Spark's configuration as the driver's JVM was started with it: Spark gives planning workers none of it.

Read from the JVM's command line, where ``spark-submit`` and PySpark put what they were given, and from the
properties file that ``spark-submit`` reads. What a program sets later, in code, is not seen here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

# Nothing else is kept: other settings may be passwords.
OWN_PREFIX = "spark.kafka-chunked."
_KEPT = ("spark.driver.bindAddress", "spark.driver.host")
_DEFAULTS_FILE = "spark-defaults.conf"
# The separator of java.util.Properties: a colon, an equals sign or white space.
_SEPARATOR = re.compile(r"\s*[=:\s]\s*")


def spark_conf(arguments: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The settings of interest here. ``arguments``: the JVM's command line. Never raises."""
    found: dict[str, str] = {}
    files = [value for option, value in pairwise(arguments) if option == "--properties-file"]
    if not files or "--load-spark-defaults" in arguments:
        files.insert(0, _defaults_file(environ))
    for file in filter(None, files):
        found.update(_kept(_properties(file)))
    found.update(_kept(one[2:].partition("=")[::2] for one in arguments if one.startswith("-D")))
    given = [value for option, value in pairwise(arguments) if option in ("--conf", "-c")]
    given += [one.partition("=")[2] for one in arguments if one.startswith("--conf=")]
    found.update(_kept(one.partition("=")[::2] for one in given))
    return found


def _kept(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for name, value in pairs:
        if name in _KEPT or name.startswith(OWN_PREFIX):
            yield name, value.strip()


def _defaults_file(environ: Mapping[str, str]) -> str:
    folder = environ.get("SPARK_CONF_DIR")
    if not folder:
        home = environ.get("SPARK_HOME")
        folder = os.path.join(home, "conf") if home else ""
    return os.path.join(folder, _DEFAULTS_FILE) if folder else ""


def _properties(file: str) -> Iterator[tuple[str, str]]:
    try:
        text = Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in map(str.strip, text.splitlines()):
        if line and line[0] not in "#!":
            name, *rest = _SEPARATOR.split(line, maxsplit=1)
            yield name, rest[0] if rest else ""
