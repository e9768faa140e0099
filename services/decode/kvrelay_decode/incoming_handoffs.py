"""Handoffs on a decode worker, from prefill's Reserve to the commit: remote blocks, transfers and quarantine.

The scheduler decides when a handoff is admitted: each waits in its queue. The machine in `kvrelay.handoff.receiver`
decides about one reservation. This module passes messages and transfers to both and carries out what they return.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from kvrelay.awake_clock import AwakeClock
from kvrelay.handoff.quarantine import Quarantine
from kvrelay.handoff.receiver import (
    BlocksOverdue,
    Commit,
    CommitRefused,
    FreeBlocks,
    KeepBlocks,
    PrefillLost,
    ReceiverHandoff,
    ReceiverHandoffEvent,
    ReceiverInstruction,
    ReceiverState,
    SlotsSafe,
    StopReceiving,
)
from kvrelay.handoff.transports.base import Corrupted, ReceiverEvent, TransferReceiver
from kvrelay.handoff.transports.sharded import ShardedReceiver
from kvrelay.kv.shard_map import ShardShape
from kvrelay.process_identity import can_be_seen, has_ended
from kvrelay.protocol.messages import (
    Abort,
    Cancel,
    Committed,
    Drained,
    Granted,
    Handoff,
    Header,
    PeerRef,
    Refused,
    Released,
    Reserve,
)
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.ranks.transfers import as_sharded_receiver
from kvrelay.scheduling.plan import SequenceOutput, StepPlan
from kvrelay.scheduling.sequence import RemoteKV, Sequence, SequenceState
from kvrelay.step.batch import Candidates
from kvrelay.telemetry.event_log import recorded
from kvrelay.telemetry.handoffs import FailureCause, HandoffMeter, HandoffTimings
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.requests import (
    OpenRequests,
    ScoreParts,
    deadline_of,
    is_same_process,
    make_sequence,
    sequence_key,
)

log = logging.getLogger(__name__)

BLOCKS_DUE_S = 10.0
"""The handoff ends if its message is here, blocks are missing, and its sender has sent no block for this long. The
sender itself notices a broken connection at once and a hanging write within 3 s."""
ONE_RANK = ShardShape(1, 0)
NOT_COMMITTED = (ReceiverState.ASKED, ReceiverState.RESERVED, ReceiverState.FILLING)
CAUSES: dict[type[object], FailureCause] = {
    Abort: "aborted",
    Cancel: "cancelled",
    PrefillLost: "prefill_lost",
    Corrupted: "transfer",
    BlocksOverdue: "transfer",
}


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """One sequence on a decode worker. `handoff` and the fields of its sender are for a sequence that prefill hands
    over, not for a local prompt."""

    sequence: Sequence
    deadline: float
    handoff: ReceiverHandoff | None = None
    handle: Callable[[ReceiverHandoffEvent], list[ReceiverInstruction]] | None = None  # feeds `handoff`
    prefill: PeerRef | None = None
    processes: tuple[str, ...] = ()  # of the prefill worker's ranks, see `kvrelay.process_identity`
    transport: str = ""
    shards: ShardShape = ONE_RANK  # the prefill worker's
    first_index: int = 0  # output index of the first token of this attempt
    handed_at: float = 0.0  # when the handoff message came
    scores: ScoreParts | None = None  # if log-probabilities of the prompt are asked for
    timings: HandoffTimings = field(default_factory=HandoffTimings)

    @property
    def is_quarantined(self) -> bool:
        """Returns whether the handoff has ended, but its sender may still write into its blocks."""
        return self.handoff is not None and self.handoff.state is ReceiverState.QUARANTINED

    @property
    def is_waiting(self) -> bool:
        """Returns whether the handoff waits for its reservation and holds nothing."""
        return self.handoff is not None and self.handoff.state is ReceiverState.ASKED


class IncomingHandoffs:
    """`requests` are all requests of the role, local prompts included. `on_commit` also gets the output of a
    sequence that ends with the prompt."""

    def __init__(
        self,
        context: WorkerContext,
        receivers: Mapping[str, TransferReceiver | ShardedReceiver],
        requests: OpenRequests[DecodeRequest],
        on_commit: Callable[[DecodeRequest, Handoff, SequenceOutput | None], None],
    ) -> None:
        self.totals: dict[str, float] = dict.fromkeys(
            ("handoffs_committed", "corrupted_blocks", "failed_transfers", "quarantines"), 0
        )
        self._context = context
        self._scheduler = context.scheduler
        self._receivers = {name: as_sharded_receiver(receiver, context.spec) for name, receiver in receivers.items()}
        self._requests = requests
        self._on_commit = on_commit
        self._numbers = itertools.count(1)
        self._keys: dict[str, SequenceKey] = {}  # key: reservation
        self._last_transports: dict[PeerRef, str] = {}  # that each prefill worker used
        self._clock = AwakeClock()
        self._last_blocks: dict[PeerRef, float] = {}  # when the last block of each prefill worker came
        self._quarantine = Quarantine(has_ended, can_be_seen)
        self._meter = HandoffMeter(
            "decode", context.spec.block_bytes, context.instruments, context.metrics, context.tracer, context.recent
        )
        self._withheld: frozenset[SequenceKey] = frozenset()  # quarantined sequences that may stay here for ever
        self._not_stepped: dict[SequenceKey, HandoffTimings] = {}  # committed, and in no step so far

    def start(self) -> None:
        """Starts the transports. Needs a running event loop."""
        for receiver in self._receivers.values():
            receiver.start(self._on_transfer)

    def close(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()

    @property
    def num_lost(self) -> int:
        """Reservations in quarantine whose sender is silent and not proven to have stopped writing."""
        return self._quarantine.num_lost

    # -- from the role ------------------------------------------------------------------------------------------------

    def begin_drain(self) -> None:
        """Refuses every handoff that waits for its reservation."""
        for request in list(self._requests.values()):
            if request.is_waiting:
                self.cancel(request, "the decode worker is draining")

    def admit(self) -> None:
        """Begins the transfers of the handoffs that the scheduler admits now. To be called after every change that may
        allow an admission; the scheduler also admits handoffs with each plan."""
        for sequence in self._scheduler.reserve():
            self._begin_transfer(self._requests[sequence.key])

    def planned(self, plan: StepPlan) -> None:
        """A step was planned: handoffs were admitted with it, and others are in their first step."""
        for sequence in plan.reservations:
            self._begin_transfer(self._requests[sequence.key])
        if self._not_stepped:
            for key in [key for key in self._not_stepped if key not in self._requests]:
                del self._not_stepped[key]
            for row in plan.rows:
                timings = self._not_stepped.pop(row.sequence.key, None)
                if timings is not None:
                    self._meter.first_step(timings, row.sequence.key)

    def made_room(self) -> None:
        """Blocks or places among the running sequences were freed."""
        self._context.steps.wake()
        self.admit()

    def cancel(self, request: DecodeRequest, reason: str) -> None:
        """Ends a handoff that is not committed, and tells prefill."""
        self._feed(request, Cancel(reason=reason))

    def peer_lost(self, peer: PeerRef, *, replaced: bool) -> None:
        """A prefill worker is silent or gone. Only if it was `replaced` is it certain that it is gone."""
        lost = [each for each in self._requests.values() if each.prefill == peer and each.handoff is not None]
        # Those that wait leave the queue first: what the others free must not be reserved for one of them.
        for request in sorted(lost, key=lambda each: not each.is_waiting):
            self._feed(request, PrefillLost())
        self._last_transports.pop(peer, None)  # the next worker of this name may use another transport
        self._last_blocks.pop(peer, None)
        self._quarantine.lost(peer, time.monotonic(), replaced=replaced)

    def tick_quarantine(self, now: float) -> None:
        """Frees blocks that are proven safe, and sends Released again to senders that are silent."""
        due = self._quarantine.tick(now)
        for key in due.safe:
            self._feed(self._requests[key], SlotsSafe())
        for key in due.ask:
            request = self._requests[key]
            reservation = _machine_of(request).reservation
            self._send_prefill(request, Released(reservation=reservation, reason="no Drained came"))
        overdue = self._quarantine.overdue(now)
        if overdue != self._withheld:
            self._withheld = overdue
            tables = [self._requests[key].sequence.table.ids.tolist() for key in overdue]
            self._scheduler.withhold(frozenset(block for table in tables for block in table))

    def check_overdue(self, request: DecodeRequest, now: float) -> None:
        """Ends a handoff whose message is here and whose blocks do not come. Call it several times a second."""
        at = self._clock.read(now)
        if request.handoff is None or request.prefill is None or not request.handoff.awaits_blocks:
            return
        # Blocks of other sequences count: a long queue at the sender is no failure.
        if at - max(request.handed_at, self._last_blocks.get(request.prefill, 0.0)) > BLOCKS_DUE_S:
            self._feed(request, BlocksOverdue(f"no block came by {request.transport} for {BLOCKS_DUE_S:g} s"))

    # -- from prefill -------------------------------------------------------------------------------------------------

    def reserve(self, header: Header, prefill: PeerRef, body: Reserve) -> None:
        """Queues a handoff, which is granted when there is room, or refuses it."""
        key = sequence_key(header)
        refusal = self._why_not(key, body)
        if refusal:
            self._requests.send(prefill, key, Refused(reason=refusal))
            return
        self._requests.supersede(key)
        known = self._requests.get(key)
        if known is not None and known.prefill == prefill and not known.is_quarantined:
            if _machine_of(known).state is ReceiverState.ASKED:
                return  # Reserve was repeated: the answer comes when the handoff is admitted
            if _machine_of(known).state is ReceiverState.RUNNING:
                self._requests.send(prefill, key, Refused(reason="the handoff was committed here before"))
                return
        if known is not None:
            self._requests.cancel(key, "another prefill worker took over")
        if key in self._requests:
            self._requests.send(prefill, key, Refused(reason="slots of an earlier reservation are in quarantine"))
            return
        try:
            request = self._make_request(header, prefill, body)
            self._scheduler.add(request.sequence)
        except (ValueError, OverflowError) as error:
            self._requests.send(prefill, key, Refused(reason=str(error)))
            return
        self._requests.add(request)
        self._meter.asked(request.timings)
        self.admit()

    def from_prefill(self, key: SequenceKey, prefill: PeerRef, body: Handoff | Abort | Drained) -> None:
        """A message about a handoff, admitted or not. Does nothing for the handoff of another prefill worker."""
        request = self._handoff_of(key, prefill)
        if request is None or request.handoff is None:
            return
        if body.reservation and body.reservation != request.handoff.reservation:
            return
        match body:
            case Handoff():
                self._handed_over(request, body)
            case Abort():  # after the commit it changes nothing: from then on only the router ends the request
                self._feed(request, body)
            case Drained() if request.is_quarantined:
                self._quarantine.drained(key)  # `tick_quarantine` tells the machine
            case Drained():
                pass

    def _handed_over(self, request: DecodeRequest, body: Handoff) -> None:
        sequence, num_granted = request.sequence, _machine_of(request).num_granted
        found = (body.index, body.num_tokens, body.num_blocks)
        wanted = (request.first_index, sequence.num_tokens, num_granted)
        if found != wanted and _machine_of(request).state in NOT_COMMITTED:
            self.cancel(request, f"index, tokens and blocks {found} were handed over, not {wanted}")
            return
        self._meter.complete(request.timings)
        request.handed_at = self._clock.read(time.monotonic())
        self._feed(request, body)

    def _handoff_of(self, key: SequenceKey, prefill: PeerRef) -> DecodeRequest | None:
        """The handoff of this prefill worker."""
        request = self._requests.get(key)
        if request is None or request.prefill is None or not is_same_process(request.prefill, prefill):
            return None
        return request

    def _make_request(self, header: Header, prefill: PeerRef, body: Reserve) -> DecodeRequest:
        spec, max_running = self._context.spec, self._context.scheduler.limits.max_running
        sequence = make_sequence(header, body.prompt, body.router, spec, max_running, numerics=body.numerics)
        transport = self._choose_transport(prefill, body.transports)
        # If senders write into the slots themselves, this worker cannot refuse a write: slots of a reservation that has
        # ended are unsafe until the sender says that it has stopped.
        is_one_sided = self._receivers[transport].is_one_sided
        sequence.remote = RemoteKV(prefill, num_to_come=body.num_siblings)
        handoff = ReceiverHandoff(is_one_sided=is_one_sided)
        return DecodeRequest(
            sequence,
            deadline_of(body.prompt),
            handoff=handoff,
            handle=recorded(self._context.events, "receiver", sequence.key, handoff.handle, is_one_sided),
            prefill=prefill,
            processes=tuple(body.processes) or ("",),
            transport=transport,
            shards=ShardShape(*body.shards),
            first_index=sequence.num_output,
            timings=HandoffTimings(key=sequence.key, trace=sequence.origin.trace),
        )

    def _why_not(self, key: SequenceKey, body: Reserve) -> str:
        if self._requests.draining:
            return "the decode worker is draining"
        if key in self._requests.cancelled:
            return "the request was cancelled"
        found = next((self._receivers[name] for name in body.transports if name in self._receivers), None)
        if found is None:
            return f"no common transport: {body.transports} offered, {list(self._receivers)} here"
        return found.why_not_from(ShardShape(*body.shards))

    def _choose_transport(self, prefill: PeerRef, offered: list[str]) -> str:
        """The first of the sender's transports that is available here. Logs the first choice and every change."""
        chosen = next(name for name in offered if name in self._receivers)
        if self._last_transports.get(prefill) != chosen:
            self._last_transports[prefill] = chosen
            text = "KV blocks of %s come by %s: it offers %s, and %s can be taken here"
            log.info(text, prefill.peer_id, chosen, ", ".join(offered), ", ".join(self._receivers))
        return chosen

    # -- the queue ----------------------------------------------------------------------------------------------------

    def _begin_transfer(self, request: DecodeRequest) -> None:
        """Tells prefill where the missing blocks go. The scheduler has reserved them."""
        assert request.prefill is not None
        sequence = request.sequence
        first_block = sequence.num_published  # those before it were found in the prefix cache
        slots = sequence.table.ids[first_block:].tolist()
        reservation = f"{self._context.messenger.me.incarnation}-{next(self._numbers)}"
        self._keys[reservation] = sequence.key
        receiver = self._receivers[request.transport]
        receiver.admit(reservation, first_block, slots, request.shards)
        granted = Granted(
            reservation=reservation,
            first_block=first_block,
            slots=slots,
            transport=request.transport,
            endpoints=receiver.endpoints,
            num_stages=receiver.num_stages,
        )
        self._feed(request, granted)
        self._send_prefill(request, granted)
        self._meter.granted(request.timings, request.transport)
        request.timings.num_blocks = len(slots)
        self._context.steps.wake()  # a local prompt may be next in the queue

    # -- instructions -------------------------------------------------------------------------------------------------

    def _on_transfer(self, event: ReceiverEvent) -> None:
        request = self._requests.get(self._keys.get(event.reservation))
        if request is None:
            return
        if request.prefill is not None:
            self._last_blocks[request.prefill] = self._clock.read(time.monotonic())
        if isinstance(event, Corrupted):
            self.totals["corrupted_blocks"] += len(event.blocks)
        self._feed(request, event)

    def _feed(self, request: DecodeRequest, event: ReceiverHandoffEvent) -> None:
        assert request.handle is not None
        handoff = _machine_of(request)
        was_open = handoff.state in NOT_COMMITTED
        instructions = request.handle(event)
        if was_open and handoff.state in (ReceiverState.QUARANTINED, ReceiverState.FREED):
            self._meter.failed(CAUSES[type(event)], request.timings)
        for instruction in instructions:
            self._carry_out(request, instruction)
        if handoff.state is ReceiverState.FREED:
            self._requests.remove(request.sequence.key)
            self._keys.pop(handoff.reservation, None)  # later reports of its transport are ignored

    def _carry_out(self, request: DecodeRequest, instruction: ReceiverInstruction) -> None:
        sequence = request.sequence
        match instruction:
            case StopReceiving(reservation):
                self._receivers[request.transport].release(reservation)
            case Commit(handoff):
                self._commit(request, handoff)
            case KeepBlocks():
                assert request.prefill is not None
                self.totals["quarantines"] += 1
                self._quarantine.add(sequence.key, request.prefill, request.processes, time.monotonic())
                self._scheduler.drop_handoff(sequence)
                self.made_room()  # a place among the running sequences; others may also have waited for its prefix
            case FreeBlocks() if sequence.state is SequenceState.WAITING:
                self._scheduler.abort(sequence.key)
                self._context.steps.wake()  # another sequence may be next now
            case FreeBlocks(num_whole):
                # A commit that failed has appended the first token, whose KV is not here.
                prompt_end = sequence.num_prompt + request.first_index
                self._scheduler.release(sequence, min(num_whole * self._context.spec.block_size, prompt_end))
                self.made_room()
            case Refused() | Released():
                if isinstance(instruction, Released) and instruction.transport_failed:
                    self.totals["failed_transfers"] += 1
                self._send_prefill(request, instruction)

    def _commit(self, request: DecodeRequest, handoff: Handoff) -> None:
        sequence = request.sequence
        sequence.num_computed = sequence.num_tokens
        if handoff.token_id is not None:
            sequence.tokens.append(handoff.token_id)
        try:
            output = self._context.steps.adopt(sequence, _candidates_of(handoff))
        except (ValueError, OverflowError) as error:
            fields = self._requests.log_fields(sequence.key)
            log.warning("this worker cannot run a sequence that was handed over: %s", error, extra=fields)
            self._feed(request, CommitRefused(str(error)))
            return
        self._keys.pop(handoff.reservation, None)
        self._send_prefill(request, Committed(reservation=handoff.reservation))
        self._meter.committed(request.timings, sequence.key)
        self._not_stepped[sequence.key] = request.timings
        self.totals["handoffs_committed"] += 1
        self._on_commit(request, handoff, output)
        if output is not None:
            self._requests.remove(sequence.key)
        self.admit()  # others may have waited for this prefix

    def _send_prefill(self, request: DecodeRequest, body: Granted | Refused | Committed | Released) -> None:
        assert request.prefill is not None
        self._requests.send(request.prefill, request.sequence.key, body)


def _machine_of(request: DecodeRequest) -> ReceiverHandoff:
    assert request.handoff is not None
    return request.handoff


def _candidates_of(handoff: Handoff) -> Candidates | None:
    if handoff.token_id is not None:
        return None
    ids, logprobs = np.array(handoff.candidate_ids, np.int32), np.array(handoff.candidate_logprobs, np.float32)
    return Candidates(ids, logprobs)
