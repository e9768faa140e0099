"""The undocumented members of uvicorn that the router relies on. A new version of uvicorn must have all of them."""

from __future__ import annotations

import ast
import asyncio
import tomllib
from importlib.metadata import version
from pathlib import Path

import uvicorn
from packaging.requirements import Requirement
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from kvrelay_router.http import uvicorn_internals
from tests.unit.router.http.test_one_write import Transport, cycle_on

ROOT = Path(__file__).parents[4]
SOURCE = Path(uvicorn_internals.__file__)

CYCLE = {
    "body",
    "chunked_encoding",
    "disconnected",
    "expected_content_length",
    "flow",
    "keep_alive",
    "message_event",
    "more_body",
    "response_complete",
    "response_started",
    "scope",
    "transport",
    "waiting_for_100_continue",
}
"""Attributes of a `RequestResponseCycle`."""

PROTOCOL = {
    "connections",
    "cycle",
    "expect_100_continue",
    "flow",
    "headers",
    "loop",
    "parser",
    "pipeline",
    "timeout_keep_alive",
    "timeout_keep_alive_handler",
    "timeout_keep_alive_task",
    "transport",
    "url",
}
"""Attributes of an `HttpToolsProtocol` that `UvicornConnection` reads or sets."""

OVERRIDDEN = {
    "_start_asgi_task",
    "_unsupported_upgrade_warning",
    "connection_lost",
    "connection_made",
    "data_received",
    "eof_received",
    "on_body",
    "on_header",
    "on_headers_complete",
    "on_message_begin",
    "on_message_complete",
    "on_response_complete",
    "on_url",
    "pause_writing",
    "resume_writing",
    "send_400_response",
    "shutdown",
}
"""Methods of an `HttpToolsProtocol` that `UvicornConnection` overrides."""

SERVER = {"config", "lifespan", "server_state", "servers", "started"}
SERVER_OVERRIDDEN = {"capture_signals", "main_loop", "on_tick", "shutdown", "startup"}


def protocol() -> HttpToolsProtocol:
    config = uvicorn.Config(lambda *asgi: None, http="httptools", ws="none", lifespan="off", log_config=None)
    made = HttpToolsProtocol(config=config, server_state=ServerState(), app_state={})
    made.on_message_begin()
    return made


async def test_a_cycle_has_its_members() -> None:
    cycle = cycle_on(Transport())
    assert {name for name in CYCLE if not hasattr(cycle, name)} == set()
    assert isinstance(cycle.body, bytearray) and cycle.chunked_encoding is None and cycle.expected_content_length == 0
    assert isinstance(cycle.message_event, asyncio.Event)


async def test_a_protocol_has_its_members() -> None:
    assert {name for name in PROTOCOL if not hasattr(protocol(), name)} == set()


def test_overridden_methods_exist() -> None:
    assert {name for name in OVERRIDDEN if name not in HttpToolsProtocol.__dict__} == set()
    assert {name for name in SERVER_OVERRIDDEN if name not in uvicorn.Server.__dict__} == set()


async def test_a_server_has_its_members() -> None:
    server = uvicorn.Server(uvicorn.Config(lambda *asgi: None, lifespan="off", log_config=None))
    server.servers = []  # `startup` sets it
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)  # `serve` sets it
    assert {name for name in SERVER if not hasattr(server, name)} == set()
    assert server.lifespan.state == {} and server.server_state.connections == set()
    assert server.config.http_protocol_class is not None


def defined(name: str) -> ast.ClassDef:
    tree = ast.parse(SOURCE.read_text())
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def inherited_names(owner: str) -> set[str]:
    """What a class of the file uses of `self` that it does not define itself."""
    node = defined(owner)
    own = {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    attributes = [each for each in ast.walk(node) if isinstance(each, ast.Attribute)]
    of_self = [each for each in attributes if isinstance(each.value, ast.Name) and each.value.id == "self"]
    initial = next(each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__")
    set_here = {each.attr for each in ast.walk(initial) if isinstance(each, ast.Attribute)}
    return {each.attr for each in of_self} - own - set_here


def test_the_lists_are_complete() -> None:
    """The file uses no member that is not listed above."""
    used = {
        each.attr
        for each in ast.walk(ast.parse(SOURCE.read_text()))
        if isinstance(each, ast.Attribute)
        and (
            (isinstance(each.value, ast.Name) and each.value.id == "cycle")
            or (isinstance(each.value, ast.Attribute) and each.value.attr in ("_cycle", "_running_cycle", "cycle"))
        )
    }
    assert used == CYCLE
    assert inherited_names("UvicornConnection") == PROTOCOL
    assert inherited_names("EmbeddedServer") == SERVER
    own = {"__init__", "is_idle"}
    methods = {each.name for each in defined("UvicornConnection").body if isinstance(each, ast.FunctionDef)}
    assert {name for name in methods - own if hasattr(HttpToolsProtocol, name)} == OVERRIDDEN


def test_no_other_file_uses_uvicorns_protocols() -> None:
    files = [*(ROOT / "services").rglob("*.py"), *(ROOT / "shared").rglob("*.py")]
    assert [each for each in files if "uvicorn.protocols" in each.read_text()] == [SOURCE]


def test_the_version_is_capped() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (uvicorns,) = [each for each in map(Requirement, project["dependencies"]) if each.name == "uvicorn"]
    assert version("uvicorn") in uvicorns.specifier
    assert any(each.operator in ("<", "<=", "==") for each in uvicorns.specifier)
    constraint = [
        each for each in (ROOT / "constraints-cpu.txt").read_text().splitlines() if each.startswith("uvicorn=")
    ]
    assert [each.removeprefix("uvicorn==") in uvicorns.specifier for each in constraint] == [True]
