"""A segment by itself, by each of its ways: what is measured.

Run as a warm call of the whole chain runs it, by functions written out as source (chain_program.py), so that
the host's time is that of such a call. What a segment reads stays as it was, however often it is run; in a
call of the chain, a region may be written over a product of an earlier segment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from .chain import Chain, RegionStage, walk
from .chain_fused import FusedSegment
from .chain_program import Step, program
from .chain_question import LIBRARY
from .chain_segments import Segment, norm_alone
from .launch import Runner


class Trial:
    """The calls that a Question about one segment asks for."""

    def __init__(self, segment: Segment, steps: Mapping[str, Step], runners: Mapping[tuple, Runner],
                 over: Mapping[tuple, str | None]):
        """`steps`: what runs it, by the word of each way; `runners`, `over`: see `chain_program.program`."""
        stages = segment.stages
        regions = [stage for stage in stages if isinstance(stage, RegionStage)]
        made = {name for stage in stages for name in stage.names}
        spent = {name for _, names in steps[LIBRARY].stages for name in names}
        self._segment, self._steps, self._runners = segment, steps, runners
        self._chain = Chain(
            tuple(dict.fromkeys(name for stage in stages for name in stage.reads if name not in made)),
            tuple(dict.fromkeys(name for stage in regions for name in stage.scalars)), stages,
            tuple(name for stage in stages for name in stage.names if name not in spent))
        self._over = {stage.names: over[stage.names] if over[stage.names] in made else None
                      for stage in regions}
        self._written = {over[stage.names] for stage in regions} - made - {None}
        self._programs: dict[str, Callable] = {}

    def call(self, word: str, values: Mapping[str, torch.Tensor],
             numbers: Mapping[str, float]) -> Callable[[Sequence[Callable]], tuple[torch.Tensor, ...]]:
        """`run(kernels)`, which runs the segment in the way `word` on these values and gives what later ones
        can read of it. `kernels`: the plan of its one kernel, if it runs one."""
        run = self._programs.get(word)
        if run is None:
            run, _ = program(self._chain, [self._steps[word]], self._runners, self._over)
            self._programs[word] = run
        inputs, scalars = [values[name] for name in self._chain.inputs], [
            numbers[name] for name in self._chain.scalars]
        return lambda kernels=(): run(kernels, inputs, scalars)

    def copy(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`values`, with copies of those that the segment is written over in a call of the chain."""
        return {name: x.clone() if name in self._written else x for name, x in values.items()}

    def behind_norm(self, values: Mapping[str, torch.Tensor],
                    numbers: Mapping[str, float]) -> dict[str, torch.Tensor]:
        """`values`, and what the norm in front makes of them."""
        found = dict(values)
        if self._segment.norm is not None:
            walk([(self._segment.norm, ())], found, numbers,
                 lambda stage, args, scalars: self._runners[stage.names](args, scalars))
        return found

    def before_kernel(self, fused: FusedSegment, values: Mapping[str, torch.Tensor],
                      numbers: Mapping[str, float]) -> dict[str, torch.Tensor]:
        """`values`, and what the norm makes of them where that runs in front of the one kernel."""
        return self.behind_norm(values, numbers) if norm_alone(self._segment, fused) else dict(values)
