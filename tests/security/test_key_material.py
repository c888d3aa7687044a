"""Keys and certificates of every common form, and what is said of those that cannot be used."""

from __future__ import annotations

import os
import shutil
import ssl
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from kafka_sink.errors import ConfigurationError
from kafka_sink.secret import Secret
from kafka_sink.security.key_material import read_key, read_trust
from kafka_sink.security.settings import Store, TlsSettings
from kafka_sink.security.tls_context import make_context
from tests.support.commands import run
from tests.support.security.certificates import Authority

PASSWORD = Secret("pass, 'word\"")
# openssl's options for PKCS#8, of what it writes by default through what it calls legacy.
ENCRYPTIONS = (
    "-v2 aes-256-cbc",
    "-v2 aes-128-cbc -v2prf hmacWithSHA1",
    "-v2 aes-256-cbc -v2prf hmacWithSHA512",
    "-v2 des3",
    "-scrypt",
    "-v1 PBE-SHA1-3DES",
    "-v1 PBE-SHA1-RC2-40",
    "-v1 PBE-MD5-DES",
)


AUTHORITY = Authority()
CLIENT = AUTHORITY.issue("client")


def location(
    path: Path, kind: str = "PEM", option: str = "kafka.ssl.keystore.location", **more: Secret | None
) -> Store:
    return Store(option, kind, str(path), **more)  # type: ignore[arg-type]


def problem(store: Store, *, trust: bool = False) -> str:
    read: Callable[[Store], object] = read_trust if trust else read_key
    with pytest.raises(ConfigurationError) as caught:
        read(store)
    assert caught.value.__cause__ is None
    for password in (PASSWORD, store.password or PASSWORD, store.key_password or PASSWORD):
        assert password.reveal() not in str(caught.value)
        assert not [one for one in our_locals(caught.value) if password.reveal() in one]
    return str(caught.value)


def our_locals(error: BaseException) -> list[str]:
    """Of the frames that an error has passed, without those of tests: error trackers collect them."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [repr(one.f_locals) for one in frames if "kafka_sink/security" in one.f_code.co_filename]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl writes the keys")
@pytest.mark.parametrize("encryption", ENCRYPTIONS)
def test_encrypted_pkcs8_of_every_common_kind_is_read(tmp_path: Path, encryption: str) -> None:
    (tmp_path / "key.pem").write_bytes(CLIENT.key_pem())
    command = ["openssl", "pkcs8", "-topk8", "-in", "key.pem", "-out", "out.pem", *encryption.split()]
    command += ["-passout", "env:PW", "-provider", "default", "-provider", "legacy"]
    if run(command, {**os.environ, "PW": PASSWORD.reveal()}, folder=tmp_path, code=None).returncode:
        pytest.skip(f"this openssl does not write {encryption}")
    path = tmp_path / "both.pem"
    path.write_bytes((tmp_path / "out.pem").read_bytes() + CLIENT.chain_pem)
    assert read_key(location(path, key_password=PASSWORD)).key.reveal().encode() == CLIENT.key_pem()
    assert "wrong kafka.ssl.key.password" in problem(location(path, key_password=Secret("not this")))
    assert "set kafka.ssl.key.password" in problem(location(path))
    # A password for a key without one does no harm.
    CLIENT.pem_file(path)
    assert read_key(location(path, key_password=PASSWORD)).chain == CLIENT.chain_pem


def test_a_key_and_chain_given_inline_with_spaces_for_line_ends() -> None:
    def flat(pem: bytes) -> Secret:
        return Secret(pem.decode().replace("\n", " "))

    chain = Store("kafka.ssl.keystore.certificate.chain", "PEM", text=flat(CLIENT.chain_pem))
    text = flat(CLIENT.key_pem("k"))
    key = Store("kafka.ssl.keystore.key", "PEM", text=text, chain=chain, key_password=Secret("k"))
    made = read_key(key)
    assert made.key.reveal().encode() == CLIENT.key_pem()
    assert made.chain == CLIENT.chain_pem
    make_context(TlsSettings(key=key))


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_blank_lines_in_a_key_and_certificates_do_not_matter(tmp_path: Path, end: bytes) -> None:
    """Catches: material that Java reads and that was refused, such as from a template with a line end after
    the content."""
    path = tmp_path / "both.pem"
    pem = CLIENT.key_pem() + CLIENT.chain_pem
    for content in (pem.replace(b"\n", 2 * end), pem.replace(b"\n-----END", end + b" " + end + b"-----END")):
        path.write_bytes(content)
        assert read_key(location(path)).chain == CLIENT.chain_pem
        assert len(read_trust(location(path))) == 2


def test_a_certificate_with_a_key_of_an_unknown_curve_is_told_from_that_of_the_key(tmp_path: Path) -> None:
    """Catches: cryptography's own error, which names no option."""
    p256, unknown = bytes.fromhex("06082a8648ce3d030107"), bytes.fromhex("06082a8648ce3d03017f")
    der = CLIENT.certificate.public_bytes(Encoding.DER).replace(p256, unknown)
    path = tmp_path / "both.pem"
    path.write_bytes(CLIENT.key_pem() + ssl.DER_cert_to_PEM_cert(der).encode())
    assert "is not for the private key" in problem(location(path))


def test_pkcs12_is_read_whatever_java_calls_it(tmp_path: Path) -> None:
    key = CLIENT.pkcs12_file(tmp_path / "key.p12", PASSWORD.reveal())
    trust = AUTHORITY.pkcs12_file(tmp_path / "t.p12", PASSWORD.reveal())
    for kind in ("PKCS12", "JKS"):
        # An option for a text that is set to nothing is as one that is not set.
        for text in (None, Secret("")):
            assert read_key(location(key, kind, password=PASSWORD, text=text)).chain == CLIENT.chain_pem
            found = read_trust(location(trust, kind, password=PASSWORD, text=text))
            assert found == [AUTHORITY.certificate.public_bytes(Encoding.DER)]
        for option in ("kafka.ssl.truststore.{}", "kafka.sasl.jaas.config (ssl.truststore.{})"):
            wrong = location(trust, kind, option.format("location"), password=Secret("not this"))
            assert f"wrong {option.format('password')}" in problem(wrong, trust=True)
        assert "needs kafka.ssl.keystore.password" in problem(location(key, kind))


@pytest.mark.skipif(shutil.which("keytool") is None, reason="keytool comes with Java")
def test_keytools_stores_are_read_and_jks_is_refused_with_the_line_that_converts_it(
    tmp_path: Path,
) -> None:
    AUTHORITY.pem_file(tmp_path / "ca.pem")
    given = Secret("secret1")
    for kind in ("PKCS12", "JKS"):
        command = ["keytool", "-importcert", "-noprompt", "-file", "ca.pem", "-alias", "ca"]
        command += ["-storepass:env", "PW", "-keystore", f"{kind}.store", "-storetype", kind]
        run(command, {**os.environ, "PW": given.reveal()}, folder=tmp_path)
    assert len(read_trust(location(tmp_path / "PKCS12.store", "JKS", password=given))) == 1
    text = problem(location(tmp_path / "JKS.store", "JKS", password=given), trust=True)
    assert f"keytool -importkeystore -srckeystore {tmp_path}/JKS.store -destkeystore" in text
    assert "kafka.ssl.keystore.type=PKCS12" in text


def test_unusable_key_material_is_reported_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "x"

    def said(content: bytes, kind: str = "PEM", *, trust: bool = False) -> str:
        path.write_bytes(content)
        return problem(location(path, kind), trust=trust)

    assert "cannot be read: No such file" in problem(location(path))
    assert "no certificate" in said(CLIENT.key_pem())
    assert "no private key" in said(CLIENT.chain_pem)
    assert "is not for the private key" in said(CLIENT.key_pem() + AUTHORITY.pem)
    assert "its type is PKCS12: set the type to PEM" in said(CLIENT.key_pem() + AUTHORITY.pem, "PKCS12")
    path.write_bytes(b"\xfe\xed\xfe\xed")
    jks = problem(location(path, "JKS", "kafka.sasl.jaas.config (ssl.truststore.location)"), trust=True)
    assert "set kafka.sasl.jaas.config (ssl.truststore.type)=PKCS12" in jks
    jks = problem(location(path, option="kafka.ssl.ca.location"), trust=True)
    assert f"then make it PEM, which this option needs: openssl pkcs12 -nodes -in {path}.p12" in jks
    assert "is not PEM" in said(b"nothing of the kind", trust=True)
    assert "neither PKCS12 nor PEM" in said(b"nothing of the kind", "PKCS12")
    assert "holds no certificate" in said(CLIENT.key_pem(), trust=True)
    CLIENT.pkcs12_file(path, "x")
    assert "looks like PKCS12" in problem(location(path))


@pytest.mark.parametrize("case", ["type", "no chain", "not base64", "other chain", "no PEM chain"])
def test_no_frame_of_an_error_shows_a_private_key(case: str) -> None:
    key = CLIENT.key_pem().decode()
    middle = key.splitlines()[1]
    damaged = key.replace("\n-----END", "\n*\n-----END")
    chain = {"other chain": AUTHORITY.pem.decode(), "no PEM chain": "nothing"}.get(case)
    text = Secret(damaged if case == "not base64" else key)
    store = Store(
        "kafka.ssl.keystore.key",
        "JKS" if case == "type" else "PEM",
        text=text,
        chain=None if chain is None else Store("chain", "PEM", text=Secret(chain)),
    )
    with pytest.raises(
        ConfigurationError, match="not a valid key" if case == "not base64" else None
    ) as caught:
        read_key(store)
    error: BaseException | None = caught.value
    while error is not None:
        shown = our_locals(error)
        assert shown
        assert not [one for one in shown if middle[:16] in one]
        error = error.__context__
