"""JWT assertions: by them this client proves itself to a token endpoint without a secret (RFC 7523).

They are made, or read, anew for each token: files that were replaced are used from then on.
"""

from __future__ import annotations

import base64
import json
import uuid
from typing import Any

from kafka_sink.errors import ConfigurationError
from kafka_sink.secret import Secret
from kafka_sink.security.key_material import content_of, named, read_private_key
from kafka_sink.security.settings import AssertionSettings, Store


def assertion_of(settings: AssertionSettings, now_s: float) -> Secret:
    """A JWT. ``now_s``: seconds since 1970. Raises ConfigurationError, naming option and file, where one is
    of no use."""
    if settings.file is not None:
        return _ready_made(settings.file)
    assert settings.key is not None
    template = {} if settings.template is None else _template(settings.template)
    header = template.get("header", {}) | {"alg": settings.algorithm, "typ": "JWT"}
    # What is computed wins over the template, and that over the options, as in Java.
    claims = dict(settings.claims) | template.get("payload", {})
    claims |= {"iat": int(now_s), "exp": int(now_s) + settings.exp_s, "nbf": int(now_s) - settings.nbf_s}
    if settings.jti:
        claims["jti"] = str(uuid.uuid4())
    signed = ".".join(_base64(json.dumps(part).encode()) for part in (header, claims))
    return Secret.known(f"{signed}.{_base64(_signature(settings.key, settings.algorithm, signed.encode()))}")


def _ready_made(store: Store) -> Secret:
    found = Secret.known(content_of(store).decode("utf-8", "replace").strip())
    text = found.reveal()
    is_jwt = text.count(".") == 2 and text.isascii() and text.isprintable()
    text = ""
    if not is_jwt:
        raise ConfigurationError(f"{named(store)} holds no JWT: three parts with dots between them")
    return found


def _template(store: Store) -> dict[str, dict[str, Any]]:
    try:
        # NaN is no JSON, and its endpoint would say no more than that.
        found = json.loads(content_of(store), parse_constant=_no_number)
    except (ValueError, RecursionError):
        found = None
    parts = found.values() if isinstance(found, dict) and found.keys() <= {"header", "payload"} else [None]
    if not all(isinstance(part, dict) for part in parts):
        raise ConfigurationError(
            f'{named(store)} is not of the form {{"header": {{...}}, "payload": {{...}}}}'
        )
    return dict(found)


def _no_number(text: str) -> None:
    raise ValueError(text)


def _signature(store: Store, algorithm: str, signed: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa, utils
    from cryptography.hazmat.primitives.hashes import SHA256

    key = read_private_key(store)
    if algorithm == "RS256" and isinstance(key, rsa.RSAPrivateKey):
        return key.sign(signed, padding.PKCS1v15(), SHA256())
    # Other curves have keys of 256 bits, too.
    if (
        algorithm == "ES256"
        and isinstance(key, ec.EllipticCurvePrivateKey)
        and isinstance(key.curve, ec.SECP256R1)
    ):
        # JWTs have the two numbers as they are, not in DER (RFC 7518, 3.4).
        pair = utils.decode_dss_signature(key.sign(signed, ec.ECDSA(SHA256())))
        return b"".join(number.to_bytes(32, "big") for number in pair)
    wanted = "an RSA key" if algorithm == "RS256" else "a key of the curve P-256"
    raise ConfigurationError(
        f"{named(store)}: kafka.sasl.oauthbearer.assertion.algorithm={algorithm} needs {wanted}"
    )


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")
