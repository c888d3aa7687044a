"""``python -m kafka_sink.options [migration]`` prints the options page, or that for jobs that move here."""

from __future__ import annotations

import sys

from kafka_sink.options.document import document, migration

print(migration() if sys.argv[1:] == ["migration"] else document(), end="")
