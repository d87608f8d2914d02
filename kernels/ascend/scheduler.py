"""Cube and vector cores of one block, run in turns.

Each core runs in a thread of its own, but only one at a time: it keeps the turn until it waits for
a flag that is not set. So the order is the same in every run, and a deadlock is seen at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from .memory import InterpreterError


class _Stop(BaseException):
    """Ends the thread of a core when the block has failed."""


class _Task:
    def __init__(self, core: Any, work: Callable[[], None]):
        self.core = core
        self.work = work
        self.condition: Callable[[], bool] | None = None
        self.waits_for = ""
        self.done = False
        self.stopped = False
        self.error: BaseException | None = None
        self.my_turn = threading.Semaphore(0)
        self.turn_over = threading.Semaphore(0)
        core.wait_until = self.wait_until
        self.thread = threading.Thread(target=self._main, daemon=True)
        self.thread.start()

    def _main(self) -> None:
        self.my_turn.acquire()
        try:
            if not self.stopped:
                self.work()
        except _Stop:
            pass
        except BaseException as error:  # handed to the caller's thread
            self.error = error
        self.done = True
        self.turn_over.release()

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Called by the core: give the turn away until the condition holds."""
        if condition():
            return
        self.condition, self.waits_for = condition, what
        self.turn_over.release()
        self.my_turn.acquire()
        if self.stopped:
            raise _Stop
        self.condition = None

    def turn(self) -> None:
        """Called by the scheduler: let the core run until it waits or ends."""
        self.my_turn.release()
        self.turn_over.acquire()
        if self.error is not None:
            raise self.error

    @property
    def is_ready(self) -> bool:
        return self.condition is None or self.condition()


def run_together(cores: Sequence[tuple[Any, Callable[[], None]]]) -> None:
    """Run every core's function to its end. Raises its error; InterpreterError for a deadlock."""
    tasks = [_Task(core, work) for core, work in cores]
    try:
        while live := [task for task in tasks if not task.done]:
            ready = [task for task in live if task.is_ready]
            if not ready:
                waits = "; ".join(f"{t.core.func.name}[{t.core.sub_block}] for {t.waits_for}" for t in live)
                raise InterpreterError(f"deadlock: {waits}")
            ready[0].turn()
    finally:
        for task in tasks:
            if not task.done:
                task.stopped = True
                task.my_turn.release()
            task.thread.join()
