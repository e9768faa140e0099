"""When the stages of a simulated pipeline are free. Pure."""

from __future__ import annotations


class StageClock:
    """Steps go through all stages in order, one at a time on each. With one stage, they follow each other."""

    def __init__(self, num_stages: int) -> None:
        self._free_s = [0.0] * num_stages

    @property
    def free_s(self) -> float:
        """Returns the time at which the first stage has computed the last step that entered."""
        return self._free_s[0]

    def enter(self, now_s: float, stage_s: float) -> float:
        """A step enters that takes `stage_s` on each stage. Returns when the last stage has computed it."""
        at_s = now_s
        for stage, free_s in enumerate(self._free_s):
            at_s = self._free_s[stage] = max(at_s, free_s) + stage_s
        return at_s
