"""Which way a segment of a chain takes: measured once on the user's own tensors, and kept.

Two answers, which mostly are one. While a CUDA graph is captured, the way that is fastest on the device is
taken: a replay costs the host nothing. Plain calls with few rows are as fast as the host launches them: there
the longer of the host's and the device's time counts.

What was measured on this device with these versions is read from disk (store.py). An entry is only words and
the text of block shapes: it counts only when all of them are among what would be measured now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from .chain_contest import agree, contest
from .chain_question import ACTIVATED, LIBRARY, ONE_KERNEL, Choice, Question, Way
from .guard import out_of_memory
from .measure import machine, may_measure
from .store import Store

__all__ = ["ACTIVATED", "LIBRARY", "ONE_KERNEL", "Choice", "Question", "Way", "agree", "choose"]

_store = Store("chains")


def choose(question: Question) -> Choice:
    """The fastest ways, measured, or as they were measured before."""
    choice = _choose(question)
    if question.unsupported is None or choice.reason == question.unsupported:
        return choice
    return replace(choice, reason="; ".join(filter(None, (question.unsupported, choice.reason))))


def _choose(question: Question) -> Choice:
    text, configs, unsplit = question.text, (), ()
    if question.unsupported is None:
        configs, unsplit = question.configs(), question.unsplit()
    else:
        if question.by_activated is None:
            return Choice(LIBRARY, reason=question.unsupported)
        text += "\nno kernel"  # what is measured without one is no answer for who has one
    key = _key(text, question.device, question.rows)
    words = (LIBRARY,) if question.by_activated is None else (LIBRARY, ACTIVATED)
    known = _stored(key, (*configs, *unsplit), words)
    if known is not None:
        return known
    if not may_measure(question.device):
        return Choice(LIBRARY, reason="nothing can be measured here, or not during graph capture",
                      final=False)
    try:
        choice = contest(question, configs, unsplit)
    except Exception as error:
        if not out_of_memory(error):
            raise
        choice = Choice(LIBRARY, reason="out of memory while the ways were measured", lasting=False)
    if not choice.lasting:
        _release(question.device)  # not sooner: an exception's frames hold tensors
        return choice
    # Shortened here, not in the file alone: who reads the choice there shall report the same.
    choice = replace(choice, times=_rounded(choice.times), host_times=_rounded(choice.host_times),
                     reason=choice.reason[:500])
    _store.put(key, {**{name: {"way": way.word, "config": str(way.config)}
                        for name, way in (("plain", choice.plain), ("in graph", choice.captured))},
                     "reason": choice.reason, "times": choice.times, "host times": choice.host_times})
    return choice


def _rounded(times: dict[str, float]) -> dict[str, float]:
    return {way: round(us, 2) for way, us in times.items()}


def worth_compiling(text: str, device: torch.device, rows: int,
                    configs: Sequence[object]) -> Sequence[object]:
    """Those of `configs` whose kernels a Question with this text will want: those that were chosen before,
    or all."""
    known = _stored(_key(text, device, rows), configs, (LIBRARY, ACTIVATED))
    if known is None:
        return configs if may_measure(device) else ()
    return tuple(dict.fromkeys(way.config for way in (known.plain, known.captured) if way.config is not None))


def _release(device: torch.device) -> None:
    """Give back what measuring has reserved."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _stored(key: str, configs: Sequence[object], words: Sequence[str]) -> Choice | None:
    """What is kept under `key`; None where there is nothing, or something else than a choice between these
    block shapes and ways: an entry of a version that kept one way for all calls is measured again."""
    entry = _store.get(key)
    if entry is None:
        return None
    by_text = {str(config): config for config in configs}
    plain, captured = (_way(entry.get(name), by_text, words) for name in ("plain", "in graph"))
    times, host, reason = (entry.get(name) for name in ("times", "host times", "reason"))
    if plain is None or captured is None or not _are_times(times) or not _are_times(host) or \
            not isinstance(reason, str):
        return None
    return Choice(*plain, times, reason, host_times=host, in_graph=None if captured == plain else captured)


def _way(entry: object, configs: dict[str, object], words: Sequence[str]) -> Way | None:
    if not isinstance(entry, dict):
        return None
    word, text = entry.get("way"), entry.get("config")
    if word in words:
        return Way(word)
    known = word == ONE_KERNEL and isinstance(text, str) and text in configs
    return Way(word, configs[text]) if known else None


def _are_times(entry: object) -> bool:
    return isinstance(entry, dict) and all(isinstance(us, (int, float)) for us in entry.values())


def _key(text: str, device: torch.device, rows: int) -> str:
    return "\n".join((machine(device), f"rows {rows}", text))
