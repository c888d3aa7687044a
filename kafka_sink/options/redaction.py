"""Which setting of Spark hides the secret options wherever Spark itself shows a job's options.

Spark 4.1 shows them in a stream's plans: in exceptions, in its UI and REST API, in the event log. It hides a
value where ``spark.redaction.regex`` or ``spark.sql.redaction.options.regex`` finds something in the name of
the option or in the value (Spark's Utils.scala, redact, and SQLConf.scala, redactOptions).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from kafka_sink.options.table import SPECS
from kafka_sink.options.values import KAFKA_PREFIX

SETTING = "spark.redaction.regex"
# The setting, and what it is where nobody sets it (Spark 4.1 to 4.3).
DEFAULTS: Mapping[str, str] = {
    SETTING: "(?i)secret|password|token|access[.]?key",
    "spark.sql.redaction.options.regex": "(?i)url",
}
_SECRET = frozenset(name.lower() for spec in SPECS if spec.secret for name in (spec.name, *spec.aliases))
# Hidden like the others because they are long, but a certificate is public.
_PUBLIC = re.compile(r"certificate|[.]ca[.]")


def regex() -> str:
    """Spark's own expression, extended by the secret options that it does not cover."""
    default = DEFAULTS[SETTING]
    names = sorted(name.removeprefix(KAFKA_PREFIX) for name in _SECRET)
    uncovered = [name for name in names if not re.search(default, name)]
    shortest = [name for name in uncovered if not any(one in name and one != name for one in uncovered)]
    return "|".join([default, *(name.replace(".", "[.]") for name in shortest)])


def shown_by_spark(options: Mapping[str, str], conf: Mapping[str, str]) -> list[str]:
    """The secret ones of ``options`` that Spark would show. ``conf``: the settings that are known."""
    found = [conf.get(name, default) for name, default in DEFAULTS.items()]
    try:
        expressions = [re.compile(expression) for expression in found if expression]
    except re.error:
        # Java knows expressions that Python does not: nothing can be said.
        return []
    secret = {name.strip().lower(): value for name, value in options.items()}
    return sorted(
        name
        for name, value in secret.items()
        if name in _SECRET and not _PUBLIC.search(name) and not _finds(expressions, (name, value))
    )


def _finds(expressions: Iterable[re.Pattern[str]], texts: tuple[str, str]) -> bool:
    return any(expression.search(text) for expression in expressions for text in texts)


def warning(names: Iterable[str]) -> str:
    listed = ", ".join(f"'{name}'" for name in names)
    return (
        f"Spark may show the secret option {listed} in plans, exceptions, its UI and its event log: name a "
        f"file instead (kafka.ssl.keystore.location), or start the session with {SETTING}={regex()}"
    )
