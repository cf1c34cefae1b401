"""Logs on standard error, as text or as JSON, with the id of the HTTP request."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

from penstock.json_text import dumps

ACCESS_LOG = "penstock.access"
"""Logger of a line for every HTTP request, in JSON logs."""

LogFormat = Literal["text", "json"]

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the HTTP request being served, as its client sees it."""


class TextFormatter(logging.Formatter):
    """Text lines; those about an HTTP request begin with its id."""

    def __init__(self) -> None:
        super().__init__("penstock: %(levelname)s: %(request)s%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        known = request_id.get()
        record.request = "" if known is None else f"request {known}: "
        return super().format(record)


class JsonFormatter(logging.Formatter):
    """JSON lines: time, level, logger, message, request_id, exception, and `extra["fields"]`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        known = request_id.get()
        if known is not None:
            line["request_id"] = known
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return dumps({**line, **getattr(record, "fields", {})})


def configure_logging(log_format: LogFormat) -> None:
    """Log to standard error in this form. Lines that cannot be written are lost."""
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter() if log_format == "text" else JsonFormatter())
    logging.basicConfig(handlers=[handler])
    logging.getLogger("penstock").setLevel(logging.INFO)
    if log_format == "json":
        logging.getLogger(ACCESS_LOG).setLevel(logging.DEBUG)
    logging.raiseExceptions = False
