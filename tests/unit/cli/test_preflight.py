"""What is found before a service starts."""

from __future__ import annotations

import re
import socket

import pytest

from kvrelay.cli import preflight
from kvrelay.cli.launch_plan import make_plan
from kvrelay.cli.preflight import (
    check_memory,
    check_page_ports,
    check_plan,
    check_transfer,
    hold_port,
)
from kvrelay.config import ConfigError

ENVIRON = {"KVRELAY_MODEL": "org/model"}
GIB = 1 << 30


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
    plan = make_plan({}, {**ENVIRON, "KVRELAY_METRICS_PORT": "20500"})
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
    check_plan(plan)
