"""Configuration of the router."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    ByteSize,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from kvrelay.config.common import NAME_FORM, NAME_PATTERN, CommonConfig
from kvrelay.config.field_values import first_fault
from kvrelay.config.table_files import LEAST_PER_MINUTE, OwnKeyLimits, read_fleets, read_key_limits

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-fA-F:.]+\]|[^/?#@\s\[\]:]+)(:[0-9]{1,5})?")
"""The `Origin` header as browsers send it."""
MAX_BODY_BYTES = 16 << 20
"""The largest request body. Parsing it holds the event loop for 20 ms as one text, for 0.3 s as many small values."""


class RouterConfig(CommonConfig):
    """Fields of one router. Times are in seconds."""

    router_id: str = Field(
        default_factory=lambda: f"router-{secrets.token_hex(4)}",
        pattern=NAME_PATTERN,
        description="name of this router, unique in the fleet (default: router and random digits)",
        json_schema_extra={"form": NAME_FORM},
    )
    port: int = Field(default=8000, ge=0, le=65535, description="port of the HTTP endpoint; 0: any free one")
    reuse_port: bool = Field(
        default=False,
        description="share the port with other routers on this machine (SO_REUSEPORT): the kernel divides the "
        "connections among them, not evenly",
    )
    message_host: str | None = Field(
        default=None,
        description="address to listen on for workers' messages and for the pages of metrics_port (default: host)",
    )
    message_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="port for workers' messages; several fleets use the following ports; 0: any free one",
    )
    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="port of /metrics for Prometheus, /health and /ready, without API keys; 0: any free one (default: "
        "none; /metrics is at the API's port too)",
    )

    api_keys: tuple[SecretStr, ...] = Field(
        default=(),
        description="API keys of clients; none: no key is needed",
        json_schema_extra={"flags": None, "list": True},
    )
    api_keys_file: Path | None = Field(
        default=None, description="file with one API key per line; blank lines and lines that start with # are ignored"
    )
    admin_api_keys: tuple[SecretStr, ...] = Field(
        default=(),
        description="further API keys, which see the requests of all keys in /requests, /fleet and timelines; other "
        "keys see their own",
        json_schema_extra={"flags": None, "list": True},
    )
    admin_api_keys_file: Path | None = Field(
        default=None, description="file with one such key per line, as in api_keys_file"
    )
    tool_parser: str = Field(
        default="auto",
        min_length=1,
        json_schema_extra={"flags": ["--tool-call-parser"]},
        description="how the model writes tool calls: hermes (also Qwen 2.5 and 3), qwen3_coder, seed_oss, "
        "llama3_json, pythonic, mistral, mistral_json, deepseek_v3, deepseek_v31, deepseek_v32, glm45, granite, "
        "kimi_k2, minimax_m2, harmony; template: as its tokenizer's response_template says; auto: as its chat template "
        "shows, or else its response_template; none: only required calls, as JSON; a path that ends in .py: the FORMAT "
        "of that file. vLLM's and SGLang's names mean the same here",
    )
    reasoning_parser: str = Field(
        default="auto",
        min_length=1,
        description="how the model writes reasoning, which answers have apart from content: think (<think> tags), "
        "deepseek_r1 (the same, opened or not), mistral ([THINK]), seed_oss (<seed:think>), harmony, template, or a "
        "name of vLLM's or SGLang's; "
        "auto: as its chat template shows; none: reasoning is content",
    )
    access_log: bool = Field(
        default=True,
        description="log each generation: key's name, model, status, tokens, times, attempts, id; never its text",
    )
    allowed_origins: tuple[str, ...] = Field(
        default=(),
        description="origins of web pages that may use the API, as in https://chat.example, or * for all; repeat the "
        "flag for several (default: none)",
        json_schema_extra={"flags": ["--allowed-origin"], "list": True},
    )
    root_path: str = Field(
        default="",
        pattern=r"^((/[A-Za-z0-9._~-]+)+|)$",
        json_schema_extra={"form": "a path that begins with a slash and ends without one, as in /llm"},
        description="path before those of the API behind a proxy, as in /llm: requests may have it or not, and "
        "/openapi.json says it",
    )
    response_store_bytes: ByteSize = Field(
        default=ByteSize(64 << 20),
        ge=0,
        le=1 << 40,
        description="bytes of responses that are kept for previous_response_id and GET /v1/responses/ID, as in 64MiB: "
        "in Redis by all routers together, without Redis by each process; those that were not used for the longest "
        "time are dropped; 0: none is kept",
    )
    max_pending_bytes: ByteSize = Field(
        default=ByteSize(512 << 20),
        ge=MAX_BODY_BYTES,
        le=1 << 40,
        description="bytes of unfinished bodies and of requests in progress per process, as in 512MiB; more get 503",
    )
    request_timeout_s: float = Field(
        default=600.0, gt=0, le=86400, description="seconds that a request may take from its arrival"
    )
    max_attempts: int = Field(default=3, ge=1, le=100, description="counted attempts before a request fails")
    max_wait_for_worker_s: float = Field(
        default=120.0,
        ge=0,
        le=86400,
        description="seconds that a request waits while no worker is ready for it, as after a worker's death; enough "
        "for its restart with the load of the model; 0: such requests are refused with 503",
        json_schema_extra={"flags": ["--max-wait-for-worker"]},
    )
    max_queued_requests: int = Field(
        default=1024, ge=1, le=1 << 20, description="requests in progress per process; more get 429"
    )
    key_requests_per_minute: float | None = Field(
        default=None,
        ge=LEAST_PER_MINUTE,
        le=1e6,
        description="requests per minute of one API key over all routers",
    )
    key_burst: int = Field(
        default=10, ge=1, le=1 << 20, description="requests that a key may send at once after a pause"
    )
    key_concurrency: int | None = Field(
        default=None, ge=1, le=1 << 20, description="concurrent requests of one API key over all routers"
    )
    key_least_priority: int | None = Field(
        default=None,
        ge=-(2**31),
        lt=2**31,
        description="smallest (most urgent) priority that a request may set",
    )
    key_limits_file: Path | None = Field(
        default=None,
        description="TOML file with settings of single keys: [[key]] tables with key, requests_per_minute, burst, "
        "concurrency, least_priority, and tenant (a name that keys may share) and weight (of the tenant's fair share)",
    )
    fair_queueing: Literal["key", "user", "off"] = Field(
        default="key",
        description="busy workers are divided fairly among: key: tenants (an API key, or the keys that key_limits_file "
        "gives one tenant); user: the users of each tenant, by the field user of requests; off: not divided",
    )
    key_cache_salt: bool = Field(
        default=False,
        description="tenants share no cached prefixes: each request gets a cache_salt derived from its tenant, before "
        "its own one",
    )
    ttft_deadline_s: float | None = Field(
        default=None,
        gt=0,
        le=86400,
        description="refuse a request with 429 if its first token is expected after this many seconds; its "
        "x-request-timeout also applies",
    )
    routing_policy: Literal["cost", "least_loaded", "round_robin", "random", "prefix_only", "sticky"] = Field(
        default="cost", description="routing policy among ready workers"
    )
    local_prefill_tokens: int | None = Field(
        default=None,
        ge=0,
        le=1 << 20,
        description="prompts of at most this many tokens go to a decode worker alone; 0: none (default: if "
        "routing_policy cost expects that to be faster)",
    )
    static_workers: tuple[str, ...] = Field(
        default=(),
        description="workers to use in addition to those in Redis: http://HOST:PORT with the worker's http_port; "
        "repeat the flag for several",
        json_schema_extra={"flags": ["--static-worker"], "list": True},
    )
    fleets_file: Path | None = Field(
        default=None,
        description="TOML file with further models that this router serves, each on workers of its own: [[fleet]] "
        "tables with model and served_model_name, as the workers have them, and tool_parser and reasoning_parser "
        "(default: only model)",
    )

    @model_validator(mode="after")
    def _fleets_have_ports(self) -> Self:
        if self.message_port and self.message_port + len(self.fleets()) > 65536:
            raise ValueError("message_port and the ports after it, one for each fleet, must be 65535 at most")
        return self

    @field_validator("fleets_file")
    @classmethod
    def _fleets_can_be_read(cls, path: Path | None) -> Path | None:
        if path is not None:
            read_fleets(path)
        return path

    @model_validator(mode="after")
    def _models_have_own_names(self) -> Self:
        owners: dict[str, str] = {}
        for fleet in self.fleets():
            for name in fleet.model_names:
                if name in owners:
                    raise ValueError(
                        f"fleets_file: {self.fleets_file}: {name!r} is the name of {owners[name]} and of "
                        f"{fleet.model}; each fleet must have names of its own"
                    )
                owners[name] = fleet.model
        return self

    @property
    def max_connections(self) -> int:
        """Client connections per process. A connection of a request in progress is busy; the others are idle ones that
        clients keep, which are cheap."""
        return max(4096, 4 * self.max_queued_requests)

    @property
    def pages_port(self) -> int | None:
        """The port for /metrics, /health and /ready beside that of the API, which has them too; None without one."""
        return None if self.port and self.metrics_port == self.port else self.metrics_port

    @property
    def pages_host(self) -> str:
        """The address to listen on for /metrics, /health and /ready: that of messages, which is not the clients'."""
        return self.message_host or self.host

    def fleets(self) -> tuple[RouterConfig, ...]:
        """The configuration for each fleet, the one of `model` first. They differ in `message_port` and the fields of
        `fleets_file`, and share `max_peers`."""
        if self.fleets_file is None:
            return (self,)
        entries = read_fleets(self.fleets_file)
        share = {"max_peers": max(4, self.max_peers // (len(entries) + 1))}
        further = [
            self.model_copy(
                update={
                    **share,
                    "model": self._model_is_there(entry.model),
                    "served_model_name": self._names_have_text(entry.served_model_name),
                    "tool_parser": entry.tool_parser,
                    "reasoning_parser": entry.reasoning_parser,
                    "message_port": self.message_port and self.message_port + number,
                }
            )
            for number, entry in enumerate(entries, 1)
        ]
        return (self.model_copy(update=share), *further)

    @field_validator("static_workers")
    @classmethod
    def _are_addresses(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            static_worker_address(url)
        return tuple(dict.fromkeys(urls))

    @model_validator(mode="after")
    def _workers_can_be_found(self) -> Self:
        if not self.uses_redis and not self.static_workers:
            raise ValueError(
                "redis_url = none needs static_workers: without Redis the router has no other list of workers"
            )
        return self

    @field_validator("allowed_origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is not an origin: SCHEME://HOST or SCHEME://HOST:PORT, without a path, or *"
                )
        return tuple(dict.fromkeys(origins))

    @field_validator("api_keys", "admin_api_keys")
    @classmethod
    def _no_empty_key(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if any(not key.get_secret_value().strip() for key in keys):
            raise ValueError("an empty API key is not allowed: it would admit every client")
        return keys

    @field_validator("key_limits_file")
    @classmethod
    def _limits_can_be_read(cls, path: Path | None) -> Path | None:
        if path is not None:
            read_key_limits(path)
        return path

    @model_validator(mode="after")
    def _limits_are_of_known_keys(self) -> Self:
        known = {key.get_secret_value() for key in (*self.api_keys, *self.admin_api_keys)}
        for number, key in enumerate(self.own_key_limits(), 1):
            if key not in known:
                raise ValueError(
                    f"key_limits_file: {self.key_limits_file}: [[key]] number {number} has a key that is neither in "
                    f"api_keys nor in api_keys_file"
                )
        return self

    @model_validator(mode="after")
    def _tenants_have_one_weight(self) -> Self:
        weights: dict[str, float] = {}
        for each in self.own_key_limits().values():
            if each.tenant is not None and weights.setdefault(each.tenant, each.weight) != each.weight:
                raise ValueError(
                    f"key_limits_file: {self.key_limits_file}: tenant {each.tenant} has the weights "
                    f"{weights[each.tenant]:g} and {each.weight:g}; give all its keys the same one"
                )
        return self

    def own_key_limits(self) -> dict[str, OwnKeyLimits]:
        """Entries of `key_limits_file`, by API key."""
        return read_key_limits(self.key_limits_file) if self.key_limits_file is not None else {}

    _own_keys: dict[str, Any] = PrivateAttr(default_factory=dict)  # those that come from no file

    @model_validator(mode="wrap")
    @classmethod
    def _read_keys(cls, values: Any, make: ModelWrapValidatorHandler[Self]) -> Self:
        """Adds the keys of the files, so the frozen object contains all."""
        if not isinstance(values, dict):
            return make(values)
        own = {name: values.get(name, ()) for name in ("api_keys", "admin_api_keys")}
        for name in own:
            path = values.get(f"{name}_file")
            if path and isinstance(path, str | Path):
                values = {**values, name: (*own[name], *_read_key_file(f"{name}_file", Path(path)))}
        config = make(values)
        config._own_keys = own
        return config

    @property
    def key_files(self) -> list[Path]:
        """The files that say which API keys are accepted and what each may do."""
        return [path for path in (self.api_keys_file, self.admin_api_keys_file, self.key_limits_file) if path]

    @property
    def secret_files(self) -> list[Path]:
        return super().secret_files + self.key_files

    def read_again(self) -> Self:
        """The same with the present contents of the key files. Raises ValueError, which names no key."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        try:
            return type(self).model_validate(given | self._own_keys)
        except ValidationError as error:
            raise ValueError(first_fault(type(self), error)) from None


def _read_key_file(field: str, path: Path) -> list[SecretStr]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ValueError(f"{field}: cannot read {path}: {error.strerror}") from error
    keys = [SecretStr(line) for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"{field}: {path} holds no key")
    return keys


def static_worker_address(url: str) -> tuple[str, int]:
    """Host and port of `http://HOST:PORT`. Raises ValueError for any other URL."""
    wrong = ValueError(f"{url!r} is not a worker's address: http://HOST:PORT is needed, with PORT 1 to 65535")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise wrong from None
    rest = parts.path.rstrip("/") or parts.query or parts.fragment or "@" in parts.netloc
    if parts.scheme != "http" or not host or not port or rest:
        raise wrong
    return host, port
