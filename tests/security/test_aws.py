"""AWS_MSK_IAM without AWS: botocore's own signature, and credentials from where AWS users have them."""

from __future__ import annotations

import datetime
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest import mock
from urllib.parse import parse_qs, urlsplit

import pytest
from botocore import auth as botocore_auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.session import Session

from kafka_sink.errors import AuthenticationError
from kafka_sink.security import aws
from kafka_sink.security.aws import IamLogin, region_of
from kafka_sink.security.sasl import SaslExchange
from kafka_sink.security.settings import IamSettings
from kafka_sink.security.token import TokenUnavailableError
from tests.support.http_server import Server
from tests.support.surroundings import Environ, Modules
from tests.support.waiting import until

HOST = "b-1.demo.abc123.c2.kafka.eu-west-1.amazonaws.com"
KEY, SECRET_KEY = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"


@pytest.fixture(autouse=True)
def _level_of_botocore() -> Iterator[None]:
    """A login raises it for good."""
    logger = logging.getLogger("botocore")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def _no_credentials_of_this_host(environ: Environ, tmp_path: Path) -> None:
    """Credentials are those in the environment, unless a test gives others."""
    names = ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION", "AWS_REGION")
    environ(**dict.fromkeys(names))
    environ(
        AWS_EC2_METADATA_DISABLED="true",
        AWS_CONFIG_FILE=str(tmp_path / "config"),
        AWS_SHARED_CREDENTIALS_FILE=str(tmp_path / "credentials"),
        AWS_ACCESS_KEY_ID=KEY,
        AWS_SECRET_ACCESS_KEY=SECRET_KEY,
    )


def sent(login: IamLogin, host: str = HOST) -> dict[str, str]:
    message: dict[str, str] = json.loads(next(login.steps(host)))
    return message


def botocores(message: dict[str, str], token: str | None) -> str:
    """The signature that botocore makes for the same moment."""
    moment = datetime.datetime.strptime(message["x-amz-date"], "%Y%m%dT%H%M%SZ")
    credentials = Credentials(KEY, SECRET_KEY, token)
    signer = botocore_auth.SigV4QueryAuth(credentials, "kafka-cluster", "eu-west-1", expires=900)
    request = AWSRequest("GET", f"https://{HOST}/", params={"Action": "kafka-cluster:Connect"})
    request.context["timestamp"] = message["x-amz-date"]
    with mock.patch.object(botocore_auth, "get_current_datetime", return_value=moment, create=True):
        signer.add_auth(request)
    return str(parse_qs(urlsplit(request.url).query)["X-Amz-Signature"][0])


def test_the_signature_is_the_one_that_botocore_makes(environ: Environ) -> None:
    for token in (None, "FwoGZXIvYXdzE//token=="):
        environ(AWS_SESSION_TOKEN=token)
        message = sent(IamLogin(IamSettings()))
        assert message.items() >= {
            "version": "2020_10_22", "host": HOST, "action": "kafka-cluster:Connect",
            "x-amz-signature": botocores(message, token),
        }.items()  # fmt: skip
        assert message.get("x-amz-security-token") == token
        assert "/eu-west-1/kafka-cluster/aws4_request" in message["x-amz-credential"]
        assert SECRET_KEY not in json.dumps(message)


@mock.patch.object(aws, "_WAIT_S", 0.05)
def test_a_search_for_credentials_that_hangs_ends_every_login_and_is_not_begun_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches: a credential_process without an end held the first login for ever, and its connection."""
    began: list[int] = []
    end = threading.Event()

    class Hanging(Session):  # type: ignore[misc]
        def get_credentials(self) -> None:
            began.append(1)
            end.wait(60)

    session = Hanging()
    monkeypatch.setattr("botocore.session.Session", lambda profile: session)
    login = IamLogin(IamSettings())
    for _ in range(3):
        with pytest.raises(
            TokenUnavailableError, match=r"found no credentials within \d+ s; check credential_process"
        ):
            login.steps(HOST)
    assert began == [1]
    # Each request to AWS has a bound, too: botocore's are 60 s, five times.
    config = session.get_default_client_config()
    assert config.connect_timeout + config.read_timeout <= 30
    assert config.retries == {"total_max_attempts": 2}
    end.set()

    def end_of_search() -> str:
        try:
            login.steps(HOST)
        except TokenUnavailableError:
            return ""
        except AuthenticationError as error:
            return str(error)
        return "it found some"

    assert "no AWS credentials were found" in until(end_of_search)


@mock.patch("botocore.session.Session", mock.Mock(side_effect=SystemExit))
def test_a_search_that_breaks_off_ends_its_login() -> None:
    login = IamLogin(IamSettings())
    with pytest.raises(SystemExit):
        login.steps(HOST)


def test_each_login_has_the_credentials_of_its_moment() -> None:
    session = mock.Mock()
    moments = (Credentials(name, SECRET_KEY) for name in ("FIRST", "SECOND"))
    session.get_credentials.return_value.get_frozen_credentials = lambda: next(moments)
    login = IamLogin(IamSettings())
    with mock.patch("botocore.session.Session", return_value=session):
        for name in ("FIRST/", "SECOND/"):
            assert sent(login)["x-amz-credential"].startswith(name)


def test_a_profile_is_read(environ: Environ, tmp_path: Path) -> None:
    environ(AWS_ACCESS_KEY_ID=None, AWS_SECRET_ACCESS_KEY=None)
    (tmp_path / "credentials").write_text(
        "[kafka]\naws_access_key_id = OTHER\naws_secret_access_key = x\nregion = us-east-2\n"
    )
    message = sent(IamLogin(IamSettings(profile="kafka")), "localhost")
    assert message["x-amz-credential"].startswith("OTHER/")
    assert "/us-east-2/" in message["x-amz-credential"]
    assert message["host"] == "localhost"


def test_missing_aws_settings_are_reported_with_a_remedy(environ: Environ, modules: Modules) -> None:
    def said(host: str = HOST) -> str:
        with pytest.raises(AuthenticationError) as caught:
            IamLogin(IamSettings()).steps(host)
        return str(caught.value)

    assert "set AWS_DEFAULT_REGION" in said("localhost")
    environ(AWS_ACCESS_KEY_ID=None, AWS_SECRET_ACCESS_KEY=None)
    assert "no AWS credentials were found: set AWS_ACCESS_KEY_ID" in said()
    modules(botocore=None)
    assert "pip install botocore" in said()


def test_the_region_is_in_the_brokers_name() -> None:
    for host, region in {
        HOST: "eu-west-1",
        "boot-x1.c3.kafka-serverless.us-east-1.amazonaws.com": "us-east-1",
        "b-1.x.c1.kafka.cn-north-1.amazonaws.com.cn": "cn-north-1",
        "localhost": "",
        "kafka.eu-west-1.amazonaws.com.evil.test": "",
    }.items():
        assert region_of(host) == region


def test_a_response_ends_the_exchange_and_an_empty_one_is_refused() -> None:
    for response in (b'{"version":"2020_10_22","request-id":"1"}', b""):
        exchange = SaslExchange("AWS_MSK_IAM", IamLogin(IamSettings()).steps(HOST))
        exchange.first()
        with nullcontext() if response else pytest.raises(AuthenticationError):
            assert exchange.respond(response) is None


ASSUMED = """<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleResult>
<Credentials><AccessKeyId>ASIAROLE</AccessKeyId><SecretAccessKey>the-secret-of-the-role</SecretAccessKey>
<SessionToken>the-session-token</SessionToken><Expiration>2999-01-01T00:00:00Z</Expiration></Credentials>
</AssumeRoleResult></AssumeRoleResponse>"""


def test_no_log_has_the_credentials_of_a_role(environ: Environ, caplog: pytest.LogCaptureFixture) -> None:
    """Catches: botocore, which logs AWS's whole response at DEBUG. The role is assumed once, with what the
    login module says."""
    role = "arn:aws:iam::1:role/r"
    with Server() as sts:
        sts.respond = lambda _: (200, {"Content-Type": "text/xml"}, ASSUMED.encode())
        environ(AWS_ENDPOINT_URL_STS=sts.url)
        login = IamLogin(IamSettings("", role, "nightly", "external", "eu-central-1"))
        with caplog.at_level(logging.DEBUG):
            for _ in range(2):
                message = sent(login)
                assert message["x-amz-credential"].startswith("ASIAROLE/")
                assert message["x-amz-security-token"] == "the-session-token"
    ((_, _, headers, body),) = sts.requests
    assert "/eu-central-1/sts/aws4_request" in headers["Authorization"]
    form = parse_qs(body.decode())
    asked = {"RoleArn": [role], "RoleSessionName": ["nightly"], "ExternalId": ["external"]}
    assert form.items() >= asked.items()
    for secret in ("the-secret-of-the-role", "the-session-token", SECRET_KEY):
        assert secret not in caplog.text
