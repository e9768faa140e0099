"""What `kvrelay up` is going to start, and what is found before it does."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from kvrelay.cli import preflight
from kvrelay.cli.launch_plan import make_plan, to_argv
from kvrelay.cli.preflight import (
    check_memory,
    check_page_ports,
    check_plan,
    check_transfer,
    hold_port,
)
from kvrelay.cli.up import cores_note, cut_note, greeting
from kvrelay.config import ConfigError, RouterConfig, WorkerConfig, load_config

ENVIRON = {"KVRELAY_MODEL": "org/model"}


def test_cores_are_split_among_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert [worker.threads for worker in make_plan({"port": "1"}, ENVIRON).workers] == [4, 4]
    assert {worker.threads for worker in make_plan({"decode": "20"}, ENVIRON).workers} == {1}
    assert {worker.threads for worker in make_plan({"threads": "3"}, ENVIRON).workers} == {3}


@pytest.mark.parametrize(
    ("flags", "lending"),
    [
        ({}, ("prefill-0", "decode-0")),
        ({"prefill": "0"}, ()),  # nobody to lend to
        ({"threads": "1"}, ()),
        ({"backend": "simulated"}, ()),
        ({"prefill": "2", "prefill_tensor_parallel_size": "2", "decode": "2"}, ("decode-0", "decode-1")),
    ],
)
def test_workers_that_lend_each_other_cores(flags: dict[str, str], lending: tuple[str, ...]) -> None:
    assert make_plan(flags, ENVIRON).lending == lending


def test_the_note_on_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    dynamic = "2 workers of 4 threads each, more while others have nothing to do"
    assert cores_note(make_plan({}, ENVIRON)) == dynamic
    assert cores_note(make_plan({"threads": "1"}, ENVIRON)) == "2 workers of 1 thread each"
    assert cores_note(make_plan({"prefill": "0"}, ENVIRON)) is None


def test_workers_stay_on_the_loopback_whatever_the_environment_says() -> None:
    environ = {**ENVIRON, "KVRELAY_HOST": "0.0.0.0", "KVRELAY_ADVERTISE_HOST": "10.0.0.1", "KVRELAY_PORT": "9000"}
    plan = make_plan({}, environ)
    assert (plan.up.host, plan.up.port) == ("0.0.0.0", 9000)
    for worker in plan.workers:
        assert (worker.host, worker.reachable_host, worker.port) == ("127.0.0.1", "127.0.0.1", 0)
    assert (plan.router.host, plan.router.port, plan.router.message_host) == ("0.0.0.0", 9000, "127.0.0.1")
    assert plan.router.reachable_host == "127.0.0.1"


def test_services_resolve_the_flags_they_get_to_what_was_planned() -> None:
    flags = {"token_budget": "1024", "prefix_cache": False, "max_attempts": "7", "log_format": "json", "port": "8123"}
    plan = make_plan(flags, ENVIRON)
    for planned in plan.workers:
        argv = [*plan.worker_flags, f"--worker-id={planned.worker_id}", f"--threads={planned.threads}"]
        assert load_config(WorkerConfig, argv, environ=ENVIRON, role=planned.role) == planned
    assert load_config(RouterConfig, plan.router_flags, environ=ENVIRON) == plan.router


def test_a_redis_url_never_becomes_a_flag() -> None:
    assert to_argv({"redis_url": "redis://:secret@h", "token_budget": 5}, WorkerConfig) == ["--token-budget=5"]


def test_two_on_one_redis_get_different_names() -> None:
    flags = {"redis_url": "redis://h"}
    names = [{worker.worker_id for worker in make_plan(flags, ENVIRON).workers} for _ in range(2)]
    assert not names[0] & names[1]
    assert {worker.worker_id for worker in make_plan({}, ENVIRON).workers} == {"prefill-0", "decode-0"}


def test_simulated_workers_share_processes() -> None:
    flags = {"prefill": "5", "decode": "2", "num_workers": "2", "backend": "simulated"}
    plan = make_plan(flags, ENVIRON)
    processes = [(worker.worker_id, worker.num_workers) for worker in plan.workers]
    assert processes == [("prefill-0", 2), ("prefill-1", 2), ("prefill-2", 1), ("decode-0", 2)]
    with pytest.raises(ConfigError, match=r"num_workers.* need backend = simulated"):
        make_plan(flags | {"backend": "auto"}, ENVIRON)


def test_there_is_always_a_decode_worker() -> None:
    flags = {"prefill": "0", "prefill_delayer": True}  # which prefill workers refuse
    assert [worker.role for worker in make_plan(flags, ENVIRON).workers] == ["decode"]
    with pytest.raises(ConfigError, match="--decode"):
        make_plan({"decode": "0"}, ENVIRON)


def test_the_request_to_paste_is_valid_shell() -> None:
    plan = make_plan({"port": "8123", "host": "::", "served_model_name": "it's"}, ENVIRON)
    text = greeting(plan)
    assert "http://127.0.0.1:8123/v1/chat/completions" in text
    assert "it'\\''s" in text
    assert "Authorization" not in text
    keyed = greeting(make_plan({}, {**ENVIRON, "KVRELAY_API_KEYS": "k3y"}))
    assert '"Authorization: Bearer $KVRELAY_API_KEY"' in keyed
    assert "k3y" not in keyed


def test_the_greeting_names_commands_as_they_are_found_from_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bin_of_venv = tmp_path / "my clone" / ".venv" / "bin"
    bin_of_venv.mkdir(parents=True)
    monkeypatch.setattr("sys.executable", str(bin_of_venv / "python"))
    monkeypatch.chdir(bin_of_venv.parents[1])
    plan = make_plan({"port": "8123"}, ENVIRON)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "terminal   .venv/bin/python -m kvrelay top --port 8123\n" in greeting(plan)
    (bin_of_venv / "kvrelay").touch()
    text = greeting(plan)
    for line in ("terminal   .venv/bin/kvrelay top --port 8123\n", "logs       .kvrelay/8123\n"):
        assert line in text
    full = f"'{bin_of_venv / 'kvrelay'}' top --port 8123 --state-dir '{tmp_path / 'my clone' / '.kvrelay'}'"
    assert f"From another directory: {full}\n" in text
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert f"chat       '{bin_of_venv / 'kvrelay'}' chat --port 8123\n" in greeting(plan)
    absolute = greeting(make_plan({"port": "8123", "state_dir": str(tmp_path / "state")}, ENVIRON))
    assert "From another" not in absolute and f"logs       {tmp_path / 'state' / '8123'}" in absolute
    (bin_of_venv / "kvrelay").chmod(0o755)
    monkeypatch.setenv("PATH", str(bin_of_venv))
    assert "terminal   kvrelay top --port 8123\n" in greeting(plan)
    (tmp_path / "elsewhere" / "kvrelay").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))  # another installation
    assert f"terminal   '{bin_of_venv / 'kvrelay'}' top" in greeting(plan)
    assert "is a small model for trials" not in greeting(plan)
    assert f"kvrelay-demo is a small model for trials; another: '{bin_of_venv / 'kvrelay'}' up" in greeting(
        make_plan({}, {})
    )


def test_a_cut_length_is_noted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 2048}')
    flags = {"model": str(tmp_path)}
    note = cut_note(make_plan(flags, {}), 160)
    assert note is not None and note.startswith("max_model_len is cut from 2048 to 160 tokens")
    assert cut_note(make_plan(flags, {}), 2048) is None
    assert cut_note(make_plan(flags, {}), None) is None
    assert cut_note(make_plan({**flags, "max_model_len": "100"}, {}), 100) is None
    longer = cut_note(make_plan({**flags, "max_model_len": "4096"}, {}), 2048)
    assert longer is not None and "from 4096 to 2048" in longer
    assert cut_note(make_plan({"model": "org/model"}, {}), 160) is None
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 512}}')
    assert cut_note(make_plan(flags, {}), 160) is not None


def test_a_detached_stack_names_no_key_to_stop_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.cli.up.own_command", lambda **_: "kvrelay")
    assert "(Ctrl-C stops it)" in greeting(make_plan({"port": "8123"}, ENVIRON))
    monkeypatch.setenv("KVRELAY_INHERITED_DETACHED", "1")
    assert "(kvrelay stop --port 8123 stops it)" in greeting(make_plan({"port": "8123"}, ENVIRON))


# -- what is found before a service starts ---------------------------------------------------------------------------


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
