"""The thread in which an engine runs."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable

from palimpsest.engine.request import Piece, Request, Ticket
from palimpsest.engine.scheduler import Engine


class Worker:
    """Runs rounds while there is work, sleeps while there is none."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, deliver: Callable[[Piece], None]) -> Ticket:
        """As `Engine.submit`; `deliver` is called in the engine's thread and must not wait."""
        ticket = self.engine.submit(request, deliver)
        self._notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        self.engine.cancel(ticket)
        self._notify()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Ends the thread after the round that runs; what is unfinished fails."""
        self._stopping = True
        self._notify()
        self._thread.join()

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _run(self) -> None:
        while not self._stopping:
            try:
                busy = self.engine.step()
            except Exception as error:  # one broken round must not end the service
                traceback.print_exc()
                self.engine.fail_all(f"the engine failed: {error}")
                continue
            if not busy:
                with self._wake:
                    self._wake.wait_for(lambda: self._stopping or not self.engine.idle)
        self.engine.fail_all("the server is shutting down")
