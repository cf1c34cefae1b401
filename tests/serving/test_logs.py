"""Lines of the log."""

import json
import logging
import subprocess
import sys

from penstock.serving.logs import JsonFormatter, TextFormatter, request_id


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("penstock.x", logging.WARNING, "f.py", 1, message, args, None)
    made.__dict__.update(extra)
    return made


def test_one_object_a_line() -> None:
    token = request_id.set("req-1")
    try:
        line = JsonFormatter().format(record("two\nlines of %s", "it", fields={"status": 200}))
        text = TextFormatter().format(record("hello"))
    finally:
        request_id.reset(token)
    assert "\n" not in line
    read = json.loads(line)
    assert read.pop("time").endswith("+00:00")
    assert read == {
        "level": "WARNING",
        "logger": "penstock.x",
        "message": "two\nlines of it",
        "request_id": "req-1",
        "status": 200,
    }
    assert text == "penstock: WARNING: request req-1: hello"
    assert "request_id" not in json.loads(JsonFormatter().format(record("hello")))


def test_exceptions_are_part_of_the_line() -> None:
    try:
        raise ValueError("no\nway")
    except ValueError:
        failed = logging.LogRecord("x", logging.ERROR, "f.py", 1, "failed", (), sys.exc_info())
    line = JsonFormatter().format(failed)
    assert "\n" not in line
    assert json.loads(line)["exception"].endswith("ValueError: no\nway")


def test_a_full_disk_ends_nothing() -> None:
    code = (
        "import logging; from penstock.serving.logs import configure_logging\n"
        "configure_logging('json'); logging.getLogger('penstock').warning('x' * 9999); print('on')"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=full, text=True, check=True
        )
    assert done.stdout == "on\n"
