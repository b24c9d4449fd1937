"""Signals that wait while a call of the program runs that must not be interrupted."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from typing import Any


class HeldSignals:
    """Signals whose Python handlers wait from hold() to release(). A second signal does not wait: its handler may have to
    end a call that never returns. Threads other than the main one run no handlers."""

    def __init__(self) -> None:
        self.handlers: dict[int, Any] = {}
        self.pending: list[Callable[[], Any]] = []

    def hold(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    self.handlers[number] = handler
                    signal.signal(number, self._handle)

    def release(self) -> None:
        """Puts the handlers back, and calls those that waited. After an interrupt it may be called again."""
        for number, handler in list(self.handlers.items()):
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)
        self.handlers.clear()
        while self.pending:
            self.pending.pop()()

    def _handle(self, number: int, frame: Any) -> None:
        handler = self.handlers[number]
        if self.pending:
            handler(number, frame)
        else:
            self.pending.append(functools.partial(handler, number, frame))
