"""File of learned numbers that outlives the engine, in JSON."""

from __future__ import annotations

import base64
import contextlib
import glob
import json
import logging
import math
import os
import tempfile
import threading
from array import array
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config import EngineConfig
from penstock.core.learn import Estimators
from penstock.core.lookup import TextLookUp
from penstock.engine.backends import Models
from penstock.engine.fingerprint import canonical, digest, fingerprint

_FORMAT = 2
"""Version of the file; others are not read."""
_SAVE_EVERY_S = 180.0
_UNFIT = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""Errors of a file with other contents than were ever written."""

_log = logging.getLogger(__name__)


class StateFile:
    """File of one combination of models, machine and kernels; the last writer wins."""

    def __init__(
        self, config: EngineConfig, folder: Path, models: Models, look_up: TextLookUp | None
    ) -> None:
        self._config = config
        self._vocab_size = models.target.vocab_size
        self._look_up = look_up
        self._fingerprint = fingerprint(config, models)
        self._folder = folder
        # Names of files are at most 255 bytes long.
        name = config.target_name.replace("/", "--")
        self._stem = name.encode()[:200].decode(errors="ignore")
        self.path = self._folder / f"{self._stem}-{digest(self._fingerprint)[:16]}.json"
        self._learn = Estimators()
        self._save_at = -math.inf
        self._writer: threading.Thread | None = None
        self._warned = False

    def restore(self) -> Estimators:
        """Return the engine's estimators, restored where the file fits.

        A file that does not fit is ignored with one line in the log."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            self._report(error)
        path = self._newest()
        if path is not None:
            try:
                self._restore(self._read(path))
                _log.info("%s", self._summary(path))
            except OSError as error:
                _log.warning("cannot read the state %s: %s", path, error.strerror)
            except _UNFIT as error:
                reason = " ".join(f"{error}".split())[:200]
                _log.warning("the state %s is ignored: %s", path, reason or type(error).__name__)
                self._learn = Estimators()
        return self._learn

    def is_due(self, now: float) -> bool:
        """Return True every few minutes of serving."""
        if now < self._save_at:
            return False
        is_first, self._save_at = self._save_at == -math.inf, now + _SAVE_EVERY_S
        return not is_first

    def save_soon(self, tenants: Collection[str]) -> None:
        """Write the file in another thread. tenants: as for `save`."""
        if self._writer is not None and self._writer.is_alive():
            return
        learned = self._learned(tenants)
        self._writer = threading.Thread(target=self._write, args=(learned,), name="penstock-state")
        self._writer.start()

    def save(self, tenants: Collection[str]) -> None:
        """Write the file. tenants: those whose outputs may be written."""
        if self._writer is not None:
            self._writer.join()
        self._write(self._learned(tenants))

    # --- reading --------------------------------------------------------------------------------

    def _newest(self) -> Path | None:
        """Return the file, or else the newest of the same target, to say why it does not fit."""
        others = glob.escape(self._stem) + "-" + "[0-9a-f]" * 16 + ".json"
        # The folder may be closed to this user, of which the log has a line.
        with contextlib.suppress(OSError):
            if self.path.exists():
                return self.path
            return max(self._folder.glob(others), key=lambda p: p.stat().st_mtime, default=None)
        return None

    def _read(self, path: Path) -> Any:
        """Return what was saved. Raises OSError, or one of _UNFIT with the reason."""
        if not path.is_file():
            raise ValueError("it is not a file")
        saved = json.loads(path.read_bytes(), parse_constant=_refuse)
        if saved["version"] != _FORMAT:
            raise ValueError(f"it has version {saved['version']!r}; this program reads {_FORMAT}")
        if saved["sha256"] != digest(saved["body"]):
            raise ValueError("its checksum is wrong")
        of, own = saved["body"]["of"], self._fingerprint
        other = [name for name in own if of.get(name) != own[name]]
        if other:
            raise ValueError(f"it was written with other {', '.join(other)}")
        return saved["body"]["learned"]

    def _restore(self, learned: Any) -> None:
        """Take over what was saved, of tenants that still allow it. Raises as _UNFIT."""
        memory = {
            tenant: _tokens(text, self._vocab_size)
            for tenant, text in learned["memory"].items()
            if tenant in self._config.tenants and self._config.tenants[tenant].save_outputs
        }
        self._learn.restore(learned, times=self._config.profile is None)
        if self._look_up is not None:
            self._look_up.restore_memory(memory)

    def _summary(self, path: Path) -> str:
        acceptance = self._learn.acceptance
        names = acceptance.state()["tokens"]
        rates = [f"{name} {acceptance.mean('', name):.2f}" for name in names] or ["unknown"]
        step_ms = self._learn.times.target(1) * 1e3
        known = f"a step of one row takes {step_ms:.3g} ms, acceptance: {', '.join(rates)}"
        return f"restored what was learned from {path}: {known}"

    # --- writing --------------------------------------------------------------------------------

    def _learned(self, tenants: Collection[str]) -> dict[str, Any]:
        """Return what is saved. Outputs are copied, as their encoding takes longer."""
        memory = {} if self._look_up is None else self._look_up.memory(tenants)
        return {**self._learn.state(), "memory": memory}

    def _write(self, learned: dict[str, Any]) -> None:
        """Replace the file; a failure is reported once."""
        learned["memory"] = {tenant: _text(t) for tenant, t in learned["memory"].items()}
        body = {"of": self._fingerprint, "learned": learned}
        try:
            text = canonical({"version": _FORMAT, "sha256": digest(body), "body": body})
            _replace(self.path, text)
            self._warned = False
        except (OSError, ValueError, TypeError) as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        """Warn of the first of several failures to write."""
        if not self._warned:
            _log.warning("what was learned cannot be saved in %s: %s", self._folder, error)
        self._warned = True


def _replace(path: Path, text: str) -> None:
    """Write a file that only its owner may read; after a crash it is the old one or the new one."""
    handle, temporary = tempfile.mkstemp(".tmp", f"{path.stem}-", path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def _text(tokens: array[int]) -> str:
    return base64.b64encode(np.asarray(tokens, dtype="<i4").tobytes()).decode()


def _tokens(text: str, vocab_size: int) -> list[int]:
    """Return remembered tokens. Raises ValueError for others than the vocabulary's."""
    tokens = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
    if tokens.size and not -1 <= tokens.min() <= tokens.max() < vocab_size:
        raise ValueError("a remembered token is not in the vocabulary")
    return [*map(int, tokens)]
