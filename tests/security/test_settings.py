"""From options to settings: contradictions are refused with what to set instead; secrets stay hidden."""

from __future__ import annotations

import dataclasses
import pickle
import traceback
from collections.abc import Mapping
from typing import Any

import pytest

from kafka_sink.breaker.failure_rate import FailureRateCircuitBreaker
from kafka_sink.breaker.interface import load_breaker
from kafka_sink.errors import ConfigurationError
from kafka_sink.options import ParsedOptions, parse
from kafka_sink.options.table import SPECS
from kafka_sink.secret import HIDDEN, Secret
from kafka_sink.security.settings import (
    IamSettings,
    KerberosSettings,
    SaslSettings,
    SecuritySettings,
    Store,
    TlsSettings,
    TokenSettings,
)
from tests.support.security.secured_broker import plain_jaas

SECRET = "hunter2"
SCRAM = plain_jaas(password=SECRET, module="scram.ScramLoginModule")
OAUTH = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required"
KERBEROS = "com.sun.security.auth.module.Krb5LoginModule required"
IAM = "software.amazon.msk.auth.iam.IAMLoginModule required"
TOKENS = {"sasl.mechanism": "OAUTHBEARER", "sasl.oauthbearer.token.endpoint.url": "https://issuer/token"}
PLAIN = {"sasl.mechanism": "PLAIN"}
PASSWORD = {**PLAIN, "sasl.username": "u", "sasl.password": SECRET}
SCRAM_256 = {"sasl.mechanism": "SCRAM-SHA-256", "sasl.jaas.config": SCRAM}
URL_WITH_LOGIN = {"sasl.oauthbearer.token.endpoint.url": f"https://u:{SECRET}@h/"}
EXTENSION = {"sasl.jaas.config": f"{OAUTH} clientId='c' clientSecret='{SECRET}' extension_auth='x';"}
NO_KEYTAB = {"sasl.jaas.config": f"{KERBEROS} useKeyTab=true serviceName=kafka;"}
ROLE_BY_KEY = {"sasl.jaas.config": f"{IAM} awsRoleSecretAccessKey={SECRET};"}
CERTIFICATE_AS_PATH = {
    "sasl.jaas.config": f"{OAUTH} clientId=a clientSecret=b ssl.truststore.type=PEM "
    f'ssl.truststore.location="-----BEGIN PRIVATE KEY-----{SECRET}";'
}


def parsed(protocol: str, raw: dict[str, str]) -> ParsedOptions:
    ours = "sasl.oauthbearer.token.provider"
    given = {name if name == ours else f"kafka.{name}": text for name, text in raw.items()}
    return parse({"kafka.bootstrap.servers": "h:1", "kafka.security.protocol": protocol, **given})


def settings(protocol: str, raw: dict[str, str]) -> SecuritySettings:
    return SecuritySettings.from_options(parsed(protocol, raw).options)


def sasl(raw: dict[str, str]) -> SaslSettings:
    found = settings("SASL_SSL", raw).sasl
    assert found is not None
    return found


def tokens(raw: dict[str, str]) -> TokenSettings:
    found = sasl(raw).tokens
    assert found is not None
    return found


def test_protocols_are_taken_in_any_case() -> None:
    for protocol in ("ssl", "SSL", "Ssl"):
        assert settings(protocol, {}) == SecuritySettings("SSL", TlsSettings())
    assert TlsSettings().check_host


def test_names_of_librdkafka_mean_the_same() -> None:
    found = settings(
        "SASL_SSL",
        {
            "ssl.ca.location": "/ca.pem",
            "ssl.key.location": "/k.pem",
            "ssl.certificate.location": "/c.pem",
            "ssl.key.password": SECRET,
            "ssl.endpoint.identification.algorithm": "none",
            "enable.ssl.certificate.verification": "true",
            "ssl.protocol": "TLSv1.2",
            "sasl.mechanisms": "PLAIN",
            "sasl.username": "u",
            "sasl.password": SECRET,
        },
    )
    chain = Store("kafka.ssl.certificate.location", "PEM", "/c.pem")
    key = Store("kafka.ssl.key.location", "PEM", "/k.pem", chain=chain, key_password=Secret(SECRET))
    tls = TlsSettings(Store("kafka.ssl.ca.location", "PEM", "/ca.pem"), key, check_host=False)
    assert found == SecuritySettings("SASL_SSL", tls, SaslSettings("PLAIN", "u", Secret(SECRET)))


def test_stores_are_opened_with_their_own_passwords() -> None:
    names = ("ssl.truststore", "ssl.keystore")
    given = {f"{name}.location": f"/{name}" for name in names}
    given |= {f"{name}.password": f"of {name}" for name in names}
    trust, key = (
        Store(f"kafka.{name}.location", "JKS", f"/{name}", password=Secret(f"of {name}")) for name in names
    )
    key = dataclasses.replace(key, key_password=Secret(SECRET))
    found = settings("SSL", {**given, "ssl.key.password": SECRET})
    assert found == SecuritySettings("SSL", TlsSettings(trust, key))


def test_kerberos_by_jaas() -> None:
    for more, keytab in (("", ""), (" useKeyTab=true", "/k"), (" useKeyTab=false", "")):
        jaas = f'{KERBEROS} keyTab="/k" principal="p" serviceName="kafka"{more};'
        assert sasl({"sasl.jaas.config": jaas}).kerberos == KerberosSettings("kafka", "p", keytab)


def test_tokens_and_iam_by_options_and_by_jaas() -> None:
    jaas = f"{OAUTH} clientId='me' clientSecret='{SECRET}' scope='s' extension_logicalCluster='lkc-1';"
    found = tokens({**TOKENS, "sasl.jaas.config": jaas})
    assert (found.client_id, found.client_secret, found.scope) == ("me", Secret(SECRET), "s")
    assert found.extensions == (("logicalCluster", "lkc-1"),)
    # A truststore whose name is empty does not become the system's.
    nameless = jaas.replace("scope='s'", "ssl.truststore.location=''")
    assert tokens({**TOKENS, "sasl.jaas.config": nameless}).tls.trust is not None
    prefix = "sasl.oauthbearer.client.credentials.client"
    assert tokens({**TOKENS, f"{prefix}.id": "other", f"{prefix}.secret": SECRET}).client_id == "other"
    handler = {"sasl.client.callback.handler.class": "software.amazon.msk.auth.iam.IAMClientCallbackHandler"}
    mechanism = {"sasl.mechanism": "AWS_MSK_IAM"}
    shaded = {name: f"kafkashaded.{given}" for name, given in handler.items()}
    for callback in (handler, shaded):
        assert sasl({**mechanism, "sasl.jaas.config": f"{IAM};", **callback}) == sasl(mechanism)
    role = f'{IAM} awsRoleArn="arn:aws:iam::1:role/r" awsStsRegion="eu-west-1" awsProfileName="p"'
    role += ' awsRoleSessionName="s" awsRoleExternalId="e";'
    iam = IamSettings("p", "arn:aws:iam::1:role/r", "s", "e", "eu-west-1")
    assert sasl({**mechanism, "sasl.jaas.config": role}).iam == iam


@pytest.mark.parametrize(
    ("protocol", "raw", "problem"),
    [
        ("TLS", {}, "security.protocol' is not one of"),
        ("PLAINTEXT", {"ssl.truststore.location": "/x"}, "set kafka.security.protocol=SSL, or remove"),
        ("PLAINTEXT", {"sasl.jaas.config": SCRAM}, "set kafka.security.protocol=SASL_SSL, or remove"),
        ("SSL", {"sasl.mechanism": "PLAIN"}, "set kafka.security.protocol=SASL_SSL"),
        ("SASL_PLAINTEXT", {"ssl.ca.location": "/x"}, "set kafka.security.protocol=SASL_SSL"),
        ("SSL", {"enable.ssl.certificate.verification": "false"}, "cannot be false"),
        ("SSL", {"ssl.endpoint.identification.algorithm": "off"}, "is not one of https"),
        ("SSL", {"ssl.enabled.protocols": "TLSv1.2,TLSv1.1"}, "supported are TLSv1.2 and TLSv1.3"),
        ("SSL", {"ssl.truststore.type": "BCFKS"}, "is not one of JKS, PKCS12, PEM"),
        ("SSL", {"ssl.truststore.password": SECRET}, "no truststore is"),
        ("SSL", {"ssl.ca.location": "/x", "ssl.truststore.location": "/y"}, "set only one"),
        ("SSL", {"ssl.keystore.key": SECRET}, "without its certificate"),
        ("SSL", {"ssl.keystore.certificate.chain": "x"}, "without its private key"),
        ("SSL", {"ssl.keystore.location": "/k", "ssl.certificate.location": "/c"}, "which contains both"),
        ("SSL", {"ssl.engine.factory.class": "x.Y"}, "selects a Java class"),
        ("SASL_SSL", {}, "needs kafka.sasl.kerberos.service.name"),
        ("SASL_SSL", NO_KEYTAB, "useKeyTab=true without keyTab"),
        ("SASL_SSL", {"sasl.mechanism": "DIGEST-MD5"}, "is not one of GSSAPI"),
        ("SASL_SSL", PLAIN, "needs a username and a password"),
        ("SASL_SSL", {**PLAIN, "sasl.username": "u"}, "needs a username and a password"),
        ("SASL_SSL", {**PLAIN, "sasl.jaas.config": SCRAM}, "set kafka.sasl.mechanism=SCRAM"),
        ("SASL_SSL", {"sasl.jaas.config": SCRAM}, "by default: set kafka.sasl.mechanism=SCRAM-SHA-256 or"),
        ("SASL_SSL", {**SCRAM_256, "sasl.username": "u"}, "not both"),
        ("SASL_SSL", {**PLAIN, "sasl.jaas.config": "my.Module required;"}, "supported are Plain"),
        ("SASL_SSL", {**SCRAM_256, "sasl.jaas.config": SCRAM[:-1] + " tokenauth=true;"}, "delegation tokens"),
        ("SASL_SSL", {"sasl.mechanism": "OAUTHBEARER"}, "needs kafka.sasl.oauthbearer.token.endpoint.url"),
        ("SASL_SSL", TOKENS, "needs a client id and a secret"),
        ("SASL_SSL", TOKENS | URL_WITH_LOGIN, "login belongs in an option of its own"),
        ("SASL_SSL", {**TOKENS, "sasl.oauthbearer.token.provider": "a.b"}, "set only one"),
        ("SASL_SSL", {**TOKENS, "sasl.login.callback.handler.class": "my.Handler"}, "selects a Java class"),
        ("SASL_SSL", TOKENS | EXTENSION, "not a valid SASL extension"),
        ("SASL_SSL", TOKENS | CERTIFICATE_AS_PATH, "ssl.truststore.location contains a certificate"),
        ("SASL_SSL", {"sasl.mechanism": "AWS_MSK_IAM"} | ROLE_BY_KEY, "SecretAccessKey is not supported"),
        ("SASL_PLAINTEXT", {"sasl.mechanism": "AWS_MSK_IAM"}, "needs kafka.security.protocol=SASL_SSL"),
    ],
)
def test_contradictory_settings_are_refused_with_a_remedy(
    protocol: str, raw: dict[str, str], problem: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        settings(protocol, raw)
    assert problem in str(caught.value), caught.value
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_protocol_in_front_of_an_address_must_be_the_one_that_is_spoken() -> None:
    for servers in ("SSL://h:1", "h:1,SASL_SSL://i:2"):
        with pytest.raises(ConfigurationError, match=r"but kafka\.security\.protocol is PLAINTEXT"):
            parse({"kafka.bootstrap.servers": servers})
    given = {"kafka.bootstrap.servers": "SSL://h:1", "kafka.security.protocol": "SSL"}
    assert parse(given).options.bootstrap_servers == (("h", 1),)


def test_event_hubs_gets_what_it_takes_unless_told_otherwise() -> None:
    hubs = {"kafka.bootstrap.servers": "ns.servicebus.windows.net:9093"}
    parsed = parse(hubs)
    options = parsed.options
    assert options.max_request_size < 1_046_528
    assert 0 < options.connections_max_idle_ms < 240_000
    assert options.metadata_max_age_ms < 240_000
    (warning,) = parsed.warnings
    assert "kafka.max.request.size=1000000" in warning
    own = parse({**hubs, "kafka.connections.max.idle.ms": "-1"})
    assert own.options.connections_max_idle_ms == -1
    assert any("kafka.connections.max.idle.ms=-1 exceeds" in text for text in own.warnings)


def test_weak_settings_are_warned_of() -> None:
    for protocol, more, said in (
        ("SSL", {"ssl.endpoint.identification.algorithm": ""}, "can impersonate a broker"),
        ("SASL_PLAINTEXT", PASSWORD, "password or token unencrypted"),
    ):
        assert said in " ".join(parsed(protocol, more).warnings)


# -- secrets ----------------------------------------------------------------------------------------


# Logins at a registry, of which a write may have one.
# The secret of each login at the registry, and the option that it needs.
REGISTRY_LOGINS = {
    "schema.registry.basic.auth.user.info": {},
    "schema.registry.bearer.auth.token": {},
    "schema.registry.bearer.auth.client.secret": {
        "schema.registry.bearer.auth.issuer.endpoint.url": "https://issuer"
    },
}


def secret_options(login: str) -> dict[str, str]:
    """All options that are secrets, but for other logins at the registry."""
    wanted = {
        "kafka.bootstrap.servers": "h:1",
        "kafka.security.protocol": "SASL_SSL",
        "topic": "t",
        "value.format": "avro",
        "schema.registry.url": "https://registry",
        "schema.registry.ssl.certificate.location": "/c.pem",
        **REGISTRY_LOGINS[login],
    }
    names = [spec.name for spec in SPECS if spec.secret and spec.name not in REGISTRY_LOGINS.keys() - {login}]
    return wanted | {name: f"{SECRET}:{index}" for index, name in enumerate(names)}


@pytest.mark.parametrize("login", sorted(REGISTRY_LOGINS))
def test_no_secret_shows_in_options_settings_or_what_holds_them(login: str) -> None:
    options = parse(secret_options(login)).options
    full = settings("SASL_SSL", PASSWORD)
    scram = settings("SASL_SSL", {"sasl.mechanism": "SCRAM-SHA-512", "sasl.jaas.config": SCRAM})
    for holder in (options, options.redacted(), vars(options), options.sasl_password, full, full.sasl, scram):
        assert SECRET not in f"{holder} {holder!r}"
    assert pickle.loads(pickle.dumps(options)) == options
    assert options.identity_of_cluster()["kafka.sasl.password"].startswith(SECRET)


def our_locals(error: BaseException) -> list[dict[str, Any]]:
    """Of the frames that an error has passed in the package: error trackers collect them."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [one.f_locals for one in frames if "/kafka_sink/" in one.f_code.co_filename]


def test_a_breaker_class_that_fails_leaves_no_credential_in_our_frames() -> None:
    raw = {"kafka.bootstrap.servers": "h:1", "kafka.producer.circuit.breaker.token": SECRET}
    raw["kafka.producer.circuit.breaker.class"] = f"{__name__}.Failing"
    with pytest.raises(ConfigurationError) as caught:
        load_breaker(parse(raw).options)
    seen = our_locals(caught.value)
    assert any("given" in one for one in seen)
    assert not any(SECRET in repr(one) for one in seen)


class Failing(FailureRateCircuitBreaker):
    def configure(self, configs: Mapping[str, str]) -> None:
        raise RuntimeError("a bug")


def test_secrets_show_as_hidden_and_compare() -> None:
    one = Secret(SECRET)
    assert {repr(one), str(one), f"{one}", f"{one!r:>3}"} == {HIDDEN}
    assert one == Secret(SECRET)
    assert one not in (Secret("other"), SECRET)
    assert len({one, Secret(SECRET)}) == 1
    assert pickle.loads(pickle.dumps(one)).reveal() == SECRET


def test_no_frame_of_a_refusal_holds_a_secret() -> None:
    for more in (
        {**PLAIN, "sasl.jaas.config": f'PlainLoginModule required password="{SECRET}"'},
        {**PLAIN, "sasl.jaas.config": SCRAM},
        {"sasl.password": SECRET, "linger.ms": "x"},
        {"sasl.password": f"two\n{SECRET}"},
        URL_WITH_LOGIN,
        {"bootstrap.servers": f"u:{SECRET}@h:1"},
        {"producer.circuit.breaker.mute.retry.interval": f"u:{SECRET}@h"},
        {"sasl.password": SECRET, "acks": "0", "enable.idempotence": "true"},
        {"ssl.keystore.key": SECRET, "nonsense": "1"},
    ):
        with pytest.raises(ConfigurationError) as caught:
            settings("SASL_SSL", more)
        assert not any(SECRET in repr(local) for local in our_locals(caught.value))
