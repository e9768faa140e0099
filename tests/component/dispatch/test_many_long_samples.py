"""128 samples of a long prompt go to a worker that is slow, and it is not lost."""

from __future__ import annotations

import time

import pytest

from kvrelay.protocol.link import Links
from kvrelay.protocol.messages import AnyBody, PeerRef, Prefill
from tests.component.dispatch.fake_workers import FakeDecode, FakePrefill, Key, true_tokens
from tests.component.dispatch.rig import Rig, read

NUM_SAMPLES = 128


class SlowPrefill(FakePrefill):
    """Its event loop has little time for messages. Keeps no prompts."""

    def __init__(self, worker_id: str, delay_s: float) -> None:
        super().__init__(worker_id, max_model_len=1 << 24)
        self.delay_s = delay_s
        self.num_tokens: list[int] = []

    def on_message(self, key: Key, peer: PeerRef, body: AnyBody) -> None:
        super().on_message(key, peer, body)
        self.received.pop()
        if isinstance(body, Prefill):
            self.num_tokens.append(body.prompt.num_tokens)
            time.sleep(self.delay_s)


@pytest.mark.parametrize(
    "num_tokens",
    [100_000, pytest.param(600_000, marks=pytest.mark.slow)],
)
async def test_a_slow_worker_gets_all_samples_of_a_long_prompt(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    """Copies of the prompt would take 51 MB, and 307 MB, of the router."""
    monkeypatch.setattr(Links, "MAX_UNTAKEN_BYTES", 16 << 20)
    prefill = SlowPrefill("p0", 0.005)
    await rig.start(prefill, FakeDecode("d0", max_model_len=1 << 24))
    handle = rig.submit(max_tokens=1, num_sequences=NUM_SAMPLES, prompt_ids=[7] * num_tokens)
    assert await read(handle) == {sequence: true_tokens(sequence, 1) for sequence in range(NUM_SAMPLES)}
    assert prefill.num_tokens == [num_tokens] * NUM_SAMPLES
    assert rig.dispatcher._driver.num_retries == 0 and not prefill.lost
    await rig.nothing_is_left()
