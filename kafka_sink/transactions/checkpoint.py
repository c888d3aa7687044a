"""The name of a query's checkpoint, however its location is spelt: transactional ids are derived from it."""

from __future__ import annotations

import json
import posixpath
from typing import NamedTuple

from kafka_sink.errors import ConfigurationError

# A file that Spark writes into a checkpoint before it plans the first batch: the query's id, for ever.
_METADATA = "metadata"


class Location(NamedTuple):
    """As Hadoop's Path splits and normalises it. ``scheme`` and ``authority`` may be empty."""

    scheme: str
    authority: str
    path: str

    @classmethod
    def of(cls, text: str) -> Location:
        """Take any text, as Path does: no quoting counts. Hadoop looks file systems up without case."""
        before, colon, rest = text.partition(":")
        scheme = before.lower() if colon and "/" not in before else ""
        path, authority = rest if scheme else text, ""
        if path.startswith("//") and len(path) > 2:
            authority, slash, below = path[2:].partition("/")
            path = slash + below
        path = posixpath.normpath(path) if path else ""
        # POSIX gives two slashes a meaning of their own.
        return cls(scheme, authority.lower(), "/" + path.lstrip("/") if path.startswith("/") else path)

    @property
    def is_local(self) -> bool:
        """Whether it may be on this host: Spark's default file system decides where there is no scheme."""
        return self.scheme in ("", "file") and self.authority in ("", "localhost")


def query_id(text: str) -> str | None:
    """The id of the query whose checkpoint this is, if it is on this host; None for others.

    Raises ConfigurationError where nothing says for certain which file system the location is on.
    """
    location = Location.of(text)
    if location.is_local:
        try:
            with open(posixpath.join(location.path, _METADATA), encoding="utf-8") as file:
                return str(json.load(file)["id"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                _unknown(text, f"its file '{_METADATA}' cannot be read here: {error}")
            ) from None
    if not location.scheme or (location.scheme == "hdfs" and not location.authority):
        raise ConfigurationError(_unknown(text, "it leaves its file system to a default"))
    return None


def _unknown(text: str, why: str) -> str:
    return (
        f"Option 'checkpointLocation' = {text} cannot name the query's transactional ids, as {why}. Write it "
        "in full, such as hdfs://namenode:8020/checkpoints/orders, or set transactional.id.prefix"
    )
