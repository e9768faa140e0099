"""A real fleet view and placement over workers that report when they are told to."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from kvrelay.fleet import WorkerRecord
from kvrelay.protocol.messages import LoadReport, PeerRef, Status
from kvrelay.scheduling.step_cost import StepCost
from kvrelay_router.dispatch.placement import Placement, PromptPrefixes, work_of
from kvrelay_router.fleet.load import Held, OutstandingLoad
from kvrelay_router.fleet.view import FleetView
from kvrelay_router.routing.estimates import Decision
from kvrelay_router.routing.policy import PolicyName

COST = StepCost(5e-3, 5e-5, 5e-9)
BLOCK = 16


def names(decision: Decision) -> tuple[str | None, str | None]:
    return (
        decision.prefill.worker_id if decision.prefill is not None else None,
        decision.decode.worker_id if decision.decode is not None else None,
    )


class Fleet:
    """A real view and placement over workers that report when they are told to, and compute when time passes."""

    def __init__(
        self,
        *names: str,
        policy: PolicyName = "cost",
        draining: tuple[str, ...] = (),
        numerics: Mapping[str, str] = MappingProxyType({}),
        local_prefill_tokens: int | None = 0,
    ) -> None:
        self.load = OutstandingLoad()
        self.view = FleetView(self.load)
        self.records = {name: record_of(name, numerics=numerics.get(name, "")) for name in names}
        self.view.registered(self.records.values(), 0.0)
        self.silent_s: dict[str, float] = {}
        self.placement = Placement(
            self.view,
            policy,
            local_prefill_tokens,
            is_silent=lambda peer: self.silent_s.get(peer.peer_id, 0.0) > 1.5,
        )
        for name in names:
            self.report(name, draining=name in draining)

    def report(self, name: str, *, draining: bool = False, **load: Any) -> None:
        record = self.records[name]
        report = LoadReport(step_cost=(COST.fixed_s, COST.token_s, COST.pair_s), **load)
        status = Status(query=1, draining=draining, queues={}, blocks={"free": 4096}, totals={}, load=report)
        self.view.answered(peer_of(record), status, 0.0)

    def place(self, prompt_ids: list[int], number: int = 0) -> tuple[Decision, Held]:
        prompt = PromptPrefixes(prompt_ids)
        decision = self.placement.place(f"r{number}", prompt=prompt, needs_decode=True)
        assert isinstance(decision, Decision) and decision.decode is not None
        self.placement.placed(decision, prompt)
        held, work = Held(), work_of(decision, len(prompt_ids))
        computes = decision.prefill or decision.decode
        self.load.move(held, computes.peer, work.num_tokens, decision.decode.peer, num_pairs=work.num_pairs)
        return decision, held


def record_of(name: str, **changes: Any) -> WorkerRecord:
    plain = WorkerRecord(
        worker_id=name,
        role="prefill" if name.startswith("p") else "decode",
        incarnation="1",
        address=f"tcp://{name}",
        model="m",
        fingerprint="f",
        protocol_version=1,
        block_size=BLOCK,
        num_blocks=4096,
        max_model_len=1 << 16,
        vocab_size=1 << 16,
        token_budget=2048,
    )
    return msgspec.structs.replace(plain, **changes)


def peer_of(record: WorkerRecord) -> PeerRef:
    return PeerRef(record.worker_id, record.incarnation, record.address)


def chosen_prefill(decision: Decision) -> str:
    assert decision.prefill is not None
    return decision.prefill.worker_id
