"""Each field of the file of `kvrelay up` is used or refused by name; variables that nothing reads are reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.cli.launch_plan import LaunchPlan, make_plan
from kvrelay.config import ConfigError, RouterConfig, WorkerConfig, load_config
from kvrelay.config.loader import TABLES, variable_warnings

ENVIRON = {"KVRELAY_MODEL": "org/model"}
Plan = Callable[..., LaunchPlan]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    def made(content: str, **flags: str) -> LaunchPlan:
        path = tmp_path / "k.toml"
        path.write_text(content)
        return make_plan({"config": str(path), **flags}, ENVIRON)

    return made


def test_the_endpoint_comes_from_the_router_s_table(plan: Plan) -> None:
    made = plan('[router]\nhost = "0.0.0.0"\nport = 9001')
    assert (made.up.host, made.up.port) == ("0.0.0.0", 9001)
    assert (made.router.host, made.router.port) == ("0.0.0.0", 9001)
    assert all(worker.host == "127.0.0.1" and worker.port == 0 for worker in made.workers)


def test_the_table_of_up_wins_over_the_router_s_and_that_over_the_top_level(plan: Plan) -> None:
    assert plan("port = 1\n[router]\nport = 2\n[up]\nport = 3").up.port == 3
    assert plan("port = 1\n[router]\nport = 2").up.port == 2
    assert plan("port = 1\n[up]\nport = 3").up.port == 3
    assert plan("[router]\nport = 2", port="4").up.port == 4
    with pytest.raises(ConfigError, match=r"k\.toml: \[router\] port = 70000: must be a whole number, 0 to 65535"):
        plan("[router]\nport = 70000")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('worker_id = "w"', "worker_id has no effect with kvrelay up: kvrelay up names its services itself"),
        ("[worker]\nport = 7", r"\[worker\] port has no effect with kvrelay up: kvrelay up chooses the ports"),
        ('[decode]\nhost = "10.0.0.1"', r"\[decode\] host has no effect"),
        ('[prefill]\nredis_url = "redis://h"', r"\[prefill\] redis_url has no effect.* in \[up\]"),
        ('[router]\nredis_url = "redis://h"', r"\[router\] redis_url has no effect"),
        ("[router]\nmessage_port = 7\nrouter_id = 'r'", r"message_port has no effect.*; \[router\] router_id has no"),
        ("[rank]\nthreads = 2", r"\[rank\] threads has no effect.*starts all ranks itself"),
        ("[up]\nmetrics_port = 9\n[router]\nmetrics_port = 10", r"\[router\] metrics_port has no effect"),
        ("[worker]\nhttp_port = 9", "http_port = 9: each worker needs a port of its own"),
        ("metrics_port = 9\n[decode]\nhttp_port = 10", "http_port = 10: each worker needs a port of its own"),
        ('redis_password_file = "PASSWORD"', "redis_password_file needs redis_url"),
    ],
)
def test_what_would_have_no_effect_is_refused_by_name(plan: Plan, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "password").write_text("p")
    with pytest.raises(ConfigError, match=message):
        plan(content.replace("PASSWORD", str(tmp_path / "password")))


def test_ports_of_probes_that_differ_are_used(plan: Plan) -> None:
    made = plan("[prefill]\nhttp_port = 9\n[decode]\nhttp_port = 10\n[router]\nmetrics_port = 11")
    assert [worker.http_port for worker in made.workers] == [9, 10]
    assert made.router.metrics_port == 11


SAMPLES = {
    "worker_id": '"w"', "router_id": '"r"', "redis_url": '"redis://h:1"', "host": '"10.0.0.1"', "port": "7",
}  # fmt: skip


@pytest.mark.parametrize("table", ["worker", "prefill", "decode", "router"])
def test_no_field_that_names_or_addresses_a_service_is_silently_ignored(plan: Plan, table: str) -> None:
    """Of each, the plan has the given value or the file is refused."""
    for name, value in SAMPLES.items():
        if name not in TABLES[table].model_fields:
            continue
        refusal = ""
        try:
            made = plan(f"[{table}]\n{name} = {value}")
        except ConfigError as error:
            refusal = str(error)
        if refusal:
            assert f"[{table}] {name}" in refusal
        else:
            used = getattr(made.router, name) if table == "router" else getattr(made.workers[0], name)
            assert str(used) == value.strip('"')


def test_the_services_read_the_same_file_alone(tmp_path: Path) -> None:
    """What `kvrelay up` refuses is for services that are started one by one."""
    path = tmp_path / "k.toml"
    path.write_text('[worker]\nport = 7\n[router]\nrouter_id = "r"')
    config = ["--config", str(path)]
    assert load_config(WorkerConfig, config, environ=ENVIRON, role="decode").port == 7
    assert load_config(RouterConfig, config, environ=ENVIRON).router_id == "r"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[router]\ntoken_budget = 1", r"not a known field; it belongs into \[worker\] or \[prefill\] or \[decode\]"),
        ("[worker]\nmax_runing = 1", r"\[worker\] max_runing is not a known field; did you mean max_running\?"),
        ("token_bugdet = 1", r"token_bugdet is not a known field; did you mean token_budget\?"),
        ("qqq = 1", "qqq is not a known field$"),
    ],
)
def test_an_unknown_field_gets_a_hint(plan: Plan, content: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(content)


# -- variables --------------------------------------------------------------------------------------------------------


def test_unknown_variables_are_reported_with_the_closest_name() -> None:
    (warning,) = variable_warnings({"KVRELAY_TOKEN_BUGDET": "5", "PATH": "/bin", "KVRELAY_MODEL": "m"})
    assert warning == (
        "KVRELAY_TOKEN_BUGDET is not a known variable and has no effect; did you mean KVRELAY_TOKEN_BUDGET?"
    )
    assert variable_warnings({"KVRELAY_QQQQ": "5"}) == ["KVRELAY_QQQQ is not a known variable and has no effect"]
    assert variable_warnings({"KVRELAY_QQQQ": ""}) == []


def test_variables_of_deployments_and_kubernetes_are_known() -> None:
    others = {
        "KVRELAY_CACHE_DIR": "/c",
        "KVRELAY_CONFIG": "k.toml",
        "KVRELAY_REDIS_IMAGE": "redis",
        "KVRELAY_GRAFANA_PUBLISH": "3000",
        "KVRELAY_ROUTER_SERVICE_HOST": "10.0.0.1",
        "KVRELAY_ROUTER_SERVICE_PORT_HTTP": "8000",
        "KVRELAY_ROUTER_PORT": "tcp://10.0.0.1:8000",
        "KVRELAY_ROUTER_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert variable_warnings(others) == []


def test_variables_that_up_overrides_are_reported_by_it_alone() -> None:
    environ = {"KVRELAY_WORKER_ID": "w", "KVRELAY_HOST": "::"}
    assert variable_warnings(environ) == []
    assert [each.split()[0] for each in variable_warnings(environ, for_up=True)] == ["KVRELAY_WORKER_ID"]


@given(st.sampled_from(sorted({name for each in TABLES.values() for name in each.model_fields})))
def test_every_field_is_a_known_variable(name: str) -> None:
    assert variable_warnings({f"KVRELAY_{name.upper()}": "1"}) == []
