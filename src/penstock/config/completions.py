"""Address of an OpenAI-compatible server that drafts text: `http://HOST:PORT/v1#MODEL`."""

from __future__ import annotations

import re
from typing import NamedTuple, Self
from urllib.parse import urlsplit

from penstock.config.drafters import is_loopback
from penstock.config.model import ConfigError

_SCHEMES = ("http", "https")
DRAFTER_KEY = "PENSTOCK_DRAFTER_KEY_"
"""Beginning of the variables with the servers' API keys, by the drafter's name."""


class CompletionsServer(NamedTuple):
    """Server that drafts by `POST {url}/completions`.

    model: None leaves it to the server. is_here: its address is a loopback one"""

    url: str
    model: str | None
    is_here: bool

    @classmethod
    def from_path(cls, path: str) -> Self | None:
        """Parse a drafter's path; None if it is no URL. Raises ConfigError."""
        scheme, is_url, _ = path.partition("://")
        if not is_url or scheme.lower() not in _SCHEMES:
            return None
        try:
            parts = urlsplit(path)
            host, _ = parts.hostname, parts.port
        except ValueError:
            host = None
        if not host or not path.isascii() or not path.isprintable() or " " in path:
            raise ConfigError("a drafter's URL is http://HOST:PORT/v1#MODEL, or https")
        if parts.username is not None or parts.password is not None or parts.query:
            # Not repeated here: it may hold a key.
            raise ConfigError(
                "a drafter's URL has no user, password or query; its API key is read from "
                f"{DRAFTER_KEY}NAME"
            )
        url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"
        return cls(url, parts.fragment or None, is_loopback(host))


def key_variable(drafter: str) -> str:
    """Return the environment variable with the API key of a drafter's server."""
    return DRAFTER_KEY + re.sub(r"[^A-Z0-9]", "_", drafter.upper())
