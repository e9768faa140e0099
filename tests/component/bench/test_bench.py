"""`kvrelay bench` against a server whose answers and delays are known."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvrelay.flag_parser import CommandFailed
from kvrelay_bench.answer_reader import NOT_WHOLE, Record
from kvrelay_bench.bench_command import Bench
from kvrelay_bench.flags import read_flags
from kvrelay_bench.http import Client, Endpoint
from kvrelay_bench.load_generator import LoadPoint, run_load
from kvrelay_bench.report import MAX_COLUMNS
from kvrelay_bench.workload import Shape, Wire, arrival_times, synthetic
from tests.fakes.command import command
from tests.fakes.openai_server import USAGE, Exchange, OpenAiServer, openai_server

main = command("bench")

NUM = 12


async def plain(exchange: Exchange) -> None:
    await exchange.head()
    for piece in "abcd":
        await exchange.piece(piece)
    await exchange.piece("e", "length")
    await exchange.event({"choices": [], "usage": USAGE})
    await exchange.end()


async def run(server: OpenAiServer, *flags: str) -> list[Record]:
    plan = read_flags([server.url, "--requests", str(NUM), "--warm-up", "0", "--rate", "400", *flags], {})
    (measured,) = await Bench(plan).run()
    return measured.outcome.records


async def test_times_are_those_of_the_server() -> None:
    """A piece is stamped after the server said it, and before it could have said more than it was asked to."""
    pause_s = 0.03

    async def slow(exchange: Exchange) -> None:
        await asyncio.sleep(pause_s)
        await exchange.head()
        for number in range(3):
            await exchange.piece("x", "length" if number == 2 else None)
            await asyncio.sleep(pause_s)
        await exchange.end()

    async with openai_server(slow) as server:
        client = Client(Endpoint(server.url))
        point = LoadPoint("", synthetic(Shape(), arrival_times(NUM, 100, "poisson", 1), 1))
        bodies = [client.request("POST", "/v1/completions", Wire().body("m", ask)) for ask in point.asks]
        outcome = await run_load(client, point, bodies, 60, lambda _: None)
        await client.close()
    for record in outcome.records:
        assert record.error == "" and len(record.pieces_s) == 3
        assert record.started_s >= record.intended_s
        assert record.ttft_s >= pause_s and min(record.gaps_s) >= 0 and record.e2e_s >= 4 * pause_s
    said = sorted(at_s - client.started for exchange in server.exchanges for at_s in exchange.said_s)
    came = sorted(at_s for record in outcome.records for at_s in record.pieces_s)
    assert all(came_s >= said_s for came_s, said_s in zip(came, said, strict=True))


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_both_endpoints_are_asked_as_they_want(api: str) -> None:
    async with openai_server(plain) as server:
        records = await run(server, "--api", api)
    assert [(r.error, r.num_output, r.num_prompt, r.num_cached) for r in records] == [("", 5, 7, 3)] * NUM
    path = "/v1/chat/completions" if api == "chat" else "/v1/completions"
    assert {(exchange.path, exchange.body["model"]) for exchange in server.exchanges} == {(path, "fake-model")}
    assert len({json.dumps(exchange.body) for exchange in server.exchanges}) == NUM


async def test_an_open_load_waits_for_nobody() -> None:
    """The server answers none before all have come: only a load that goes on meanwhile ends."""
    all_there = asyncio.Event()

    async def only_together(exchange: Exchange) -> None:
        if len(server.exchanges) == NUM:
            all_there.set()
        await all_there.wait()
        await plain(exchange)

    async with openai_server(only_together) as server:
        records = await run(server)
    assert not any(record.error for record in records)


async def test_a_closed_load_has_so_many_at_a_time_and_uses_connections_again() -> None:
    running = most = 0

    async def counted(exchange: Exchange) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        await plain(exchange)

    async with openai_server(counted) as server:
        plan = read_flags([server.url, "--requests", "20", "--warm-up", "0", "--concurrency", "3"], {})
        (measured,) = await Bench(plan).run()
    assert measured.figures.num_failed == 0 and 1 <= most <= 3
    assert server.num_connections <= 3 + 1  # and the one that asked for the models


async def test_the_generators_own_lag_counts_for_the_client_and_is_told() -> None:
    """The generator stands still in the middle of a load: what was due meanwhile is sent late, and says so."""
    stall_s = 0.1

    def stand_still(num_ended: int) -> None:
        if num_ended == 1:
            time.sleep(stall_s)

    async with openai_server(plain) as server:
        client = Client(Endpoint(server.url))
        asks = synthetic(Shape(), [0.0, *(0.05 for _ in range(5))], 1)
        bodies = [client.request("POST", "/v1/completions", Wire().body("m", ask)) for ask in asks]
        outcome = await run_load(client, LoadPoint("", asks), bodies, 60, stand_still)
        await client.close()
    for record in outcome.records:
        assert record.ttft_s >= record.started_s - record.intended_s >= 0
    assert outcome.stalls_s and min(outcome.stalls_s) >= 0


async def error_in_stream(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.piece("a")
    await exchange.event({"error": {"message": "no worker is left", "code": 502}})
    await exchange.end()


async def cut_off(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.piece("a")
    raise ConnectionError


async def no_end(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.piece("a")
    await exchange.end(done=False)


async def too_many(exchange: Exchange) -> None:
    await exchange.head("429 Too Many Requests", "application/json")
    await exchange.raw(b'{"error": {"message": "later"}}')
    await exchange.write(b"0\r\n\r\n")


async def silence(exchange: Exchange) -> None:
    raise ConnectionError


async def nonsense(exchange: Exchange) -> None:
    await exchange.write(b"SSH-2.0-OpenSSH\r\n\r\n")
    raise ConnectionError


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (error_in_stream, "in the stream: no worker is left"),
        (cut_off, "the connection was closed in the answer"),
        (no_end, NOT_WHOLE),
        (too_many, "status 429: later"),
        (silence, "the connection was closed without an answer"),
        (nonsense, "cannot connect: the server does not speak HTTP"),
    ],
)
async def test_what_fails_is_told_by_its_cause(script: Any, error: str) -> None:
    async with openai_server(script) as server:
        records = await run(server)
    assert all(record.error.startswith(error) for record in records), [record.error for record in records]


async def test_a_request_without_an_end_times_out() -> None:
    async def hangs(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.piece("a")
        await asyncio.Event().wait()

    async with openai_server(hangs) as server:
        records = await run(server, "--timeout", "200ms", "--requests", "3")
        assert [record.error for record in records] == ["no whole answer within 0.2 s"] * 3


async def test_an_idle_connection_that_was_closed_costs_no_request() -> None:
    async def once(exchange: Exchange) -> None:
        await plain(exchange)
        raise ConnectionError  # after a whole answer that promised to keep the connection

    async with openai_server(once) as server:
        plan = read_flags([server.url, "--requests", "8", "--warm-up", "0", "--concurrency", "1"], {})
        (measured,) = await Bench(plan).run()
    assert measured.figures.num_failed == 0


async def test_answers_until_the_connection_closes() -> None:
    async def unframed(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        await exchange.write(b'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\n')
        raise ConnectionError

    async with openai_server(unframed) as server:
        records = await run(server)
    assert [(record.error, len(record.pieces_s)) for record in records] == [("", 1)] * NUM


async def test_two_endpoints_take_turns_with_prompts_alike(tmp_path: Path) -> None:
    async with openai_server(plain) as one, openai_server(plain) as other:
        flags = ["--compare", one.url, f"{other.url}/v1/", "--rounds", "2", "--warm-up", "1", "--requests", "4"]
        results = await Bench(read_flags([*flags, "--rate", "500"], {})).run()
    assert [(each.endpoint, each.round) for each in results] == [("A", 0), ("B", 0), ("B", 1), ("A", 1)]
    asked = [[exchange.body for exchange in server.exchanges] for server in (one, other)]
    shapes = [sorted((len(body["prompt"]), body["max_tokens"]) for body in bodies) for bodies in asked]
    assert shapes[0] == shapes[1] and len(shapes[0]) == 1 + 2 * 4
    prompts = [json.dumps(body["prompt"]) for bodies in asked for body in bodies]
    assert len(set(prompts)) == len(prompts)  # what one asked is in no cache for the other


async def test_the_command_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, out_of_two = tmp_path / "one.json", tmp_path / "two.json"
    async with openai_server(plain) as server:
        flags = ["--requests", "5", "--concurrency", "2,3", "--slo", "e2e=3600s", "--json", str(out)]
        assert await asyncio.to_thread(main, [server.url, *flags, "--save-requests"]) == 0
        compared = ["--compare", server.url, server.url, "--requests", "2", "--rate", "100", "--json", str(out_of_two)]
        assert await asyncio.to_thread(main, compared) == 0
    told = capsys.readouterr().out
    assert "2 at a time" in told and "goodput" in told and "B / A" in told
    assert max(map(len, told.splitlines())) <= MAX_COLUMNS
    content = json.loads(await asyncio.to_thread(out.read_text))
    assert [load["load"] for load in content["loads"]] == ["2 at a time", "3 at a time"]
    assert [len(load["requests"]) for load in content["loads"]] == [5, 5]
    assert content["loads"][0]["figures"]["good_share"] == 1
    ratios = json.loads(await asyncio.to_thread(out_of_two.read_text))["ratios_b_over_a"]
    assert ratios["100/s poisson"]["TTFT p50"]["least"] > 0


def test_keys_come_from_a_file_or_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# mine\n\nsk-1\nsk-2\n")
    plan = read_flags(["http://a", "--api-key-file", str(path)], {"OPENAI_API_KEY": "sk-3"})
    assert plan.endpoints["http://a"].api_key == "sk-1" and "sk-1" not in json.dumps(dict(plan.printable))
    assert read_flags(["http://a"], {"OPENAI_API_KEY": "sk-3"}).endpoints["http://a"].api_key == "sk-3"
    assert b"authorization: Bearer sk-3\r\n" in Client(Endpoint("http://a", "sk-3")).request("GET", "/")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], "give one URL"),
        (["http://a", "--compare", "http://a", "http://b"], "give one URL"),
        (["http://a", "--rate", "1", "--concurrency", "1"], "--rate and --concurrency"),
        (["http://a", "--trace", "x", "--rate", "1"], "--trace"),
        (["http://a", "--prompts", "x", "--prompt-as", "ids"], "--prompts has text"),
        (["http://a", "--api", "chat", "--prompt-as", "ids"], "--prompt-as"),
        (["http://a", "--api-key-file", "/nowhere"], "--api-key-file"),
    ],
)
def test_flags_that_do_not_go_together(flags: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CommandFailed, match=complaint):
        read_flags(flags, {})
    assert main(flags) == 2


@pytest.mark.parametrize(
    "flags",
    [
        ["--rate", "0"],
        ["--rate", "1,x"],
        ["--concurrency", "0"],
        ["--requests", "-1"],
        ["--token-ids", "9:3"],
        ["--slo", "ttft=fast"],
        ["--extra-body", "[1]"],
        ["--extra-body", "{"],
        ["--timeout", "nan"],
        ["--timeout", "30"],
        ["--slo", "ttft=500"],
        ["--slo", "speed=1s"],
        ["--duration", "20"],
    ],
)
def test_values_out_of_range_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        read_flags(["http://a", *flags], {})
    told = capsys.readouterr().err
    assert raised.value.code == 2 and f"{flags[0]}: " in told and ("must be" in told or "is not JSON" in told)


def test_urls_that_cannot_be_reached(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ftp://a"]) == 2 and main(["http://a:b"]) == 2
    assert main(["http://127.0.0.1:1"]) == 1
    assert "does not answer" in capsys.readouterr().err


def stalls_after(num_answered: int) -> tuple[Any, asyncio.Event]:
    """A script that answers so many requests and no more, and an event that is set when a later one has come."""
    num_requests, later = 0, asyncio.Event()

    async def script(exchange: Exchange) -> None:
        nonlocal num_requests
        num_requests += 1
        if num_requests > num_answered:
            later.set()
            await asyncio.Event().wait()
        await plain(exchange)

    return script, later


async def test_a_cancelled_run_has_the_figures_of_what_has_ended() -> None:
    script, later = stalls_after(5)
    async with openai_server(script) as server:
        flags = ["--requests", "9", "--warm-up", "0", "--concurrency", "1,3"]
        bench = Bench(read_flags([server.url, *flags], {}))
        run = asyncio.create_task(bench.run())
        await later.wait()
        run.cancel()
        (measured,) = await run
    assert bench.is_interrupted and measured.outcome.is_partial
    assert (measured.point, measured.figures.num_requests, measured.figures.num_failed) == ("1 at a time", 5, 0)


async def test_ctrl_c_writes_and_shows_what_has_ended(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    script, later = stalls_after(8)
    async with openai_server(script) as server:
        interrupted = ["-m", "kvrelay", "bench", server.url, "--warm-up", "0", "--requests", "9", "--json", str(out)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *interrupted, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        await later.wait()
        process.send_signal(signal.SIGINT)
        told, errors = (each.decode() for each in await process.communicate())
    assert (process.returncode, errors) == (130, "kvrelay bench: interrupted\n")
    assert "4 at a time, interrupted" in told
    (load,) = json.loads(await asyncio.to_thread(out.read_text))["loads"]
    assert load["is_partial"] and 1 <= load["figures"]["num_requests"] <= 8 and load["figures"]["num_failed"] == 0


async def test_no_request_begins_after_the_duration() -> None:
    async with openai_server(plain) as server:
        for flags in (["--rate", "1000", "--arrivals", "fixed"], ["--concurrency", "1"]):
            plan = read_flags([server.url, "--requests", "400", "--duration", "50ms", "--warm-up", "0", *flags], {})
            (measured,) = await Bench(plan).run()
            assert 1 <= measured.figures.num_requests < 400
            assert max(record.intended_s for record in measured.outcome.records) <= 0.05 or flags[0] == "--concurrency"


def test_a_run_without_a_load_is_short() -> None:
    plan = read_flags(["http://a"], {})
    (point,) = plan.points(0)
    assert point.concurrency == 4 and point.duration_s == 15.0
    (point,) = read_flags(["http://a", "--rate", "3"], {}).points(0)
    assert len(point.asks) == 45 and max(ask.arrival_s for ask in point.asks) < 60
    (point,) = read_flags(["http://a", "--requests", "7"], {}).points(0)
    assert (len(point.asks), point.duration_s) == (7, None)


def test_names_of_vllm_s_benchmark_are_taken() -> None:
    flags = ["--num-prompts", "3", "--random-input-len", "7", "--random-output-len", "5", "--request-rate", "2"]
    (point,) = read_flags(["http://a", *flags], {}).points(0)
    assert [(len(ask.prompt), ask.num_output) for ask in point.asks] == [(7, 5)] * 3
    assert point.name == "2/s poisson"


async def test_conversations_of_a_file_are_asked_as_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "share.json"
    turns = [("human", "one"), ("gpt", "x" * 40), ("human", "two"), ("gpt", "y" * 80)]
    entry = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    path.write_text(json.dumps([entry, {"conversations": [{"from": "human", "value": "three"}]}]))
    async with openai_server(plain) as server:
        flags = ["--prompts", str(path), "--requests", "4", "--concurrency", "1", "--warm-up", "0"]
        (measured,) = await Bench(read_flags([server.url, *flags], {})).run()
        bodies = [exchange.body for exchange in server.exchanges]
    assert measured.figures.num_failed == 0
    one, answer, two = (
        {"role": role, "content": text} for role, text in (("user", "one"), ("assistant", "x" * 40), ("user", "two"))
    )
    three = {"role": "user", "content": "three"}
    assert [body["messages"] for body in bodies] == [[one], [one, answer, two], [three], [one]]
    assert [body["max_tokens"] for body in bodies] == [10, 20, 200, 10]


def test_loads_and_rounds_go_on_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(json.dumps({"turns": [f"question {n}", "more"]}) for n in range(20)))
    flags = ["--prompts", str(path), "--requests", "3", "--rate", "1,2", "--output-tokens", "9"]
    plan = read_flags(["http://a", *flags], {})
    asked = [ask.messages[0][1] for number in (0, 1) for point in plan.points(number) for ask in point.asks]
    assert asked == [f"question {n}" for n in range(12)]
    assert {ask.num_output for ask in plan.points(0)[0].asks} == {9}
    body = json.loads(plan.wire.body("m", plan.points(0)[0].asks[0]))
    assert body["messages"] == [{"role": "user", "content": "question 0"}]
