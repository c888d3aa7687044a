"""Combines the security options into settings and checks that they agree. It reads no files."""

from __future__ import annotations

from dataclasses import dataclass, field

from kafka_sink.errors import ConfigurationError
from kafka_sink.options import SinkOptions
from kafka_sink.options.unsupported import SHADED
from kafka_sink.options.values import looks_like_key
from kafka_sink.secret import Secret
from kafka_sink.security.jaas import JAAS, LoginModule, parse_jaas

_KAFKA_MODULES = "org.apache.kafka.common.security"
# The mechanisms of each login module.
_MECHANISMS_OF = {
    f"{_KAFKA_MODULES}.plain.PlainLoginModule": ("PLAIN",),
    f"{_KAFKA_MODULES}.scram.ScramLoginModule": ("SCRAM-SHA-256", "SCRAM-SHA-512"),
    f"{_KAFKA_MODULES}.oauthbearer.OAuthBearerLoginModule": ("OAUTHBEARER",),
    "software.amazon.msk.auth.iam.IAMLoginModule": ("AWS_MSK_IAM",),
    "com.sun.security.auth.module.Krb5LoginModule": ("GSSAPI",),
}
# The schemes that the token endpoint's URL may have for each of Java's classes that fetch tokens.
_RETRIEVERS = {
    "DefaultJwtRetriever": ("", "https", "http", "file"),
    "ClientCredentialsJwtRetriever": ("https", "http"),
    "JwtBearerJwtRetriever": ("https", "http"),
    "FileJwtRetriever": ("file",),
}
_ASSERTION = "kafka.sasl.oauthbearer.assertion"
_PROTOCOLS = ("TLSv1.2", "TLSv1.3")


@dataclass(frozen=True)
class Store:
    """A file or PEM text with certificates or a key. Messages refer to it by its ``option``."""

    option: str
    kind: str
    location: str = ""
    text: Secret | None = None
    password: Secret | None = None
    # The file or text with the certificate chain, if it is separate from the key.
    chain: Store | None = None
    key_password: Secret | None = None
    key_password_option: str = "kafka.ssl.key.password"  # noqa: S105 - a name


@dataclass(frozen=True)
class TlsSettings:
    """If ``trust`` is None, the system's authorities are trusted. If ``cipher_suites`` is empty, OpenSSL
    chooses."""

    trust: Store | None = None
    key: Store | None = None
    check_host: bool = True
    protocols: tuple[str, ...] = _PROTOCOLS
    cipher_suites: tuple[str, ...] = ()


@dataclass(frozen=True)
class AssertionSettings:
    """A JWT that is used instead of a secret. It is read from ``file``, or made of ``claims`` and
    ``template`` and signed with ``key``.

    With ``is_grant`` the JWT is the grant itself (jwt-bearer, KIP-1139). Otherwise it authenticates the
    client (KIP-1258).
    """

    is_grant: bool = False
    file: Store | None = None
    key: Store | None = None
    template: Store | None = None
    algorithm: str = "RS256"
    claims: tuple[tuple[str, str], ...] = ()
    exp_s: int = 300
    nbf_s: int = 60
    jti: bool = False


@dataclass(frozen=True)
class TokenSettings:
    """The source of OAUTHBEARER's tokens: ``provider``, which is a dotted path, or ``url``. Times are in
    seconds. ``assertion`` replaces ``client_secret``."""

    provider: str = ""
    url: str = ""
    client_id: str = ""
    client_secret: Secret | None = None
    scope: str = ""
    urlencode: bool = False
    extensions: tuple[tuple[str, str], ...] = ()
    tls: TlsSettings = field(default_factory=TlsSettings)
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 10.0
    retry_backoff_s: float = 0.1
    retry_backoff_max_s: float = 10.0
    refresh_factor: float = 0.8
    refresh_jitter: float = 0.05
    refresh_min_s: float = 60.0
    refresh_buffer_s: float = 300.0
    assertion: AssertionSettings | None = None


@dataclass(frozen=True)
class IamSettings:
    """Options of Amazon's login module. If they are empty, AWS's usual chain of credentials decides."""

    profile: str = ""
    role_arn: str = ""
    role_session_name: str = ""
    role_external_id: str = ""
    sts_region: str = ""


@dataclass(frozen=True)
class KerberosSettings:
    """If ``keytab`` is empty, the ticket cache of the worker's user is used."""

    service_name: str
    principal: str = ""
    keytab: str = ""


@dataclass(frozen=True)
class SaslSettings:
    mechanism: str
    username: str = ""
    password: Secret | None = None
    tokens: TokenSettings | None = None
    iam: IamSettings | None = None
    kerberos: KerberosSettings | None = None


@dataclass(frozen=True)
class SecuritySettings:
    """Connections are not encrypted if ``tls`` is None, and do not log in if ``sasl`` is None. Settings are
    hashable, and their secrets hide themselves."""

    protocol: str = "PLAINTEXT"
    tls: TlsSettings | None = None
    sasl: SaslSettings | None = None

    @property
    def principal(self) -> str:
        """The name of this login in ACLs, or "" if brokers do not derive it from a user name."""
        if self.sasl is not None:
            return f"User:{self.sasl.username}" if self.sasl.username else ""
        return "" if self.tls is not None and self.tls.key is not None else "User:ANONYMOUS"

    @classmethod
    def from_options(cls, options: SinkOptions) -> SecuritySettings:
        """Raise ConfigurationError if options contradict each other or have values that cannot be used."""
        protocol = options.security_protocol
        return cls(
            protocol,
            _tls(options) if protocol.endswith("SSL") else None,
            _sasl(options) if protocol.startswith("SASL") else None,
        )


def _tls(options: SinkOptions) -> TlsSettings:
    enabled = options.ssl_enabled_protocols or _PROTOCOLS
    supported = {version.lower(): version for version in _PROTOCOLS}
    for version in enabled:
        if version.lower() not in supported:
            raise ConfigurationError(
                f"Option 'kafka.ssl.enabled.protocols' has {version!r}; supported are TLSv1.2 and TLSv1.3"
            )
    return TlsSettings(
        _trust(options),
        _key(options),
        options.ssl_endpoint_identification_algorithm == "https",
        tuple(sorted({supported[version.lower()] for version in enabled})),
        options.ssl_cipher_suites,
    )


def _only_one(options: SinkOptions, *attributes: str) -> str | None:
    """Return the name of the option that is set, or None. Raises ConfigurationError if several are set."""
    names = [f"kafka.{name.replace('_', '.')}" for name in attributes if getattr(options, name)]
    if len(names) > 1:
        raise ConfigurationError(f"Options {' and '.join(names)} exclude each other: set only one of them")
    return names[0] if names else None


def _trust(options: SinkOptions) -> Store | None:
    name = _only_one(options, "ssl_truststore_location", "ssl_truststore_certificates", "ssl_ca_location")
    if name is None:
        _no_password(options.ssl_truststore_password, "truststore")
        return None
    return Store(
        name,
        options.ssl_truststore_type if options.ssl_truststore_location else "PEM",
        options.ssl_truststore_location or options.ssl_ca_location,
        options.ssl_truststore_certificates,
        options.ssl_truststore_password,
    )


def _key(options: SinkOptions) -> Store | None:
    name = _only_one(options, "ssl_keystore_location", "ssl_keystore_key", "ssl_key_location")
    chain_name = _only_one(options, "ssl_keystore_certificate_chain", "ssl_certificate_location")
    if name is None:
        _no_password(options.ssl_keystore_password, "keystore")
        _no_password(options.ssl_key_password, "key")
        if chain_name is not None:
            raise ConfigurationError(
                f"Option '{chain_name}' has a certificate without its private key: set kafka.ssl.keystore.key"
            )
        return None
    holds_both = bool(options.ssl_keystore_location)
    if holds_both and chain_name is not None:
        raise ConfigurationError(f"Option '{chain_name}' has no effect with {name}, which contains both")
    if not holds_both and chain_name is None:
        raise ConfigurationError(
            f"Option '{name}' has a private key without its certificate: set "
            "kafka.ssl.keystore.certificate.chain"
        )
    chain_text = options.ssl_keystore_certificate_chain
    return Store(
        name,
        options.ssl_keystore_type if holds_both else "PEM",
        options.ssl_keystore_location or options.ssl_key_location,
        options.ssl_keystore_key,
        options.ssl_keystore_password,
        None
        if chain_name is None
        else Store(chain_name, "PEM", options.ssl_certificate_location, chain_text),
        options.ssl_key_password,
    )


def _no_password(password: Secret | None, what: str) -> None:
    if password is not None:
        raise ConfigurationError(f"Option 'kafka.ssl.{what}.password' is set, but no {what} is")


def _sasl(options: SinkOptions) -> SaslSettings:
    mechanism = options.sasl_mechanism
    # If there is no login module, only the options count.
    login = LoginModule("", {})
    if options.sasl_jaas_config is not None:
        login = parse_jaas(options.sasl_jaas_config)
        _check_module(login, mechanism)
    if mechanism == "OAUTHBEARER":
        return SaslSettings(mechanism, tokens=_tokens(options, login))
    if mechanism == "AWS_MSK_IAM":
        if options.security_protocol != "SASL_SSL":
            raise ConfigurationError("AWS_MSK_IAM needs kafka.security.protocol=SASL_SSL")
        return SaslSettings(mechanism, iam=_iam(login))
    if mechanism == "GSSAPI":
        return SaslSettings(mechanism, kerberos=_kerberos(options, login))
    return _password_login(options, login)


def _check_module(module: LoginModule, mechanism: str) -> None:
    mechanisms = _MECHANISMS_OF.get(module.name)
    if mechanisms is None:
        known = ", ".join(name.rpartition(".")[2] for name in _MECHANISMS_OF)
        raise ConfigurationError(f"{JAAS} has the login module {module.name}; supported are {known}")
    if mechanism not in mechanisms:
        raise ConfigurationError(
            f"{JAAS} has {module.name.rpartition('.')[2]}, but kafka.sasl.mechanism is {mechanism}"
            f"{' by default' if mechanism == 'GSSAPI' else ''}: set kafka.sasl.mechanism="
            + " or ".join(mechanisms)
        )


def _password_login(options: SinkOptions, login: LoginModule) -> SaslSettings:
    mechanism, username, password = options.sasl_mechanism, options.sasl_username, options.sasl_password
    missing = "set kafka.sasl.jaas.config, or kafka.sasl.username and kafka.sasl.password"
    if login.name:
        if username or password is not None:
            raise ConfigurationError(
                "set either kafka.sasl.jaas.config, or kafka.sasl.username and kafka.sasl.password, not both"
            )
        if login.get("tokenauth").lower() == "true":
            raise ConfigurationError(f"{JAAS}: tokenauth (delegation tokens) is not supported")
        username, password = login.get("username"), _secret(login, "password")
        missing = f"{JAAS} lacks username or password"
    if not username or password is None:
        raise ConfigurationError(
            f"kafka.sasl.mechanism={mechanism} needs a username and a password: {missing}"
        )
    return SaslSettings(mechanism, username, password)


def _tokens(options: SinkOptions, login: LoginModule) -> TokenSettings:
    provider, url = options.sasl_oauthbearer_token_provider, options.sasl_oauthbearer_token_endpoint_url
    if provider and url:
        raise ConfigurationError(
            "set only one of sasl.oauthbearer.token.provider and kafka.sasl.oauthbearer.token.endpoint.url"
        )
    if not provider and not url:
        raise ConfigurationError(
            "kafka.sasl.mechanism=OAUTHBEARER needs kafka.sasl.oauthbearer.token.endpoint.url, or "
            "sasl.oauthbearer.token.provider: unsecured tokens, Java's default, are not supported"
        )
    client_id = options.sasl_oauthbearer_client_credentials_client_id or login.get("clientId")
    client_secret = options.sasl_oauthbearer_client_credentials_client_secret
    client_secret = client_secret or _secret(login, "clientSecret")
    scheme = url.partition("://")[0].lower()
    assertion = _assertion(options, _retriever(options, scheme))
    if scheme in ("https", "http") and assertion is None and (not client_id or client_secret is None):
        raise ConfigurationError(
            "kafka.sasl.mechanism=OAUTHBEARER needs a client id and a secret: set "
            "kafka.sasl.oauthbearer.client.credentials.client.id and .client.secret, or clientId and "
            "clientSecret in kafka.sasl.jaas.config; or an assertion in their place: "
            f"{_ASSERTION}.claim.iss and .private.key.file, or {_ASSERTION}.file"
        )
    return TokenSettings(
        provider,
        url,
        client_id,
        client_secret,
        options.sasl_oauthbearer_scope or login.get("scope"),
        options.sasl_oauthbearer_header_urlencode,
        _extensions(login),
        _endpoint_tls(login),
        options.sasl_login_connect_timeout_ms / 1000,
        options.sasl_login_read_timeout_ms / 1000,
        options.sasl_login_retry_backoff_ms / 1000,
        options.sasl_login_retry_backoff_max_ms / 1000,
        options.sasl_login_refresh_window_factor,
        options.sasl_login_refresh_window_jitter,
        options.sasl_login_refresh_min_period_seconds,
        options.sasl_login_refresh_buffer_seconds,
        assertion,
    )


def _retriever(options: SinkOptions, scheme: str) -> str:
    """Return Java's name of the flow, or "" if the default class needs none: for a file or a user's function,
    whose ``scheme`` is ""."""
    name = options.sasl_oauthbearer_jwt_retriever_class.removeprefix(SHADED)
    flow = name.removeprefix(f"{_KAFKA_MODULES}.oauthbearer.")
    schemes = _RETRIEVERS.get(flow)
    option = f"Option 'kafka.sasl.oauthbearer.jwt.retriever.class' = {name}"
    if schemes is None:
        raise ConfigurationError(
            f"{option} is not supported, as Java classes cannot run in this sink; use one of "
            f"{', '.join(_RETRIEVERS)}. sasl.oauthbearer.token.provider takes a Python function"
        )
    if scheme not in schemes:
        raise ConfigurationError(
            f"{option} needs a kafka.sasl.oauthbearer.token.endpoint.url that begins with "
            f"{' or '.join(f'{scheme}://' for scheme in schemes)}"
        )
    if flow != "DefaultJwtRetriever":
        return flow
    return "ClientCredentialsJwtRetriever" if scheme.startswith("http") else ""


def _assertion(options: SinkOptions, flow: str) -> AssertionSettings | None:
    """Return the settings of the flow's assertion, or None if it has none. With client credentials, a file or
    an issuer selects the assertion, as in Java."""
    file, key = options.sasl_oauthbearer_assertion_file, options.sasl_oauthbearer_assertion_private_key_file
    template = options.sasl_oauthbearer_assertion_template_file
    issuer = options.sasl_oauthbearer_assertion_claim_iss
    is_grant = flow == "JwtBearerJwtRetriever"
    if not is_grant and not (flow == "ClientCredentialsJwtRetriever" and (file or issuer)):
        for name, value in (("private.key.file", key), ("template.file", template), ("file", file)):
            if value:
                wanted = (
                    f" without {_ASSERTION}.claim.iss" if flow.startswith("Client") else " with these tokens"
                )
                raise ConfigurationError(f"Option '{_ASSERTION}.{name}' has no effect{wanted}")
        return None
    if file:
        return AssertionSettings(is_grant, Store(f"{_ASSERTION}.file", "JWT", file))
    if not key:
        raise ConfigurationError(
            f"an assertion needs {_ASSERTION}.private.key.file, which signs it, or {_ASSERTION}.file"
        )
    claims = {
        "aud": options.sasl_oauthbearer_assertion_claim_aud,
        "iss": issuer,
        "sub": options.sasl_oauthbearer_assertion_claim_sub,
    }
    return AssertionSettings(
        is_grant,
        None,
        Store(
            f"{_ASSERTION}.private.key.file",
            "PEM",
            key,
            key_password=options.sasl_oauthbearer_assertion_private_key_passphrase,
            key_password_option=f"{_ASSERTION}.private.key.passphrase",
        ),
        Store(f"{_ASSERTION}.template.file", "JSON", template) if template else None,
        options.sasl_oauthbearer_assertion_algorithm,
        tuple((name, value) for name, value in claims.items() if value),
        options.sasl_oauthbearer_assertion_claim_exp_seconds,
        options.sasl_oauthbearer_assertion_claim_nbf_seconds,
        options.sasl_oauthbearer_assertion_claim_jti_include,
    )


def _secret(login: LoginModule, name: str) -> Secret | None:
    given = login.options.get(name)
    if given is None:
        return None
    try:
        return Secret.of_one_line(given.reveal())
    except ValueError as error:
        problem = str(error)
    raise ConfigurationError(f"{JAAS}: {name} {problem}")


def _extensions(login: LoginModule) -> tuple[tuple[str, str], ...]:
    """Return the SASL extensions (KIP-342), such as Confluent Cloud's logicalCluster and identityPoolId."""
    prefix = "extension_"
    extensions = []
    for name in login.options:
        if not name.startswith(prefix):
            continue
        key, value = name.removeprefix(prefix), login.get(name)
        if not key.isalpha() or not key.isascii() or key == "auth" or not value.isascii() or "\1" in value:
            raise ConfigurationError(
                f"{JAAS}: {name} is not a valid SASL extension (letters only, and not auth)"
            )
        extensions.append((key, value))
    return tuple(extensions)


def _endpoint_tls(login: LoginModule) -> TlsSettings:
    """Return the trust for the token endpoint. Java takes it from the login module's options instead of
    Kafka's."""
    location = login.get("ssl.truststore.location")
    certificates = login.options.get("ssl.truststore.certificates")
    if "ssl.truststore.location" not in login.options and certificates is None:
        return TlsSettings()
    kind = (login.get("ssl.truststore.type") or "JKS").upper()
    if looks_like_key(location):
        raise ConfigurationError(f"{JAAS}: ssl.truststore.location contains a certificate instead of a path")
    option = "kafka.sasl.jaas.config (ssl.truststore.location)"
    password = _secret(login, "ssl.truststore.password")
    return TlsSettings(Store(option, kind, location, certificates, password))


def _iam(login: LoginModule) -> IamSettings:
    for name in ("awsRoleAccessKeyId", "awsRoleSecretAccessKey", "awsRoleSessionToken"):
        if name in login.options:
            raise ConfigurationError(f"{JAAS}: {name} is not supported; set awsProfileName to a profile")
    return IamSettings(
        profile=login.get("awsProfileName"),
        role_arn=login.get("awsRoleArn"),
        role_session_name=login.get("awsRoleSessionName"),
        role_external_id=login.get("awsRoleExternalId"),
        sts_region=login.get("awsStsRegion"),
    )


def _kerberos(options: SinkOptions, login: LoginModule) -> KerberosSettings:
    service = options.sasl_kerberos_service_name or login.get("serviceName")
    if not service:
        raise ConfigurationError(
            "kafka.sasl.mechanism=GSSAPI (the default) needs kafka.sasl.kerberos.service.name, usually "
            "kafka; for another login set kafka.sasl.mechanism"
        )
    keytab = login.get("keyTab") if login.get("useKeyTab").lower() == "true" else None
    if keytab == "":
        raise ConfigurationError(f"{JAAS} has useKeyTab=true without keyTab")
    return KerberosSettings(service, login.get("principal"), keytab or "")
