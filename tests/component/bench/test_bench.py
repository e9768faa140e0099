"""`kvrelay bench` against a server whose answers and delays are known."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from kvrelay_bench.answer_reader import NOT_WHOLE, Record
from kvrelay_bench.bench_command import Bench, main
from kvrelay_bench.flags import BenchFlagError, read_flags
from kvrelay_bench.http import Client, Endpoint
from kvrelay_bench.load_generator import LoadPoint, run_load
from kvrelay_bench.workload import Shape, Wire, arrival_times, synthetic
from tests.fakes.openai_server import USAGE, Exchange, OpenAiServer, openai_server

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
        records = await run(server, "--timeout", "0.2", "--requests", "3")
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
        (["http://a", "--api", "chat", "--prompt-as", "ids"], "--prompt-as"),
        (["http://a", "--plot", "x.gif"], "--plot"),
        (["http://a", "--api-key-file", "/nowhere"], "--api-key-file"),
    ],
)
def test_flags_that_do_not_go_together(flags: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BenchFlagError, match=complaint):
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
    ],
)
def test_values_out_of_range_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        read_flags(["http://a", *flags], {})
    told = capsys.readouterr().err
    assert raised.value.code == 2 and f"argument {flags[0]}: " in told and ("must be" in told or "is not JSON" in told)


def test_urls_that_cannot_be_reached(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ftp://a"]) == 2 and main(["http://a:b"]) == 2
    assert main(["http://127.0.0.1:1"]) == 1
    assert "does not answer" in capsys.readouterr().err
