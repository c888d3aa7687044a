"""Tokens: fetched once, renewed in time, kept while no endpoint responds; their sources and assertions."""

from __future__ import annotations

import base64
import json
import socket
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
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
from kafka_sink.security.settings import (
    AssertionSettings,
    SaslSettings,
    SecuritySettings,
    Store,
    TlsSettings,
    TokenSettings,
)
from kafka_sink.security.token import (
    Token,
    TokenEndpoint,
    TokenSource,
    TokenUnavailableError,
    assertion_of,
    from_text,
    jwt_expiry,
    provided_tokens,
    token_source,
)
from tests.support.forked import in_a_fork
from tests.support.security.secured_broker import TokenIssuer
from tests.support.security.token_server import TokenServer
from tests.support.surroundings import Modules

SECRET = "s3cr:t/+ ü"
PROVIDERS = "tests.support.security.providers"


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.waits: list[float] = []

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


def source(results: list[Any], clock: Clock, **changes: Any) -> TokenSource:
    def fetch() -> Token:
        found = results.pop(0)
        if isinstance(found, Exception):
            raise found
        return Token(Secret(f"token-{found}"), clock.now + found)

    return TokenSource(TokenSettings(**changes), fetch, clock, clock.wait, lambda: 0.0)


def test_a_token_is_fetched_once_and_renewed_after_its_share_of_life() -> None:
    """Of 1,000 s, 80 % are less than 300 s before the end. A short life is over by its share alone."""
    for life_s, used_s in ((1000.0, 700), (10.0, 8)):
        tokens = source([life_s, life_s + 1], clock := Clock())
        first = tokens.get()
        clock.now += used_s - 0.1
        assert tokens.get() is first
        clock.now += 0.2
        assert tokens.get().text == Secret(f"token-{life_s + 1}")


def test_while_no_new_one_can_be_had_the_old_serves_until_it_runs_out() -> None:
    away = [TokenUnavailableError("away")] * 3
    results = [100.0, *away, AuthenticationError("no"), *away]
    tokens = source(results, clock := Clock())
    first = tokens.get()
    for after_s, left in ((85, 4), (85, 4), (96, 3)):
        clock.now = 1_000_000.0 + after_s
        assert tokens.get() is first
        assert len(results) == left, "one renewal, and another after 10 s"
    clock.now = 1_000_000.0 + 100
    with pytest.raises(TokenUnavailableError, match="away"):
        tokens.get()


def test_a_valid_token_serves_while_its_renewal_hangs() -> None:
    clock, hangs, asked = Clock(), threading.Event(), threading.Event()
    calls = []

    def fetch() -> Token:
        calls.append(1)
        if len(calls) > 1:
            asked.set()
            hangs.wait(90)
        return Token(Secret(f"token-{len(calls)}"), clock.now + 1000)

    tokens = TokenSource(TokenSettings(), fetch, clock, clock.wait, lambda: 0.0)
    first = tokens.get()
    clock.now += 900
    with ThreadPoolExecutor(2) as threads:
        renewing = threads.submit(tokens.get)
        assert asked.wait(20)
        try:
            assert threads.submit(tokens.get).result(30) is first
        finally:
            hangs.set()
        assert renewing.result(20).text == tokens.get().text == Secret("token-2")


def test_tries_wait_longer_each_time_and_a_refusal_is_final() -> None:
    clock = Clock()
    away = TokenUnavailableError("away")
    assert source([away, away, 60.0], clock).get().text == Secret("token-60.0")
    assert clock.waits == pytest.approx([0.08, 0.16])
    with pytest.raises(AuthenticationError):
        source([AuthenticationError("no"), 60.0], clock).get()
    with pytest.raises(AuthenticationError, match="already expired"):
        source([-1.0], clock).get()


def test_concurrent_token_requests_share_one_fetch() -> None:
    fetched = []
    begin = threading.Barrier(8)

    def fetch() -> Token:
        fetched.append(1)
        return Token(Secret("t"), None)

    tokens = TokenSource(TokenSettings(), fetch)

    def get(_: int) -> Token:
        begin.wait()
        return tokens.get()

    with ThreadPoolExecutor(8) as threads:
        assert len(set(map(id, threads.map(get, range(8))))) == 1
    assert fetched == [1]
    assert token_source(TokenSettings(provider=f"{PROVIDERS}.fixed")) is token_source(
        TokenSettings(provider=f"{PROVIDERS}.fixed")
    )


def test_a_fork_has_token_sources_of_its_own(modules: Modules) -> None:
    """Catches: a wait for ever for a lock that was held at the fork."""
    settings = TokenSettings(url="file:///dev/null", retry_backoff_s=0.0)
    parents = token_source(settings)
    asked, end = threading.Event(), threading.Event()

    class Hanging:
        __spec__ = None

        def __getattr__(self, name: str) -> object:
            asked.set()
            end.wait(90)
            return parents.get

    modules(hanging=Hanging())
    importing = threading.Thread(target=token_source, args=(TokenSettings(provider="hanging.token"),))
    importing.start()
    assert asked.wait(20)
    assert in_a_fork(lambda: token_source(settings) is not parents)
    end.set()
    importing.join(20)


def test_jwt_expiry_is_read_and_invalid_tokens_are_refused() -> None:
    assert jwt_expiry(TokenIssuer().token(exp=123)) == 123.0
    huge = base64.urlsafe_b64encode(b'{"exp":1' + b"0" * 400 + b"}").decode()
    middles = [huge, "b", base64.b64encode(b"[]").decode(), "W" * 9000]
    # A token with one of these expiries was fetched for each connection, or never renewed.
    middles += [base64.b64encode(f'{{"exp":{exp}}}'.encode()).decode() for exp in ("NaN", "1e999")]
    for text in ("", "a.b", *(f"a.{middle}.c" for middle in middles)):
        assert jwt_expiry(text) is None
    for text in ("", "a\nb", "ü", "x" * 300_000):
        with pytest.raises(AuthenticationError) as caught:
            from_text(text)
        assert not text or text not in str(caught.value)


def test_functions_of_the_users() -> None:
    assert provided_tokens(f"{PROVIDERS}.fixed")().text == Secret("fixed-token")
    assert provided_tokens(f"{PROVIDERS}.with_end")() == Token(Secret("ending-token"), 2e9)
    for path, problem in {
        "nowhere": "not of the form module.function",
        "tests.security.nowhere.f": "cannot be imported",
        f"{PROVIDERS}.missing": "cannot be imported",
        f"{PROVIDERS}.NUMBER": "not a function",
    }.items():
        with pytest.raises(AuthenticationError, match=problem):
            provided_tokens(path)
    # What one raises or returns is not shown.
    with pytest.raises(TokenUnavailableError, match="raised RuntimeError") as caught:
        provided_tokens(f"{PROVIDERS}.failing")()
    assert "hunter2" not in str(caught.value)
    assert caught.value.__context__ is None
    with pytest.raises(AuthenticationError, match="neither a text"):
        provided_tokens(f"{PROVIDERS}.wrong")()


# -- the endpoint -----------------------------------------------------------------------------------


@pytest.fixture
def endpoint() -> Iterator[TokenServer]:
    with TokenServer() as server:
        server.gives(lambda: "opaque")
        yield server


def asking(url: str, **changes: Any) -> TokenEndpoint:
    given = {"client_id": "me", "client_secret": Secret.known(SECRET), "read_timeout_s": 2.0}
    return TokenEndpoint(TokenSettings(url=url, **{**given, **changes}))


def test_token_request_follows_rfc_6749(endpoint: TokenServer) -> None:
    found = asking(endpoint.url, scope="kafka read").fetch()
    assert found.text == Secret("opaque")
    assert found.expires_at_s is not None
    _, path, headers, body = endpoint.requests[0]
    assert path == "/oauth/token?a=b"
    assert body == b"grant_type=client_credentials&scope=kafka+read"
    assert headers["Authorization"] == "Basic " + base64.b64encode(f"me:{SECRET}".encode()).decode()
    asking(endpoint.url, urlencode=True).fetch()
    sent = base64.b64decode(endpoint.requests[1][2]["Authorization"].partition(" ")[2])
    assert sent == b"me:s3cr%3At%2F%2B+%C3%BC"
    endpoint.responds(200, b'{"id_token": "it"}')
    assert asking(endpoint.url).fetch().text == Secret("it")


NO_TOKEN = (AuthenticationError, "without an access_token")
RESPONSES: list[tuple[int, bytes, type[Exception], str]] = [
    (401, b'{"error": "no_client"}', AuthenticationError, "responded 401 .no_client.*client secret"),
    (400, b"<html>", AuthenticationError, "responded 400: check"),
    (503, b"", TokenUnavailableError, "responded 503"),
    (302, b"", TokenUnavailableError, "responded 302"),
    (200, b"{}", *NO_TOKEN),
    (200, b"[" * 100_000, *NO_TOKEN),
    (200, b'{"access_token": 5}', *NO_TOKEN),
    (200, b'{"access_token": ""}', AuthenticationError, "not a token"),
]


def test_each_response_of_the_endpoint(endpoint: TokenServer) -> None:
    endpoint.headers = {"Location": endpoint.url}
    for number, (status, body, kind, problem) in enumerate(RESPONSES, 1):
        endpoint.responds(status, body)
        with pytest.raises(kind, match=problem) as caught:
            asking(endpoint.url).fetch()
        assert SECRET not in str(caught.value)
        assert len(endpoint.requests) == number, "a redirection was followed"
    # A JWT's own end counts.
    issued = TokenIssuer().token(exp=123)
    endpoint.responds(200, json.dumps({"access_token": issued, "expires_in": 9}).encode())
    assert asking(endpoint.url).fetch().expires_at_s == 123.0
    # An absurd lifetime is none.
    for lifetime in ("NaN", "Infinity", "1" + "0" * 400, "-1" + "0" * 400):
        text = f'{{"access_token": "opaque", "expires_in": {lifetime}}}'
        endpoint.responds(200, text.encode())
        assert asking(endpoint.url).fetch().expires_at_s is None


@pytest.mark.parametrize("repeated", [SECRET, base64.b64encode(f"me:{SECRET}".encode()).decode()])
def test_an_endpoint_that_repeats_the_secret_does_not_show_it(endpoint: TokenServer, repeated: str) -> None:
    """Catches: the Authorization header's base64."""
    text = json.dumps({"error": "invalid_client", "error_description": f"no {repeated}\nERROR forged"})
    endpoint.responds(401, text.encode())
    with pytest.raises(AuthenticationError, match=r"invalid_client: no \[hidden\]") as caught:
        asking(endpoint.url).fetch()
    assert repeated not in str(caught.value)
    assert str(caught.value).isprintable()


def test_an_endpoint_or_a_file_that_is_not_there_may_come_back(tmp_path: Path) -> None:
    path = tmp_path / "tok en"
    path.write_text("one\n")
    tokens = token_source(TokenSettings(url=path.as_uri(), refresh_factor=0.5))
    assert tokens.get().text == Secret("one")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        slow = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        for url, problem in (
            ((tmp_path / "none").as_uri(), "cannot be read"),
            ("file:///dev/null", "not a file"),
            ("http://127.0.0.1:1/x", r"127\.0\.0\.1:1/x cannot be reached: .*refused"),
            (slow, r"kafka\.sasl\.login\.read\.timeout\.ms sets this"),
        ):
            with pytest.raises(TokenUnavailableError, match=problem):
                token_source(TokenSettings(url=url, retry_backoff_s=0.0, read_timeout_s=0.1)).get()


# -- JWT assertions -----------------------------------------------------------------------------------


PASSPHRASE = "hunter2"
CLASSES = "org.apache.kafka.common.security.oauthbearer."
NOW = 1_700_000_000.0
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


@pytest.mark.parametrize("algorithm", ["RS256", "ES256"])
@pytest.mark.parametrize("passphrase", ["", PASSPHRASE])
def test_another_library_accepts_the_signature(tmp_path: Path, algorithm: str, passphrase: str) -> None:
    key = RSA if algorithm == "RS256" else CURVES["P-256"]
    more = {"private_key_passphrase": passphrase} if passphrase else {}
    path = key_file(tmp_path, key, passphrase)
    text = made(claim_iss="me", private_key_file=path, algorithm=algorithm.lower(), **more)
    assert "=" not in text
    assert jwt.decode(text, public(key), algorithms=[algorithm]).header == {"alg": algorithm, "typ": "JWT"}
    head, body, signature = text.split(".")
    with pytest.raises(BadSignatureError):
        jwt.decode(f"{head}.{body[:-2]}AA.{signature}", public(key), algorithms=[algorithm])


def test_claims_come_from_options_then_the_template_then_the_clock(tmp_path: Path) -> None:
    template = tmp_path / "template.json"
    payload = {"sub": "it", "team": "e", "iat": 1}
    template.write_text(json.dumps({"header": {"kid": "k1", "alg": "none"}, "payload": payload}))
    url = "https://issuer/token"
    claims = {"iss": "me", "sub": "me", "aud": url, "exp_seconds": "30", "nbf_seconds": "5"}
    claims["jti_include"] = "true"
    files = {"private_key_file": key_file(tmp_path), "template_file": str(template)}
    text = made(**{f"claim_{name}": value for name, value in claims.items()}, **files)
    found = jwt.decode(text, public())
    assert found.header == {"kid": "k1", "alg": "RS256", "typ": "JWT"}
    assert len(found.claims.pop("jti")) == 36
    times = {"iat": NOW, "exp": NOW + 30, "nbf": NOW - 5}
    assert found.claims == {"iss": "me", "sub": "it", "aud": url, "team": "e", **times}


def test_files_are_read_anew_for_each_assertion(tmp_path: Path) -> None:
    path = tmp_path / "assertion"
    for text in ("a.b.c", "d.e.f"):
        path.write_text(f"{text}\n")
        # Java ignores the others, too.
        assert made(file=str(path), claim_iss="me", private_key_file="/nowhere") == text
    given = {"claim_iss": "me", "private_key_file": key_file(tmp_path, CURVES["P-256"]), "algorithm": "ES256"}
    first = made(**given)
    key_file(tmp_path, renewed := ec.generate_private_key(ec.SECP256R1()))
    jwt.decode(made(**given), public(renewed))
    with pytest.raises(BadSignatureError):
        jwt.decode(first, public(renewed))


# -- what the endpoint is sent ------------------------------------------------------------------------


def sent(endpoint: TokenServer) -> dict[str, Any]:
    """The form of the last request, which has no login of its own."""
    *_, headers, body = endpoint.requests[-1]
    assert "Authorization" not in headers
    return {name: only for name, (only,) in parse_qs(body.decode()).items()}


def test_no_frame_of_an_error_shows_an_assertion(tmp_path: Path) -> None:
    given = tokens("https://127.0.0.1:1", claim_iss="me", private_key_file=key_file(tmp_path))
    missing = TlsSettings(Store("trust", "PEM", str(tmp_path / "none")))
    with pytest.raises(ConfigurationError, match="cannot be read") as caught:
        TokenEndpoint(replace(given, tls=missing)).fetch()
    shown = [repr(frame.f_locals) for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    assert not [local for local in shown if "assertion=ey" in local]


def test_client_credentials_are_proved_by_an_assertion(endpoint: TokenServer, tmp_path: Path) -> None:
    for flow in ("", "DefaultJwtRetriever", "ClientCredentialsJwtRetriever"):
        given = tokens(endpoint.url, flow, claim_iss="me", private_key_file=key_file(tmp_path))
        assert TokenEndpoint(given).fetch().text == Secret("opaque")
        form = sent(endpoint)
        assertion = form.pop("client_assertion")
        assert jwt.decode(assertion, public()).claims["iss"] == "me"
        assert form == {
            "grant_type": "client_credentials",
            "client_assertion_type": "urn:ietf:params:oauth:client-assertion-type:jwt-bearer",
        }


def test_an_assertion_is_the_grant_itself_and_is_not_shown(endpoint: TokenServer, tmp_path: Path) -> None:
    path = tmp_path / "assertion"
    path.write_text("hun.ter.two")
    TokenEndpoint(tokens(endpoint.url, "JwtBearerJwtRetriever", file=str(path))).fetch()
    grant = "urn:ietf:params:oauth:grant-type:jwt-bearer"
    assert sent(endpoint) == {"grant_type": grant, "assertion": "hun.ter.two"}
    endpoint.responds(400, b'{"error": "invalid_client", "error_description": "hun.ter.two"}')
    with pytest.raises(AuthenticationError, match=r"invalid_client: \[hidden\].*assertion .key") as caught:
        TokenEndpoint(tokens(endpoint.url, file=str(path))).fetch()
    assert "hun.ter" not in str(caught.value)


# -- mistakes, before any connection ------------------------------------------------------------------


def refused(**assertion: str) -> str:
    """What planning says."""
    with pytest.raises(ConfigurationError) as caught:
        assertion_of(tokens(**assertion).assertion or AssertionSettings(), NOW)
    assert PASSPHRASE not in str(caught.value)
    return str(caught.value)


def test_keys_and_files_of_no_use(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    path.write_text("no key")
    given = {"claim_iss": "me", "private_key_file": str(path), "algorithm": "ES256"}
    assert f"{path} holds no private key in PEM" in refused(**given)
    for key in (RSA, CURVES["P-384"], ec.generate_private_key(ec.SECP256K1())):
        key_file(tmp_path, key)
        said = refused(**given)
        assert "algorithm=ES256 needs a key of the curve P-256" in said
        assert str(path) in said
    name = "kafka.sasl.oauthbearer.assertion.private.key.passphrase"
    given = {"claim_iss": "me", "private_key_file": key_file(tmp_path, RSA, PASSPHRASE)}
    assert f"is encrypted; set {name}" in refused(**given)
    assert f"wrong {name}" in refused(**given, private_key_passphrase="other")
    path = tmp_path / "file"
    path.write_text("no.jwt")
    assert f"assertion.file' = {path} contains no JWT" in refused(file=str(path))
    assert "cannot be read: No such file" in refused(file=str(tmp_path / "none"))
    assert "assertion.file' = /a b cannot be read: its name contains a null" in refused(file="/a\0b")
    for text in ("", "[]", '{"payload": 1}', '{"head": {}}', '{"payload": {"n": NaN}}', "[" * 100_000):
        path.write_text(text)
        said = refused(claim_iss="me", private_key_file=key_file(tmp_path), template_file=str(path))
        assert "template.file' =" in said
        assert "is not of the form" in said
    # Planning makes one before it connects.
    login = SaslSettings("OAUTHBEARER", tokens=tokens(file="/no"))
    with pytest.raises(ConfigurationError, match="/no cannot be read"):
        Security(SecuritySettings("SASL_PLAINTEXT", None, login)).check()


NEEDS_KEY = "needs kafka.sasl.oauthbearer.assertion.private.key.file"
NO_ASSERTION = "has no effect without kafka.sasl.oauthbearer.assertion"


@pytest.mark.parametrize(
    ("url", "flow", "assertion", "problem"),
    [
        ("https://h/", "JwtBearerJwtRetriever", {}, NEEDS_KEY),
        ("https://h/", "", {"claim_iss": "me"}, NEEDS_KEY),
        ("https://h/", "", {"private_key_file": "/k"}, NO_ASSERTION),
        ("file:///t", "", {"file": "/a"}, "assertion.file' has no effect with these tokens"),
        ("file:///t", "JwtBearerJwtRetriever", {"file": "/a"}, "begins with https:// or http://"),
        ("https://h/", "FileJwtRetriever", {}, "begins with file://"),
        ("https://h/", "MyRetriever", {}, "Java classes cannot run"),
        ("https://h/", "", {"claim_exp_seconds": "86401"}, "claim.exp.seconds' is out of bounds"),
        ("https://h/", "", {"algorithm": "HS256"}, "is not one of RS256, ES256"),
    ],
)
def test_options_that_do_not_fit(url: str, flow: str, assertion: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        tokens(url, flow, **assertion)
    assert problem in str(caught.value)
