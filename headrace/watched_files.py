"""A value that is read from files, and read again when they change: certificates, keys, lists of credentials.

Files are looked at when the value is asked for, so nothing runs in the background. A rename over the old file, a link
that points elsewhere (as Kubernetes does with secrets) and a write in place are all noticed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from headrace.errors import InvalidRequest

log = structlog.get_logger()

Value = TypeVar("Value")
_Stamp = tuple[tuple[int, int, int] | None, ...]


class WatchedFiles(Generic[Value]):
    """Of any thread."""

    def __init__(self, what: str, paths: Sequence[Path], read: Callable[[], Value]) -> None:
        """Reads at once. `what` is the setting's name, for errors. Raises InvalidRequest when that fails; later, what
        can not be read is logged once, and the last good value stays.
        """
        self._what = what
        self._paths = tuple(paths)
        self._read = read
        self._lock = threading.Lock()
        self._stamp = self._stamps()
        self._value = self._checked()

    def get(self) -> Value:
        stamp = self._stamps()
        if stamp == self._stamp:
            return self._value
        with self._lock:
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._value = self._checked()
                    log.info("files read again", setting=self._what)
                except InvalidRequest as error:
                    log.error("files can not be used, what they held before stays", error=str(error))
            return self._value

    def _checked(self) -> Value:
        try:
            return self._read()
        except (OSError, ValueError) as error:
            files = ", ".join(map(str, self._paths))
            raise InvalidRequest(self._what, files, f"can not be read: {error}") from None

    def _stamps(self) -> _Stamp:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
