"""Events of real, disturbed services replayed on fresh machines; logs that were tampered with; rotation."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
from pathlib import Path

import pytest

from kvrelay.cli.main import main
from kvrelay.cli.replay import Replayed, replay_lines
from kvrelay.protocol.messages import AnyBody, Cancel, Reassign
from kvrelay.protocol.sampling import Sampling
from kvrelay.telemetry import event_log
from kvrelay.telemetry.event_log import EventLog
from tests.component.workers.rig import Fleet, fleet, prompt_of, run
from tests.fakes.hash_runner import HashRunner
from tests.fakes.workers import Received
from tests.unit.dispatch.world import World, spec

pytestmark = pytest.mark.component


def lines_of(*paths: Path) -> list[tuple[str, bytes]]:
    return [(f"{path}:{n}", text) for path in paths for n, text in enumerate(path.read_bytes().splitlines(), 1)]


def replayed(*paths: Path) -> Replayed:
    return replay_lines(lines_of(*paths))


def record(log: EventLog, world: World, request: str = "r") -> None:
    """As the dispatcher does it."""
    machine, key = world.machine, (request, 0, 0)
    machine.handle_event = log.record("attempts", key, machine.attempts.handle, machine.spec)
    machine.handle_entry = log.record("intake", key, machine.intake.handle, 0, 0, ())


@pytest.fixture
def recorded(redis_url: str, tmp_path: Path) -> list[Path]:
    """The logs of a prefill and two decode workers through cancels, stops, reassignments and a death."""

    async def end(f: Fleet, name: str, got: Received) -> None:
        """What was committed by the one that dies ends with it; nobody retries here."""
        with contextlib.suppress(TimeoutError):
            await got.until(lambda r: r.finish is not None or bool(r.need_decode), 5)
        if got.need_decode:
            f.router.send(f.prefill[0].me, name, Reassign(decode=f.decode[-1].me))
            with contextlib.suppress(TimeoutError):
                await got.finished(5)

    async def test() -> None:
        runners = [HashRunner(num_blocks=24, step_s=0.002) for _ in range(3)]
        settings = {"token_budget": 32, "max_running": 8, "event_log": tmp_path / "{name}.jsonl"}
        async with fleet(redis_url, runners[:1], runners[1:], **settings) as f:
            rng = random.Random(3)
            prefill, (first, second) = f.prefill[0].me, (worker.me for worker in f.decode)
            sampling = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)
            waited = []
            for number in range(30):
                to = first if number % 2 else second
                got = f.router.prefill(prefill, to, f"r{number}", prompt_of(rng.randint(1, 150), number), sampling)
                if number % 4 == 0:
                    bodies: list[AnyBody] = [
                        Cancel(reason="the client is gone"),
                        Cancel(reason="a stop string matched"),
                    ]
                    for worker in (prefill, to):
                        f.router.send(worker, f"r{number}", rng.choice(bodies))
                else:
                    waited.append(end(f, f"r{number}", got))
                if number == 20:
                    f.decode[0].die()
                    del f.decode[0]
            await asyncio.gather(*waited)
            for number in range(30):  # those that ran on the dead one, and those stopped on one of their workers
                for worker in (prefill, second):
                    f.router.send(worker, f"r{number}", Cancel(reason="the test is over"))
            await f.until_clean()

    run(test)
    return sorted(tmp_path.glob("*.jsonl"))


def test_a_disturbed_run_replays_to_the_same_instructions_and_a_changed_log_does_not(
    recorded: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(recorded) == 3
    found = replayed(*recorded)
    assert found.differences == []
    assert found.num_events > 200
    assert found.num_machines > 40
    assert found.num_without_birth == 0

    assert main(["replay", *map(str, recorded), "--request", "r3"]) == 0
    told = capsys.readouterr().out
    assert "sender" in told and "receiver" in told and "AskDecode" in told and "r4" not in told
    times = [line.split(" ", 1)[0] for line in told.splitlines() if line.startswith("20")]
    assert times == sorted(times)

    lines = lines_of(*recorded)
    prefill = [n for n, (_, text) in enumerate(lines) if b'"kind":"handoff"' in text.partition(b'"out":')[2]]
    changed = list(lines)
    place, text = lines[prefill[0]]
    head, out, instructions = text.partition(b'"out":')
    changed[prefill[0]] = place, head + out + instructions.replace(b'"num_blocks":', b'"num_blocks":1')
    assert len(replay_lines(changed).differences) == 1
    dropped = [line for line in lines if b'"event":"PrefillFinished"' not in line[1]]
    assert replay_lines(dropped).differences
    garbled = [*lines[:-1], (lines[-1][0], lines[-1][1][:-5])]
    assert "not a line of an event log" in replay_lines(garbled).differences[0]

    recorded[0].write_bytes(b"\n".join(text for _, text in changed))
    assert main(["replay", str(recorded[0])]) == 1


@pytest.mark.parametrize("seed", range(10))
def test_a_router_replays_to_the_same_instructions(seed: int, tmp_path: Path) -> None:
    world = World(seed, spec(max_tokens=6, max_attempts=20), 2, 2, mischief=0.1)
    log = EventLog(tmp_path / "router", 1 << 20)
    record(log, world)
    world.run()
    log.close()
    found = replayed(tmp_path / "router")
    assert found.differences == []
    assert found.num_events >= len(world.log)
    assert any(b'"intake"' in line and b'"SequenceDelta"' in line for _, line in lines_of(tmp_path / "router"))


def test_a_log_is_bounded_and_its_second_file_replays_with_the_first(tmp_path: Path) -> None:
    path = tmp_path / "router"
    log = EventLog(path, 20_000)
    for seed in range(40):
        world = World(seed, spec(max_tokens=6, max_attempts=20), 2, 2, mischief=0.1)
        record(log, world, f"r{seed}")
        world.run()
    log.close()
    earlier = tmp_path / "router.1"
    assert sorted(tmp_path.iterdir()) == [path, earlier]
    assert max(path.stat().st_size, earlier.stat().st_size) < 40_000
    found = replayed(earlier, path)
    assert found.differences == []
    assert found.num_events > 10


def test_a_log_that_cannot_be_written_stops_and_the_machine_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(1, spec(), 1, 1, mischief=0)
    log = EventLog(tmp_path / "router", 1 << 20)
    log._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    record(log, world)
    world.run()
    log.close()
    assert [record.getMessage() for record in caplog.records if "event log ends" in record.getMessage()]


def test_a_disk_that_stands_still_holds_up_nobody_and_ends_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is a pipe that nobody reads."""
    monkeypatch.setattr(event_log, "MAX_WAITING_BYTES", 4096)
    log = EventLog(tmp_path / "router", 1 << 20)
    read, write = os.pipe()
    os.set_blocking(write, True)
    log._file = open(write, "wb", buffering=0)  # noqa: SIM115
    os.write(write, bytes(fcntl.fcntl(write, fcntl.F_GETPIPE_SZ)))  # full
    world = World(1, spec(max_tokens=100), 1, 1, mischief=0)
    record(log, world)
    world.run()
    assert [record.getMessage() for record in caplog.records if "behind" in record.getMessage()]
    os.close(read)  # which lets the thread go on
    log.close()


def test_a_pipe_without_a_reader_is_an_error_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "router")
    with pytest.raises(OSError, match="this pipe has no reader: start the reader first"):
        EventLog(tmp_path / "router", 1 << 20)


def test_a_pipe_takes_a_whole_log_and_stays_a_pipe(tmp_path: Path) -> None:
    """Beyond the size at which a file is renamed."""
    path = tmp_path / "router"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    log = EventLog(path, 4096)
    world = World(1, spec(max_tokens=30), 1, 1, mischief=0)
    record(log, world)
    world.run()
    log.close()
    os.set_blocking(reader, True)
    with open(reader, "rb") as taken:
        lines = [(f"{number}", line) for number, line in enumerate(taken.read().splitlines(), 1)]
    assert sum(len(line) for _, line in lines) > 4096
    found = replay_lines(lines)
    assert found.differences == [] and found.num_events >= len(world.log)
    assert path.is_fifo() and sorted(tmp_path.iterdir()) == [path]


def test_what_is_no_log_is_said_to_be_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err
    (tmp_path / "other").write_text('{"level": "info"}\n')
    assert main(["replay", str(tmp_path / "other")]) == 1
