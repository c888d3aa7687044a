"""Amazon MSK's IAM login. botocore finds the credentials and makes the signature."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import threading
from concurrent.futures import Future, wait
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kafka_sink.errors import AuthenticationError
from kafka_sink.printable import printable
from kafka_sink.security.sasl import SaslSteps
from kafka_sink.security.settings import IamSettings
from kafka_sink.security.token import TokenUnavailableError

# Examples: b-1.name.abc123.c2.kafka.eu-west-1.amazonaws.com,
# boot-x.c1.kafka-serverless.eu-west-1.amazonaws.com
_REGION = re.compile(r"\.kafka(?:-serverless)?\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(?:\.cn)?$")
_SESSION_NAME = "kafka-chunked"
_SERVICE, _ACTION = "kafka-cluster", "kafka-cluster:Connect"
# A signature is valid for this long, as in AWS's own login modules.
_EXPIRES_S = 900
# The bounds of one request to AWS. botocore would wait for 60 s and try five times.
_CONNECT_S, _READ_S, _ATTEMPTS = 5, 10, 2


# The bound of the whole search for credentials. botocore tries several sources in turn, and one of them is a
# program of the user's (credential_process), which may run forever.
_WAIT_S = 60.0


class IamLogin:
    """The IAM login of one set of options. botocore renews the credentials, which may take requests to AWS.
    botocore is optional, and only this login needs it: functions import it when they need it."""

    def __init__(self, settings: IamSettings) -> None:
        self._settings = settings
        # Guards `_lookup`: without it, two logins could start two lookups, whose threads would share
        # botocore's objects.
        self._lock = threading.Lock()
        self._lookup: Future[Any] | None = None
        # Only the thread of the present lookup uses these two, because botocore's credentials are not
        # thread-safe.
        self._credentials: Any = None
        self._default_region = ""

    def steps(self, host: str) -> SaslSteps:
        """Return a login's exchange with one broker. Blocks while credentials are fetched, for at most a
        minute. Raises AuthenticationError if there are no credentials or the region is unknown, and
        TokenUnavailableError if AWS cannot be reached or the time has passed."""
        if importlib.util.find_spec("botocore") is None:
            raise AuthenticationError(
                "AWS_MSK_IAM needs the package botocore: pip install botocore on driver and executors"
            )
        frozen = self._looked_up()
        region = region_of(host) or self._default_region
        if not region:
            raise AuthenticationError(
                f"AWS_MSK_IAM: the AWS region of {host} is not known: set AWS_DEFAULT_REGION"
            )
        return _iam(signed(host, region, frozen))

    def _looked_up(self) -> Any:
        """Look up the credentials. Logins that wait at the same time share one lookup."""
        with self._lock:
            lookup = self._lookup
            if lookup is None or lookup.done():
                lookup = self._lookup = Future()
                name = "kafka-chunked-aws"
                threading.Thread(target=self._run, args=(lookup,), name=name, daemon=True).start()
        if not wait([lookup], _WAIT_S).done:
            raise TokenUnavailableError(
                f"AWS_MSK_IAM: botocore found no credentials within {_WAIT_S:.0f} s; check "
                "credential_process of the AWS profile, and whether this host reaches AWS"
            )
        return lookup.result()

    def _run(self, lookup: Future[Any]) -> None:
        try:
            lookup.set_result(self._frozen())
        except BaseException as error:  # noqa: BLE001 - raised again by the logins that wait
            lookup.set_exception(error)

    def _frozen(self) -> Any:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            if self._credentials is None:
                self._credentials = self._find()
            return self._credentials.get_frozen_credentials()
        except ClientError as error:
            code = printable(str(error.response.get("Error", {}).get("Code", "an error")))
            problem: Exception = AuthenticationError(f"AWS_MSK_IAM: AWS refused the credentials: {code}")
        except BotoCoreError as error:
            problem = TokenUnavailableError(f"AWS_MSK_IAM: no credentials: {type(error).__name__}")
        raise problem

    def _find(self) -> Any:
        from botocore.config import Config
        from botocore.session import Session

        # At DEBUG, botocore logs signatures, and AWS's responses with the credentials of a role.
        logger = logging.getLogger("botocore")
        logger.setLevel(max(logger.level, logging.INFO))
        session = Session(profile=self._settings.profile or None)
        session.set_default_client_config(
            Config(
                connect_timeout=_CONNECT_S, read_timeout=_READ_S, retries={"total_max_attempts": _ATTEMPTS}
            )
        )
        self._default_region = session.get_config_variable("region") or os.environ.get("AWS_REGION", "")
        credentials = session.get_credentials()
        if credentials is None:
            raise AuthenticationError(
                "AWS_MSK_IAM: no AWS credentials were found: set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY for driver and executors, give the hosts a role, or set "
                "awsProfileName in kafka.sasl.jaas.config to a profile"
            )
        return self._assumed(session, credentials) if self._settings.role_arn else credentials

    def _assumed(self, session: Any, source: Any) -> Any:
        from botocore.credentials import AssumeRoleCredentialFetcher, DeferredRefreshableCredentials

        settings = self._settings
        extra = {"RoleSessionName": settings.role_session_name or _SESSION_NAME}
        if settings.role_external_id:
            extra["ExternalId"] = settings.role_external_id

        def client(*args: Any, **kwargs: Any) -> Any:
            region = settings.sts_region or self._default_region or None
            return session.create_client(*args, **{**kwargs, "region_name": region})

        fetcher = AssumeRoleCredentialFetcher(
            client_creator=client, source_credentials=source, role_arn=settings.role_arn, extra_args=extra
        )
        return DeferredRefreshableCredentials(refresh_using=fetcher.fetch_credentials, method="assume-role")


def signed(host: str, region: str, credentials: Any) -> bytes:
    """The client's message as JSON. It contains a signed HTTP request, which is never sent as one."""
    from botocore.auth import SigV4QueryAuth
    from botocore.awsrequest import AWSRequest

    request = AWSRequest("GET", f"https://{host}/", params={"Action": _ACTION})
    SigV4QueryAuth(credentials, _SERVICE, region, expires=_EXPIRES_S).add_auth(request)
    signed = {name.lower(): value for name, value in parse_qsl(urlsplit(request.url).query)}
    head = {"version": "2020_10_22", "host": host, "user-agent": "kafka-chunked"}
    return json.dumps({**head, **signed}, separators=(",", ":")).encode()


def _iam(message: bytes) -> SaslSteps:
    challenge = yield message
    # The broker accepts the login with the name of the session.
    if not challenge:
        raise ValueError


def region_of(host: str) -> str:
    """The region in an MSK broker's host name, or "" for other host names."""
    match = _REGION.search(host.lower())
    return match["region"] if match else ""
