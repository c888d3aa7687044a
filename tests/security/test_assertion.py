"""JWT assertions: claims, signatures by another library's judgement, and what an endpoint is sent."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from joserfc import jwt
from joserfc.errors import BadSignatureError
from joserfc.jwk import ECKey, RSAKey

from kafka_sink.errors import AuthenticationError, ConfigurationError
from kafka_sink.options import parse
from kafka_sink.secret import Secret
from kafka_sink.security.preparation import Security
from kafka_sink.security.settings import AssertionSettings, SecuritySettings, TokenSettings
from kafka_sink.security.token import TokenEndpoint, assertion_of
from tests.support.security.token_server import TokenServer

PASSPHRASE = "hunter2"
CLASSES = "org.apache.kafka.common.security.oauthbearer."
NOW = 1_700_000_000.0
ISSUER = {"claim.iss": "me"}
RSA = rsa.generate_private_key(65537, 2048)
CURVES = {"P-256": ec.generate_private_key(ec.SECP256R1()), "P-384": ec.generate_private_key(ec.SECP384R1())}


def key_file(folder: Path, key: PrivateKeyTypes = RSA, passphrase: str = "") -> str:
    encryption = BestAvailableEncryption(passphrase.encode()) if passphrase else NoEncryption()
    path = folder / "key.pem"
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    return str(path)


def public(key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey = RSA) -> RSAKey | ECKey:
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return RSAKey.import_key(pem) if isinstance(key, rsa.RSAPrivateKey) else ECKey.import_key(pem)


def tokens(url: str = "https://issuer/token", flow: str = "", **assertion: str) -> TokenSettings:
    """``assertion`` has the options behind the prefix, with underscores for dots."""
    given = {f"assertion.{name.replace('_', '.')}": value for name, value in assertion.items()}
    given |= {"token.endpoint.url": url} | ({"jwt.retriever.class": CLASSES + flow} if flow else {})
    raw = {f"kafka.sasl.oauthbearer.{name}": value for name, value in given.items()}
    raw |= {"kafka.bootstrap.servers": "h:1", "kafka.security.protocol": "SASL_SSL"}
    found = SecuritySettings.from_options(parse({**raw, "kafka.sasl.mechanism": "OAUTHBEARER"}).options).sasl
    assert found is not None
    assert found.tokens is not None
    return found.tokens


def made(**assertion: str) -> str:
    settings = tokens(**assertion).assertion
    assert settings is not None
    found = assertion_of(settings, NOW)
    assert isinstance(found, Secret)
    return found.reveal()


@pytest.fixture
def endpoint() -> Iterator[TokenServer]:
    with TokenServer() as server:
        server.gives(lambda: "opaque")
        yield server


@pytest.mark.parametrize("algorithm", ["RS256", "ES256"])
@pytest.mark.parametrize("passphrase", ["", PASSPHRASE])
def test_another_library_accepts_the_signature(tmp_path: Path, algorithm: str, passphrase: str) -> None:
    key = RSA if algorithm == "RS256" else CURVES["P-256"]
    more = {"private_key_passphrase": passphrase} if passphrase else {}
    path = key_file(tmp_path, key, passphrase)
    text = made(claim_iss="me", private_key_file=path, algorithm=algorithm.lower(), **more)
    assert jwt.decode(text, public(key), algorithms=[algorithm]).header == {"alg": algorithm, "typ": "JWT"}
    head, body, signature = text.split(".")
    with pytest.raises(BadSignatureError):
        jwt.decode(f"{head}.{body[:-2]}AA.{signature}", public(key), algorithms=[algorithm])


def test_claims_come_from_options_then_the_template_then_the_clock(tmp_path: Path) -> None:
    template = tmp_path / "template.json"
    template.write_text(
        json.dumps({"header": {"kid": "k1", "alg": "none"}, "payload": {"sub": "it", "team": "e", "iat": 1}})
    )
    text = made(
        claim_iss="me",
        claim_sub="me",
        claim_aud="https://issuer/token",
        claim_exp_seconds="30",
        claim_nbf_seconds="5",
        claim_jti_include="true",
        private_key_file=key_file(tmp_path),
        template_file=str(template),
    )
    found = jwt.decode(text, public())
    assert found.header == {"kid": "k1", "alg": "RS256", "typ": "JWT"}
    jti = found.claims.pop("jti")
    assert len(jti) == 36
    assert found.claims == {
        "iss": "me", "sub": "it", "aud": "https://issuer/token", "team": "e",
        "iat": NOW, "exp": NOW + 30, "nbf": NOW - 5,
    }  # fmt: skip


def test_a_file_is_sent_as_it_is_and_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "assertion"
    for text in ("a.b.c", "d.e.f"):
        path.write_text(f"{text}\n")
        # Java ignores the others, too.
        assert made(file=str(path), claim_iss="me", private_key_file="/nowhere") == text


def test_a_key_that_is_replaced_signs_the_next_one(tmp_path: Path) -> None:
    settings = tokens(claim_iss="me", private_key_file=key_file(tmp_path)).assertion
    assert settings is not None
    first = assertion_of(settings, NOW).reveal()
    renewed = rsa.generate_private_key(65537, 2048)
    key_file(tmp_path, renewed)
    jwt.decode(assertion_of(settings, NOW).reveal(), public(renewed))
    with pytest.raises(BadSignatureError):
        jwt.decode(first, public(renewed))


# -- what the endpoint is sent ------------------------------------------------------------------------


def sent(endpoint: TokenServer) -> tuple[dict[str, Any], dict[str, str]]:
    _, headers, body = endpoint.requests[-1]
    return {name: only for name, (only,) in parse_qs(body).items()}, headers


@pytest.mark.parametrize("flow", ["", "DefaultJwtRetriever", "ClientCredentialsJwtRetriever"])
def test_client_credentials_are_proved_by_an_assertion(
    endpoint: TokenServer, tmp_path: Path, flow: str
) -> None:
    given = tokens(endpoint.url, flow, claim_iss="me", private_key_file=key_file(tmp_path))
    assert TokenEndpoint(given).fetch().text == Secret("opaque")
    form, headers = sent(endpoint)
    assertion = form.pop("client_assertion")
    assert jwt.decode(assertion, public()).claims["iss"] == "me"
    assert form == {
        "grant_type": "client_credentials",
        "client_assertion_type": "urn:ietf:params:oauth:client-assertion-type:jwt-bearer",
    }
    assert "Authorization" not in headers


def test_an_assertion_is_the_grant_itself(endpoint: TokenServer, tmp_path: Path) -> None:
    path = tmp_path / "assertion"
    path.write_text("a.b.c")
    given = tokens(endpoint.url, "JwtBearerJwtRetriever", file=str(path))
    TokenEndpoint(given).fetch()
    form, headers = sent(endpoint)
    assert form == {"grant_type": "urn:ietf:params:oauth:grant-type:jwt-bearer", "assertion": "a.b.c"}
    assert "Authorization" not in headers


def test_an_endpoint_that_repeats_the_assertion_does_not_show_it(
    endpoint: TokenServer, tmp_path: Path
) -> None:
    path = tmp_path / "assertion"
    path.write_text("hun.ter.two")
    endpoint.response = lambda: (400, b'{"error": "invalid_client", "error_description": "hun.ter.two"}')
    with pytest.raises(AuthenticationError, match=r"invalid_client: \[hidden: it.*assertion .key") as caught:
        TokenEndpoint(tokens(endpoint.url, file=str(path))).fetch()
    assert "hun.ter" not in str(caught.value)


def test_an_id_token_will_do(endpoint: TokenServer) -> None:
    endpoint.response = lambda: (200, b'{"id_token": "it"}')
    given = TokenSettings(url=endpoint.url, client_id="me", client_secret=Secret("s"))
    assert TokenEndpoint(given).fetch().text == Secret("it")


# -- mistakes, before any connection ------------------------------------------------------------------


def refused(**assertion: str) -> str:
    """What planning says."""
    with pytest.raises(ConfigurationError) as caught:
        assertion_of(tokens(**assertion).assertion or AssertionSettings(), NOW)
    assert PASSPHRASE not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("no key", "holds no private key in PEM"),
        (RSA, "algorithm=ES256 needs a key of the curve P-256"),
        (CURVES["P-384"], "algorithm=ES256 needs a key of the curve P-256"),
        (ec.generate_private_key(ec.SECP256K1()), "algorithm=ES256 needs a key of the curve P-256"),
    ],
    ids=["no key", "RSA", "P-384", "secp256k1"],
)
def test_keys_of_no_use(tmp_path: Path, content: Any, problem: str) -> None:
    path = tmp_path / "key.pem"
    if isinstance(content, str):
        path.write_text(content)
    else:
        key_file(tmp_path, content)
    said = refused(claim_iss="me", private_key_file=str(path), algorithm="ES256")
    assert problem in said
    assert str(path) in said


def test_passphrases_that_do_not_fit(tmp_path: Path) -> None:
    path = key_file(tmp_path, RSA, PASSPHRASE)
    name = "kafka.sasl.oauthbearer.assertion.private.key.passphrase"
    assert f"is encrypted; set {name}" in refused(claim_iss="me", private_key_file=path)
    wrong = refused(claim_iss="me", private_key_file=path, private_key_passphrase="other")
    assert f"wrong {name}" in wrong


def test_files_of_no_use(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("no.jwt")
    assert f"assertion.file' = {path} holds no JWT" in refused(file=str(path))
    assert "cannot be read: No such file" in refused(file=str(tmp_path / "none"))
    assert "assertion.file' = /a b cannot be read: its name holds a null" in refused(file="/a\0b")
    for text in ("", "[]", '{"payload": 1}', '{"head": {}}', '{"payload": {"n": NaN}}', "[" * 100_000):
        path.write_text(text)
        said = refused(claim_iss="me", private_key_file=key_file(tmp_path), template_file=str(path))
        assert "template.file' =" in said
        assert "is not of the form" in said


@pytest.mark.parametrize(
    ("url", "flow", "assertion", "problem"),
    [
        (
            "https://h/",
            "JwtBearerJwtRetriever",
            {},
            "needs kafka.sasl.oauthbearer.assertion.private.key.file",
        ),
        ("https://h/", "", {"claim_iss": "me"}, "needs kafka.sasl.oauthbearer.assertion.private.key.file"),
        (
            "https://h/",
            "",
            {"private_key_file": "/k"},
            "has no effect without kafka.sasl.oauthbearer.assertion",
        ),
        ("file:///t", "", {"file": "/a"}, "assertion.file' has no effect with these tokens"),
        ("file:///t", "JwtBearerJwtRetriever", {"file": "/a"}, "begins with https:// or http://"),
        ("https://h/", "FileJwtRetriever", {}, "begins with file://"),
        ("https://h/", "MyRetriever", {}, "names a Java class"),
        ("https://h/", "", {"claim_exp_seconds": "86401"}, "claim.exp.seconds' is out of bounds"),
        ("https://h/", "", {"algorithm": "HS256"}, "is not one of RS256, ES256"),
    ],
)
def test_options_that_do_not_fit(url: str, flow: str, assertion: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        tokens(url, flow, **assertion)
    assert problem in str(caught.value)


def test_planning_makes_one_before_it_connects() -> None:
    sasl = {"kafka.sasl.mechanism": "OAUTHBEARER", "kafka.security.protocol": "SASL_PLAINTEXT"}
    prefix = "kafka.sasl.oauthbearer"
    given = {f"{prefix}.token.endpoint.url": "https://h/", f"{prefix}.assertion.file": "/nowhere/jwt"}
    options = parse({"kafka.bootstrap.servers": "h:1", **sasl, **given}).options
    with pytest.raises(ConfigurationError, match="/nowhere/jwt cannot be read"):
        Security(SecuritySettings.from_options(options)).check()


def test_the_parts_are_not_padded(tmp_path: Path) -> None:
    text = made(claim_iss="m", private_key_file=key_file(tmp_path))
    assert "=" not in text
    assert json.loads(base64.urlsafe_b64decode(text.split(".")[1] + "==="))["iss"] == "m"
