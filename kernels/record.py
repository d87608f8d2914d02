"""What became of one region's kernels in this process: checks, fallbacks and their reasons, by device."""

from __future__ import annotations

import threading

from .self_check import Finding

#: Names of sites that a message lists; the others are counted.
MAX_NAMED = 4


class Record:
    """Kept by a `Runner`, written by its guards, read by reports. Thread-safe.

    Attributes:
        reasons: reason -> number of plans for which the reference runs instead of a kernel.
        rejected: device -> why no kernel of the region runs there any more.
        worst: the finding of all checks that came closest to its bound, or beyond; None before the first.
        checks: number of comparisons made.
    """

    def __init__(self):
        self.reasons: dict[str, int] = {}
        self.rejected: dict[object, str] = {}
        self.worst: Finding | None = None
        self.checks = 0
        self._unchecked: dict[str, None] = {}
        self._overdue: str | None = None
        self._sites: dict[str, None] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict:
        """For copies of reports: all but the lock."""
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def name_site(self, where: str) -> None:
        """Note a place in a model that this region stands for."""
        with self._lock:
            self._sites[where] = None

    def where(self) -> str:
        """The places in words, for messages."""
        with self._lock:
            sites = list(self._sites)
        if not sites:
            return "a norm (its place in the model is not known here)"
        rest = len(sites) - MAX_NAMED
        return ", ".join(sites[:MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")

    def declined(self, reason: str) -> None:
        """A plan runs the reference."""
        with self._lock:
            self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def reject(self, device, reason: str) -> bool:
        """No kernel of the region runs on `device` any more; False where that was so already."""
        with self._lock:
            first = device not in self.rejected
            self.rejected.setdefault(device, reason)
            if first:
                self.reasons[reason] = self.reasons.get(reason, 0) + 1
            return first

    def checked(self, finding: Finding) -> None:
        with self._lock:
            self.checks += 1
            if self.worst is None or finding.ratio > self.worst.ratio:
                self.worst = finding

    def not_checked(self, reason: str) -> None:
        """A comparison was due and could not be made."""
        with self._lock:
            self._unchecked[reason] = None

    def overdue(self, reason: str | None) -> bool:
        """The compiler is late, for that reason, or (None) no longer; False where nothing changed."""
        with self._lock:
            changed = self._overdue != reason
            self._overdue = reason
            return changed

    def self_check(self) -> str:
        """What the comparisons found, in a line; "" before the first."""
        with self._lock:
            words = [f"{self.worst} ({self.checks} checked)"] if self.worst else []
            words += [f"not checked: {reason}" for reason in self._unchecked]
        return "; ".join(words)

    def fallback(self) -> str:
        """Why the reference runs instead of a kernel, in a line; "" where it does not."""
        with self._lock:
            words = list(self.reasons)
            if self._overdue:
                words.append(self._overdue)
        return "; ".join(words)
