"""What is found before a service starts."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from kvrelay.cli import preflight
from kvrelay.cli.launch_plan import make_plan
from kvrelay.cli.preflight import (
    check_memory,
    check_model,
    check_page_ports,
    check_plan,
    check_transfer,
    hold_port,
)
from kvrelay.config import ConfigError

ENVIRON = {"KVRELAY_MODEL": "org/model"}
GIB = 1 << 30


# -- the model --------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_a_directory_with_weights_is_taken(model: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"no model\.safetensors and no model\.safetensors\.index\.json; --load-format"
    ):
        check_model(str(model), {}, needs_weights=True)
    check_model(str(model), {}, needs_weights=False)
    (model / "model.safetensors").touch()
    check_model(str(model), {}, needs_weights=True)


def test_missing_shards_are_counted_and_named(model: Path) -> None:
    shards = [f"model-{number}-of-3.safetensors" for number in (1, 2, 3)]
    index = {"weight_map": dict(zip("abc", shards, strict=True))}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / shards[0]).touch()
    with pytest.raises(ConfigError, match=rf"2 of the weight files .* the first is {shards[1]}; complete the download"):
        check_model(str(model), {}, needs_weights=True)
    for shard in shards:
        (model / shard).touch()
    check_model(str(model), {}, needs_weights=True)
    (model / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ConfigError, match="is not an index of weight files"):
        check_model(str(model), {}, needs_weights=True)


def test_other_formats_are_named(model: Path) -> None:
    (model / "model-q4.gguf").touch()
    with pytest.raises(ConfigError, match=r"model-q4\.gguf is of a format that is not read"):
        check_model(str(model), {}, needs_weights=True)
    (model / "pytorch_model.bin").touch()
    check_model(str(model), {}, needs_weights=True)


@pytest.fixture
def hub() -> Iterator[HTTPServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200 if self.path.startswith("/org/there/") else 404)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *args: object) -> None:
            pass

    asked: list[str] = []
    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    server.asked = asked  # type: ignore[attr-defined]
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_hub_is_asked_once(hub: HTTPServer) -> None:
    environ = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}"}
    check_model("org/there", environ, needs_weights=True)
    assert hub.asked == ["/org/there/resolve/main/config.json"]  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="answers 404: the name is wrong or the model needs a token"):
        check_model("org/gone", environ, needs_weights=True)


def test_an_unreachable_hub_is_named_with_what_to_do() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        environ = {"HF_ENDPOINT": f"http://127.0.0.1:{unused.getsockname()[1]}"}
        with pytest.raises(ConfigError, match=r"--model org/x: .*does not answer .*refused.*HF_ENDPOINT"):
            check_model("org/x", environ, needs_weights=True)
        with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids a download"):
            check_model("org/x", {**environ, "HF_HUB_OFFLINE": "1"}, needs_weights=True)
    with pytest.raises(ConfigError, match="no such directory, and a name on the Hugging Face hub is OWNER/NAME"):
        check_model("a/b/c", {}, needs_weights=True)


# -- memory -----------------------------------------------------------------------------------------------------------


def test_sizes_beyond_the_free_memory_are_refused_with_the_numbers() -> None:
    workers = make_plan({"kv_memory_bytes": "1TiB"}, ENVIRON).workers
    with pytest.raises(ConfigError) as raised:
        check_memory(workers, 20 * GIB)
    assert str(raised.value) == (
        "--kv-memory-bytes and --swap-space: the pools of 2 workers take 2048.0 GiB and their swap spaces 256.0 GiB, "
        "together 2304.0 GiB, and 20.0 GiB are free; lower --kv-memory-bytes or --swap-space, or start fewer workers"
    )
    check_memory(workers, 2304 * GIB)


@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        ({"kv_memory_bytes": "2GiB", "swap_space": "0"}, 4 * GIB),
        ({"kv_memory_bytes": "2GiB", "swap_space": "3GiB"}, 7 * GIB),  # prefill workers do not swap
        ({"swap_space": "3GiB"}, 5 * GIB),
        ({"kv_memory_bytes": "2GiB", "preemption": "recompute", "decode": "2"}, 6 * GIB),
        ({"kv_memory_bytes": "1GiB", "prefill": "0", "tensor_parallel_size": "2"}, int(2.5 * GIB)),
    ],
)
def test_what_counts(flags: dict[str, str], needed: int) -> None:
    workers = make_plan(flags, ENVIRON).workers
    check_memory(workers, needed)
    with pytest.raises(ConfigError, match="are free"):
        check_memory(workers, needed - 1)


def test_default_sizes_and_pools_that_the_model_sizes_are_not_judged() -> None:
    for flags in ({}, {"num_blocks": "9"}, {"memory_utilization": "0.5"}):
        check_memory(make_plan(flags, ENVIRON).workers, 0)


# -- transports and ports ---------------------------------------------------------------------------------------------


def test_a_missing_nixl_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--transfer nixl: NIXL is not installed; install the extra"):
        check_transfer(make_plan({"transfer": "nixl"}, ENVIRON).workers)
    check_transfer(make_plan({}, ENVIRON).workers)
    monkeypatch.setattr(preflight, "find_spec", lambda name: name == "nixl_cu13" or None)
    check_transfer(make_plan({"transfer": "nixl"}, ENVIRON).workers)


def test_taken_ports_of_pages_are_named() -> None:
    for _ in range(100):  # until nobody else has the port before the one that is taken here
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            plan = make_plan({"metrics_port": str(port - 1)}, ENVIRON)  # the second is the first worker's
            with pytest.raises(ConfigError) as raised:
                check_page_ports(plan.router, plan.workers, port - 1)
        if f"port {port - 1}:" not in str(raised.value):
            break
    assert re.search(rf"metrics_port: .*prefill-0 cannot listen on 127.0.0.1 port {port}: Addr", str(raised.value))
    environ = {**ENVIRON, "KVRELAY_METRICS_PORT": "20500", "KVRELAY_PROCESSES": "2"}
    plan = make_plan({"router_processes": "2"}, environ)
    check_page_ports(plan.router, plan.workers, plan.up.metrics_port)


def test_an_address_of_another_machine_is_explained() -> None:
    with pytest.raises(
        ConfigError, match=r"cannot listen on 192\.0\.2\.1 port 0: .*not an address of this machine: use"
    ):
        hold_port("192.0.2.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}: Address already in use; stop what listens there, or name"):
            hold_port("127.0.0.1", port)


def test_the_demo_s_plan_passes() -> None:
    plan = make_plan({}, {})
    check_plan(plan, {})
