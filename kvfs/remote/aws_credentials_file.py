"""AWS's file of credentials, which the client of S3 does not read itself: ``~/.aws/credentials``.

Another program may renew it at any time, so it is read again while requests come: a token that has expired is replaced
without a new process.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

FILE_BYTES_MAX = 256 << 10
#: For which the client may use what was read. It asks again, ten times a second at most, when less than 5 minutes are
#: left: so always.
FRESH_SECONDS = 60.0
#: Variables of credentials that the client takes before those of the file.
OTHERS = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")


def provider(environment: Mapping[str, str]) -> Callable[[], dict[str, Any]] | None:
    """What the client asks for credentials; None if the environment has others, or the file has none."""
    if any(environment.get(name) for name in OTHERS):
        return None
    path = environment.get("AWS_SHARED_CREDENTIALS_FILE") or os.path.expanduser("~/.aws/credentials")
    profile = environment.get("AWS_PROFILE") or "default"
    try:
        _read(path, profile)
    except (OSError, ValueError, configparser.Error):
        return None

    def credentials() -> dict[str, Any]:
        until = datetime.now(timezone.utc) + timedelta(seconds=FRESH_SECONDS)
        return {**_read(path, profile), "expires_at": until}

    return credentials


def _read(path: str, profile: str) -> dict[str, str | None]:
    """The keys of a profile. ValueError if it has none."""
    with open(path, "rb") as file:
        text = file.read(FILE_BYTES_MAX).decode()
    parsed = configparser.ConfigParser(interpolation=None)
    parsed.read_string(text)
    if not parsed.has_section(profile):
        raise ValueError(f"{path} has no profile {profile}")
    section = parsed[profile]
    key, secret = section.get("aws_access_key_id"), section.get("aws_secret_access_key")
    if not key or not secret:
        raise ValueError(f"{path}: the profile {profile} has no keys")
    return {"access_key_id": key, "secret_access_key": secret, "token": section.get("aws_session_token") or None}
