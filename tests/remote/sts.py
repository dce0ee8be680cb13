"""AssumeRole of a real STS, that of Ceph's gateway, signed as AWS's version 4 says."""

from __future__ import annotations

import hashlib
import hmac
import re
import urllib.request
from datetime import datetime, timezone
from typing import NamedTuple
from urllib.parse import urlencode, urlsplit

REGION = "us-east-1"


class Session(NamedTuple):
    """Credentials that end by themselves."""

    access_key: str
    secret_key: str
    token: str
    ends: float  # seconds since 1970, by the gateway's clock

    def profile(self) -> str:
        """What AWS's file of credentials holds of it."""
        keys = f"aws_access_key_id = {self.access_key}\naws_secret_access_key = {self.secret_key}\n"
        return f"[default]\n{keys}aws_session_token = {self.token}\n"


def assume_role(endpoint: str, access_key: str, secret_key: str, arn: str, seconds: int) -> Session:
    """A session of a role, for ``seconds``. urllib's errors."""
    wanted = {
        "Action": "AssumeRole", "RoleArn": arn, "RoleSessionName": "host", "DurationSeconds": seconds,
        "Version": "2011-06-15",
    }  # fmt: skip
    body = urlencode(wanted).encode()
    request = urllib.request.Request(f"{endpoint}/", body, _signed(endpoint, body, access_key, secret_key))
    with urllib.request.urlopen(request, timeout=60) as answer:
        said = answer.read().decode()
    key, secret, token, ends = (
        re.findall(f"<{name}>(.*?)</{name}>", said)[0]
        for name in ("AccessKeyId", "SecretAccessKey", "SessionToken", "Expiration")
    )
    until = datetime.fromisoformat(ends.partition(".")[0]).replace(tzinfo=timezone.utc)
    return Session(key, secret, token, until.timestamp())


def _signed(endpoint: str, body: bytes, access_key: str, secret_key: str) -> dict[str, str]:
    """Headers of a POST."""
    at = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    headers = {
        "content-type": "application/x-www-form-urlencoded; charset=utf-8", "host": urlsplit(endpoint).netloc,
        "x-amz-date": at,
    }  # fmt: skip
    names = ";".join(headers)  # in their order
    lines = [f"{name}:{value}" for name, value in headers.items()]
    canonical = "\n".join(["POST", "/", "", *lines, "", names, hashlib.sha256(body).hexdigest()])
    scope = [at[:8], REGION, "sts", "aws4_request"]
    text = "\n".join(["AWS4-HMAC-SHA256", at, "/".join(scope), hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{secret_key}".encode()
    for part in scope:
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    credential = f"{access_key}/{'/'.join(scope)}"
    headers["Authorization"] = f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={names}, Signature={signature}"
    return headers
