"""Scheduling policies: what a step contains, and which sequences get how many blocks at admission.

A policy's `fill` calls the planner's methods in its order of preference; all else is the scheduler's. Another package
adds a policy by an entry point in the group `kvrelay.schedulers`, which names a class that implements
`SchedulingPolicy`. It is called without arguments for every scheduler.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Protocol, cast

from kvrelay.scheduler_names import ENTRY_POINT_GROUP, UnknownScheduler, check_scheduler_name
from kvrelay.scheduling.memory.block_manager import BlockManager, OnDemandBlocks, WholeSequenceBlocks
from kvrelay.scheduling.plan import PlanBuilder
from kvrelay.scheduling.step_planner import StepPlanner


class SchedulingPolicy(Protocol):
    """Decides what each step contains. Every scheduler has a policy object of its own, which may keep state between
    steps. `block_manager` decides how many blocks a sequence gets at admission. `cuts_prompts`: prompts are computed in
    chunks, else whole. `mixes_prompts_and_decodes`: a sequence that is resumed decodes in the step that admits it."""

    block_manager: type[BlockManager] = BlockManager
    cuts_prompts: bool = False
    mixes_prompts_and_decodes: bool = False

    def fill(self, planner: StepPlanner, builder: PlanBuilder) -> None:
        """Fills the builder of a step by the planner's methods."""
        ...


class SarathiPolicy(SchedulingPolicy):
    """Stall-free batching under a token budget (Agrawal et al., Sarathi-Serve, OSDI 2024).

    Each step holds every running decode first, then prompt chunks in what is left of the budget, so that the gap
    between two tokens of a stream is bounded by one step of the budget, whatever the length of the prompts beside it. A
    decode that finds no block preempts others.
    """

    cuts_prompts = True
    mixes_prompts_and_decodes = True

    def fill(self, planner: StepPlanner, builder: PlanBuilder) -> None:
        planner.plan_decodes(builder)
        planner.admit_neglected(builder)
        planner.plan_prompts(builder)
        planner.admit_prompts(builder)


class VllmPolicy(SchedulingPolicy):
    """Whole prompts first, then decodes: vLLM's first scheduler (Kwon et al., PagedAttention, SOSP 2023, section 4.5).

    Prompts run within the token budget, or one alone that is longer. Time to first token is short and batches are
    large, but a step that computes prompts computes nothing else: running decodes wait for as long as the prompts are
    long.
    """

    block_manager = OnDemandBlocks

    def fill(self, planner: StepPlanner, builder: PlanBuilder) -> None:
        planner.plan_prompts(builder)
        planner.admit_prompts(builder)
        if not builder.prompts:
            planner.plan_decodes(builder)


class SimpleChunkingPolicy(SchedulingPolicy):
    """Chunked prompts without mixing: the ablation "chunked prefills only" (Agrawal et al., Sarathi-Serve, OSDI 2024,
    section 5.4).

    Steps of prompt chunks and steps of decodes take turns, so that a decode waits for one chunk at most, but every
    chunk's step is one without decodes. A step without work is left to the other kind.
    """

    cuts_prompts = True

    def __init__(self) -> None:
        self._decodes_are_next = False

    def fill(self, planner: StepPlanner, builder: PlanBuilder) -> None:
        if self._decodes_are_next:
            planner.plan_decodes(builder)
            builder.held_back = "it was the decodes' turn" if builder.decodes else ""
        if not builder.decodes:
            planner.plan_prompts(builder)
            planner.admit_prompts(builder)
        if not builder.rows:
            planner.plan_decodes(builder)
        self._decodes_are_next = bool(builder.prompts)


class OrcaPolicy(SchedulingPolicy):
    """Iteration-level scheduling (Yu et al., Orca, OSDI 2022, section 3): sequences join and leave at every step.

    Whole prompts run beside the decodes, so decodes never wait, but a step with a long prompt is long. Blocks for the
    longest possible output are reserved at admission, so no sequence is ever preempted, and most of these blocks stay
    empty. Orca bounds a batch by its number of sequences only. Here the token budget also bounds the prompts that start
    in one step, except that the first one may be longer.
    """

    block_manager = WholeSequenceBlocks
    mixes_prompts_and_decodes = True

    def fill(self, planner: StepPlanner, builder: PlanBuilder) -> None:
        planner.plan_decodes(builder)
        planner.plan_prompts(builder)
        planner.admit_prompts(builder)


class FasterTransformerPolicy(SchedulingPolicy):
    """Request-level batches, as in NVIDIA's FasterTransformer: a batch is formed when the one before has finished.

    Its prompts are computed first, then all its sequences decode together. The slot of a sequence that ends early
    remains empty, and an arrival waits for the longest output of the batch before it. A handoff joins the decodes as
    soon as it is complete.
    """

    block_manager = WholeSequenceBlocks

    def fill(self, planner: StepPlanner, builder: PlanBuilder) -> None:
        if not planner.running:
            planner.admit_prompts(builder, beyond_budget=True)
            if not builder.prompts:  # the admitted sequences were preempted, and continue their output
                planner.plan_decodes(builder)
            return
        planner.admit_rest_of_groups(builder)
        planner.admit_handoffs(builder)
        builder.held_back = "a batch is running" if planner.waiting else "queue empty"
        planner.plan_prompts(builder)
        if not builder.prompts:
            planner.plan_decodes(builder)


BUILT_IN: dict[str, type[SchedulingPolicy]] = {
    "sarathi": SarathiPolicy,
    "vllm": VllmPolicy,
    "simple_chunking": SimpleChunkingPolicy,
    "orca": OrcaPolicy,
    "faster_transformer": FasterTransformerPolicy,
}


def find_policy(name: str) -> type[SchedulingPolicy]:
    """Returns the class of a policy. Other packages cannot replace a built-in name. Raises UnknownScheduler."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    found = list(entry_points(group=ENTRY_POINT_GROUP, name=check_scheduler_name(name)))
    if len(found) > 1:
        offers = ", ".join(entry_point.value for entry_point in found)
        raise UnknownScheduler(f"{name} is offered more than once: {offers}")
    return cast("type[SchedulingPolicy]", found[0].load())
