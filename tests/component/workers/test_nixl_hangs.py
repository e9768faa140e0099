"""Workers whose one-sided writes hang after a good one: the pair goes on by ZMQ, and no late write hits a sequence."""

from __future__ import annotations

from functools import partial

import pytest

from kvrelay.handoff.transports import select
from kvrelay.handoff.transports.nixl_sender import NixlSettings
from kvrelay.protocol.messages import Cancel, Reassign
from kvrelay.protocol.sampling import Sampling
from kvrelay_decode import incoming_handoffs
from tests.component.workers.rig import Fleet, fleet, prompt_of
from tests.fakes.hanging_agent import FakeNetwork, fake_network
from tests.fakes.hash_runner import HashRunner, expected_tokens
from tests.fakes.waiting import until

pytestmark = pytest.mark.component
GREEDY = Sampling(temperature=0.0, max_tokens=24)
SETTINGS = {"token_budget": 64, "max_running": 16, "transfer": "auto"}
NUM_BLOCKS = 4
PROMPT = prompt_of(16 * NUM_BLOCKS, 1)


async def hang(f: Fleet, network: FakeNetwork, cause: str, *, after_a_good_handoff: bool) -> None:
    """What a router does when prefill needs another decode worker and there is none."""
    prefill, decode = f.prefill[0], f.decode[0]
    if after_a_good_handoff:
        good = await f.router.prefill(prefill.me, decode.me, "good", prompt_of(50), GREEDY).finished()
        assert good.output == expected_tokens(prompt_of(50), GREEDY, 512)
    network.num_good = 0
    got = f.router.prefill(prefill.me, decode.me, "hung", PROMPT, GREEDY)
    await got.until(lambda r: bool(r.need_decode))
    assert cause in got.need_decode[0].reason
    f.router.send(decode.me, "hung", Cancel(reason="reassigned"))
    f.router.send(prefill.me, "hung", Reassign(decode=None))
    await got.finished()


async def serve_by_zmq(f: Fleet) -> None:
    got = f.router.prefill(f.prefill[0].me, f.decode[0].me, "hung", PROMPT, GREEDY, attempt=2)
    assert (await got.finished()).output == expected_tokens(PROMPT, GREEDY, 512)


def transports_taken(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records]
    return [message.split(" come by ")[1].split(":")[0] for message in messages if " come by " in message]


async def test_a_first_write_that_hangs_ends_with_its_connection_and_the_pair_goes_on_by_zmq(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(select, "NixlSettings", partial(NixlSettings, stall_timeout_s=0.3))
    with caplog.at_level("INFO", logger=incoming_handoffs.__name__), fake_network() as network:
        async with fleet(redis_url, [HashRunner()], [HashRunner()], **SETTINGS) as f:
            await hang(f, network, "no progress", after_a_good_handoff=False)
            await serve_by_zmq(f)
            await f.until_clean()
    assert transports_taken(caplog) == ["nixl", "zmq"]


@pytest.mark.parametrize("noticed_by", ["prefill", "decode"])
async def test_slots_of_a_write_that_never_ends_stay_in_quarantine_while_the_pair_goes_on_by_zmq(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, noticed_by: str
) -> None:
    """Decode notices where the sender does not, for instance because a call of UCX never returns."""
    stall_s = 0.3 if noticed_by == "prefill" else 1e6
    monkeypatch.setattr(select, "NixlSettings", partial(NixlSettings, stall_timeout_s=stall_s))
    monkeypatch.setattr(incoming_handoffs, "BLOCKS_DUE_S", 0.3 if noticed_by == "decode" else 1e6)
    cause = "no progress" if noticed_by == "prefill" else "no block came by nixl"
    with fake_network() as network:
        async with fleet(redis_url, [HashRunner()], [HashRunner()], **SETTINGS) as f:
            await hang(f, network, cause, after_a_good_handoff=True)
            await until(lambda: f.decode[0].blocks["quarantined"] == NUM_BLOCKS)
            await serve_by_zmq(f)
            assert f.decode[0].blocks["quarantined"] == NUM_BLOCKS
            network.land_late()
            await f.until_clean()
