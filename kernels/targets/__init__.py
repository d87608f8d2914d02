"""What a kernel is generated for. One file a backend; each says cores, memory and rules.

To add one: a file with a function that returns a `Target`, and a branch in `target_for`.
"""

from __future__ import annotations

from .target import Target, target_for

__all__ = ["Target", "target_for"]
