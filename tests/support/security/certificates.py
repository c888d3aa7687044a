"""An authority, and certificates of it, made for one test run."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    pkcs12,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Identity:
    """A key with its certificate, and the certificate of its issuer."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate
    issuer: x509.Certificate

    @property
    def chain_pem(self) -> bytes:
        parts = [self.certificate]
        if self.issuer != self.certificate:
            parts.append(self.issuer)
        return b"".join(one.public_bytes(Encoding.PEM) for one in parts)

    def key_pem(self, password: str | None = None) -> bytes:
        encryption = NoEncryption() if password is None else BestAvailableEncryption(password.encode())
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)

    def pem_file(self, path: Path, password: str | None = None) -> Path:
        path.write_bytes(self.key_pem(password) + self.chain_pem)
        return path

    def pkcs12_file(self, path: Path, password: str) -> Path:
        encryption = BestAvailableEncryption(password.encode())
        path.write_bytes(
            pkcs12.serialize_key_and_certificates(
                b"me", self.key, self.certificate, [self.issuer], encryption
            )
        )
        return path


class Authority:
    """Signs whatever it is asked to."""

    def __init__(self, name: str = "Test authority") -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = (
            _builder(name, name, self.key.public_key(), -30, 30)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        self._name = name

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    def pem_file(self, path: Path) -> Path:
        path.write_bytes(self.pem)
        return path

    def pkcs12_file(self, path: Path, password: str) -> Path:
        """A truststore as keytool makes it."""
        trusted = [pkcs12.PKCS12Certificate(self.certificate, b"authority")]
        encryption = BestAvailableEncryption(password.encode())
        path.write_bytes(pkcs12.serialize_java_truststore(trusted, encryption))
        return path

    def issue(self, name: str, *hosts: str, starts_in_days: int = -1, ends_in_days: int = 7) -> Identity:
        """``hosts``: names and IP addresses that the certificate is for."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            _builder(name, self._name, key.public_key(), starts_in_days, ends_in_days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False
            )
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
        )
        if hosts:
            names = [_general_name(host) for host in hosts]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return Identity(key, builder.sign(self.key, hashes.SHA256()), self.certificate)


def _builder(
    name: str, issuer: str, key: ec.EllipticCurvePublicKey, starts_in_days: int, ends_in_days: int
) -> x509.CertificateBuilder:
    subject, by = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, one)]) for one in (name, issuer))
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(by)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + starts_in_days * _DAY)
        .not_valid_after(now + ends_in_days * _DAY)
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
