"""Reads certificates and private keys from PEM texts and PKCS12 stores, signs with keys and makes new ones.

No other module imports ``cryptography``. This one is imported when there is a store, an assertion to sign or
a coordinator to start, because plaintext, TLS with the authorities of the system and passwords need none of
it.
"""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import datetime, timedelta, timezone

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa, utils
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.hazmat.primitives.serialization.pkcs12 import load_key_and_certificates
from cryptography.x509 import Certificate, load_pem_x509_certificates

from kafka_sink.errors import ConfigurationError
from kafka_sink.printable import printable
from kafka_sink.secret import HiddenBytes, Secret
from kafka_sink.security.settings import Store
from kafka_sink.security.stores import ClientKey, content_of, named

_JKS_MAGIC = (b"\xfe\xed\xfe\xed", b"\xce\xce\xce\xce")
# A PKCS12 store is a DER sequence, whose length takes several bytes or is indefinite.
_PKCS12_MAGIC = (b"\x30\x82", b"\x30\x83", b"\x30\x80", b"\x30\x81")
_ENCRYPTED_PROBLEM = "or encrypted in a way that is not supported (openssl pkcs8 -topk8 converts it)"
# The first line of a private key, and the header of the older form of encrypted keys.
_BEGIN_OF_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----(\s*Proc-Type: *4,ENCRYPTED)?")
# Blank lines after a line of Base64. Java ignores them, but the library takes them for the end of headers.
_BLANK_LINES = re.compile(rb"(?m)^([ \t]*[A-Za-z0-9+/=]+)[ \t\r]*\n(?:[ \t\r]*\n)+")


def read_trust(store: Store) -> list[bytes]:
    """Return the trusted certificates in DER. Raises ConfigurationError if the store cannot be read or
    contains no certificate."""
    data = content_of(store)
    if _is_pem(store, data):
        certificates = _pem_certificates(store, data)
    else:
        _, certificates = _pkcs12(store, data)
    if not certificates:
        raise ConfigurationError(f"{named(store)} holds no certificate")
    return [certificate.public_bytes(Encoding.DER) for certificate in certificates]


def read_key(store: Store) -> ClientKey:
    """Return a private key with its chain. Raises ConfigurationError, also if the two do not belong
    together."""
    data = content_of(store)
    if _is_pem(store, data):
        key = _pem_key(store, data)
        chain_store = store.chain or store
        chain = _pem_certificates(chain_store, data if store.chain is None else content_of(store.chain))
    else:
        chain_store = store
        key, chain = _pkcs12(store, data)
    if key is None:
        raise ConfigurationError(f"{named(store)} holds no private key")
    if not chain:
        raise ConfigurationError(
            f"{named(chain_store)} holds no certificate of the private key; add its certificate chain"
        )
    if not _is_for(chain[0], key):
        raise ConfigurationError(
            f"{named(chain_store)}: the first certificate is not for the private key in {store.option}"
        )
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode("ascii")
    chain_text = b"".join(certificate.public_bytes(Encoding.PEM) for certificate in chain)
    return ClientKey(Secret.known(text), chain_text)


def _is_for(certificate: Certificate, key: PrivateKeyTypes) -> bool:
    with suppress(UnsupportedAlgorithm, ValueError):
        return bool(certificate.public_key() == key.public_key())
    # The certificate's key is of a kind that cannot be read, unlike the private key.
    return False


def new_key(common_name: str) -> tuple[ClientKey, bytes]:
    """Create a key of P-256 with a certificate of its own. Return them, and the certificate in DER."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])
    now = datetime.now(timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=3650))
        .sign(key, SHA256())
    )
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    chain = certificate.public_bytes(Encoding.PEM)
    return ClientKey(Secret(pem.decode()), chain), certificate.public_bytes(Encoding.DER)


def signature(store: Store, algorithm: str, signed: bytes) -> bytes:
    """Sign a JWT with a PEM key that has no certificate next to it. Raises ConfigurationError."""
    key = _pem_key(store, content_of(store))
    if key is None:
        raise ConfigurationError(f"{named(store)} holds no private key in PEM")
    if algorithm == "RS256" and isinstance(key, rsa.RSAPrivateKey):
        return key.sign(signed, padding.PKCS1v15(), SHA256())
    # Keys of other curves may also have 256 bits.
    if (
        algorithm == "ES256"
        and isinstance(key, ec.EllipticCurvePrivateKey)
        and isinstance(key.curve, ec.SECP256R1)
    ):
        # A JWT contains the two numbers of the signature as they are, not in DER (RFC 7518, 3.4).
        pair = utils.decode_dss_signature(key.sign(signed, ec.ECDSA(SHA256())))
        return b"".join(number.to_bytes(32, "big") for number in pair)
    wanted = "an RSA key" if algorithm == "RS256" else "a key of the curve P-256"
    raise ConfigurationError(
        f"{named(store)}: kafka.sasl.oauthbearer.assertion.algorithm={algorithm} needs {wanted}"
    )


def _option_of(store: Store, name: str) -> str:
    """The option for the type or the password of a store, whose own option is the one of its location."""
    return store.option.replace("store.location", f"store.{name}")


def _is_pem(store: Store, data: bytes) -> bool:
    """Whether the content is PEM. Raises ConfigurationError if it is not of the type that the option
    specifies."""
    if data.startswith(_JKS_MAGIC):
        use = f"use that file and set {_option_of(store, 'type')}=PKCS12"
        if "store.location" not in store.option:
            use = f"make it PEM, which this option needs: openssl pkcs12 -nodes -in {store.location}.p12"
        raise ConfigurationError(
            f"{named(store)} is a JKS store, which only Java reads. Convert it once with: keytool "
            f"-importkeystore -srckeystore {store.location} -destkeystore {store.location}.p12 "
            f"-deststoretype PKCS12; then {use}"
        )
    looks_like_pem = b"-----BEGIN " in data
    if store.kind == "PEM":
        if not looks_like_pem:
            other = "; it looks like PKCS12: set the type to PKCS12" if data.startswith(_PKCS12_MAGIC) else ""
            if store.text and data.startswith((b"/", b"file:")):
                other = "; it looks like a path: set it in the option that ends in .location"
            raise ConfigurationError(f"{named(store)} is not PEM{other}")
        return True
    if looks_like_pem:
        raise ConfigurationError(f"{named(store)} is PEM, but its type is {store.kind}: set the type to PEM")
    return False


def _pem_certificates(store: Store, data: bytes) -> list[Certificate]:
    if b"CERTIFICATE-----" not in data:
        return []
    try:
        return load_pem_x509_certificates(_BLANK_LINES.sub(rb"\1\n", data))
    except ValueError:
        raise ConfigurationError(f"{named(store)} holds a certificate that cannot be read") from None


def _pem_key(store: Store, data: bytes) -> PrivateKeyTypes | None:
    begin = _BEGIN_OF_KEY.search(data)
    if begin is None:
        return None
    is_encrypted = b"ENCRYPTED" in begin[0]
    given = store.key_password
    if is_encrypted and given is None:
        raise ConfigurationError(
            f"{named(store)}: the private key is encrypted; set {store.key_password_option}"
        )
    try:
        # Users may set a password although the key has none. The library would refuse that.
        password = given.reveal().encode() if is_encrypted and given is not None else None
        return load_pem_private_key(HiddenBytes(_BLANK_LINES.sub(rb"\1\n", data)), password)
    except UnsupportedAlgorithm as error:
        problem = f"its kind is not supported ({printable(str(error))})"
    except (ValueError, TypeError):
        wrong = f"wrong {store.key_password_option}, {_ENCRYPTED_PROBLEM}"
        problem = wrong if is_encrypted else "it is not a valid key"
    finally:
        password = None
    raise ConfigurationError(f"{named(store)}: the private key cannot be read: {problem}")


def _pkcs12(store: Store, data: bytes) -> tuple[PrivateKeyTypes | None, list[Certificate]]:
    """Return the key, if there is one, and all certificates, with the key's own certificate first."""
    try:
        revealed = None if store.password is None else store.password.reveal().encode()
        key, own, others = load_key_and_certificates(data, revealed)
    except UnsupportedAlgorithm as error:
        problem = f"it is encrypted in a way that is not supported ({printable(str(error))})"
    except ValueError:
        if not data.startswith(_PKCS12_MAGIC):
            problem = f"it is neither PKCS12 nor PEM (its type is {store.kind})"
        elif store.password is None:
            problem = f"it needs {_option_of(store, 'password')}"
        else:
            problem = f"wrong {_option_of(store, 'password')}, or the file is damaged"
    else:
        return key, [*([] if own is None else [own]), *others]
    finally:
        revealed = None
    raise ConfigurationError(f"{named(store)} cannot be read: {problem}")
