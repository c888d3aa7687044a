"""A broker's side of a login, without sockets: bytes in, bytes out."""

from __future__ import annotations

import struct
from typing import Any

from kafka.protocol.metadata import ApiVersionsResponse, MetadataResponse
from kafka.protocol.sasl import SaslAuthenticateResponse, SaslHandshakeResponse

from kafka_sink.network import apis
from kafka_sink.secret import Secret
from kafka_sink.security import sasl
from tests.support.fake_state import framed

RANGES = {0: (3, 12), 3: (4, 12), 17: (0, 1), 18: (0, 3), 22: (0, 4), 36: (0, 2)}
SECRET = "hunter2-not-to-be-seen"


def plain(password: str = SECRET) -> sasl.SaslExchange:
    return sasl.SaslExchange("PLAIN", sasl.plain("user", Secret(password)))


class Broker:
    def __init__(self, rounds: int = 1, session_ms: int = 0, **refusals: Any) -> None:
        self.rounds = rounds
        self.session_ms = session_ms
        self.refusals = refusals
        self.asked: list[int] = []
        self.said: list[bytes] = []

    def answer(self, data: bytes) -> bytes:
        responses, at = b"", 0
        while at < len(data):
            (size,) = struct.unpack_from(">i", data, at)
            frame = data[at + 4 : at + 4 + size]
            at += 4 + size
            api, version, correlation = struct.unpack_from(">hhi", frame)
            self.asked.append(api)
            responses += framed(self._response(api, version, frame), correlation)
        return responses

    def _response(self, api: int, version: int, frame: bytes) -> Any:
        if api == apis.API_VERSIONS:
            ranges = {**RANGES, **self.refusals.get("ranges", {})}
            rows = [(key, low, high) for key, (low, high) in ranges.items()]
            return ApiVersionsResponse(version=version, error_code=0, api_keys=rows)
        if api == apis.SASL_HANDSHAKE:
            code = self.refusals.get("handshake", 0)
            offered = self.refusals.get("mechanisms", ["PLAIN", "GSSAPI"])
            return SaslHandshakeResponse(version=version, error_code=code, mechanisms=offered)
        if api == apis.SASL_AUTHENTICATE:
            self.said.append(frame)
            code = self.refusals.get("authenticate", 0)
            message = "Authentication failed: wrong\x1b[31m" if code else None
            data = self.refusals.get("data", b"")
            return SaslAuthenticateResponse(
                version=version, error_code=code, error_message=message, auth_bytes=data,
                session_lifetime_ms=self.session_ms,
            )  # fmt: skip
        return MetadataResponse(version=version, brokers=[], topics=[], cluster_id="c", controller_id=-1)
