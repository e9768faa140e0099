"""Configuration fields shared by router and workers: Redis, addresses, logging, model."""

from __future__ import annotations

import ipaddress
import logging
import socket
import ssl
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, quote, unquote, urlsplit, urlunsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kvrelay.curve import CurveKeys

SENTINEL, CLUSTER = "redis+sentinel", "redis+cluster"
SCHEMES = ("redis", "rediss", "unix", SENTINEL, CLUSTER)
SENTINEL_PORT = 26379


def check_redis_url(url: str) -> str:
    """Returns the URL. Raises ValueError with the fault."""
    scheme = urlsplit(url).scheme
    if scheme not in SCHEMES:
        raise ValueError(f"must start with {', '.join(f'{each}://' for each in SCHEMES[:-1])} or {SCHEMES[-1]}://")
    if scheme == SENTINEL:
        sentinels(url)
    for path in parse_qs(urlsplit(url).query).get("ssl_ca_certs", ()):
        try:
            ssl.create_default_context(cafile=path)
        except ssl.SSLError:
            raise ValueError(f"ssl_ca_certs: {path} holds no certificate") from None
        except OSError as error:
            raise ValueError(f"ssl_ca_certs: cannot read {path}: {error.strerror}") from None
    return url


def sentinels(url: str) -> tuple[list[tuple[str, int]], str, dict[str, Any]]:
    """Sentinel addresses, the primary's name, and further connection arguments."""
    parts = urlsplit(url)
    user_info, _, addresses = parts.netloc.rpartition("@")
    hosts = []
    for address in addresses.split(","):
        host, _, port = address.rpartition(":") if ":" in address else (address, "", str(SENTINEL_PORT))
        if not host or not port.isdecimal():
            raise ValueError(f"{address!r} is not a sentinel address: use host:port")
        hosts.append((host.strip("[]"), int(port)))
    name, _, database = parts.path.strip("/").partition("/")
    if not name or (database and not database.isdecimal()):
        raise ValueError(f"{SENTINEL}://host:port/NAME is needed, or /NAME/DATABASE: the primary's name in sentinel")
    rest: dict[str, Any] = {"db": int(database or 0)}
    if user_info:
        user, _, password = user_info.partition(":")
        rest |= {"username": unquote(user) or None, "password": unquote(password)}
    return hosts, name, rest


DEMO_MODEL_NAME = "kvrelay-demo"

_PACKAGED = Path(__file__).resolve().parents[1] / "_demo"
_CHECKOUT = Path(__file__).resolve().parents[3] / "models" / "demo"


def demo_model_path() -> Path | None:
    """The demo model's directory, in the wheel or the checkout; None if neither exists."""
    for path in (_PACKAGED, _CHECKOUT):
        if (path / "config.json").is_file():
            return path
    return None


LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

MASK = "**********"

NO_REDIS = "none"
"""Value of `redis_url` for a process without Redis."""

NAME_PATTERN = r"^[A-Za-z0-9_.-]{1,64}$"
NAME_FORM = "1 to 64 of the characters A-Z a-z 0-9 _ . -"
MAX_MODEL_NAME_CHARS = 200
LIFE_SIGNS_PER_TIMEOUT = 10


def mask_password(url: str) -> str:
    """The URL with its password masked, for logs."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    user_info, _, host = parts.netloc.rpartition("@")
    user = user_info.partition(":")[0]
    return urlunsplit(parts._replace(netloc=f"{user}:{MASK}@{host}"))


def with_password(url: str, password: str) -> str:
    """The URL with this password, unchanged if it already has one."""
    parts = urlsplit(url)
    user_info, _, host = parts.netloc.rpartition("@")
    if ":" in user_info or not host:
        return url
    return urlunsplit(parts._replace(netloc=f"{user_info}:{quote(password, safe='')}@{host}"))


def is_wildcard(host: str) -> bool:
    """Returns whether `host` means every interface, so peers need another address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return host == "*"


def default_model() -> str:
    """The demo model's directory, or "" (which validation rejects) if it is not installed."""
    return str(demo_model_path() or "")


def default_served_name(data: dict[str, Any]) -> str:
    """`kvrelay-demo` for the demo model, the last part of a directory, or the hub name."""
    model = str(data.get("model", ""))
    demo = demo_model_path()
    if demo is not None and Path(model).resolve() == demo:
        return DEMO_MODEL_NAME
    return Path(model).resolve().name if Path(model).is_dir() else model


class ProcessConfig(BaseModel):
    """Fields of every process. Times are in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, protected_namespaces=())

    host: str = Field(default="127.0.0.1", min_length=1, description="address to listen on")
    advertise_host: str | None = Field(
        default=None,
        description="address under which others reach this process (default: host, or the machine's name if host is a "
        "wildcard)",
    )
    curve_key_file: Path | None = Field(
        default=None,
        description="file with the fleet's key, from `kvrelay keys`: encrypts all traffic between routers and workers, "
        "including KV blocks over zmq, and refuses peers without it; while it rotates, the peers' keys stand below it "
        "(default: no encryption)",
    )
    log_level: LogLevel = Field(default="info", description="lowest level to log")
    log_format: LogFormat = Field(default="text", description="text, or one JSON object per line")

    @field_validator("curve_key_file")
    @classmethod
    def _key_can_be_read(cls, path: Path | None) -> Path | None:
        if path is not None:
            CurveKeys.read(path)
        return path

    @field_validator("advertise_host", mode="before")
    @classmethod
    def _empty_means_default(cls, host: object) -> object:
        return host or None

    @property
    def reachable_host(self) -> str:
        """The address to advertise to peers."""
        return self.advertise_host or (socket.gethostname() if is_wildcard(self.host) else self.host)

    @property
    def secret_files(self) -> list[Path]:
        """The files with keys and passwords."""
        return [self.curve_key_file] if self.curve_key_file else []

    def curve_keys(self) -> CurveKeys | None:
        """The fleet's key, or None without encryption. Raises BadKeyFile."""
        return None if self.curve_key_file is None else CurveKeys.read(self.curve_key_file)


class CommonConfig(ProcessConfig):
    """Fields of router and workers.

    The constructor uses only the given values; `load_config` also reads the file and the environment.
    """

    model: str = Field(
        default_factory=default_model,
        description="directory or Hugging Face name of a decoder model (default: the demo model)",
        json_schema_extra={"flags": ["--model-path"]},
    )
    served_model_name: str = Field(
        default_factory=default_served_name,
        min_length=1,
        max_length=2000,
        description="names for clients, with commas between them; the first also names the fleet in Redis, so it is "
        "the same for routers and workers (default: the name of the directory or on the hub)",
    )
    redis_url: str = Field(
        default="redis://127.0.0.1:6379/0",
        description="URL of Redis, which holds the worker registry and the prefix index: redis://, rediss://, unix://, "
        "redis+sentinel://HOST:PORT,HOST:PORT/NAME or redis+cluster://HOST:PORT; none: no Redis, routers use only "
        "static_workers",
        json_schema_extra={"flags": ["--redis"]},
    )
    redis_password_file: Path | None = Field(
        default=None,
        description="file with the Redis password, for a redis_url without one; surrounding white space is ignored",
    )
    redis_prefix: str = Field(
        default="kvrelay",
        pattern=r"^[A-Za-z0-9_.:-]{1,64}$",
        description="prefix of every key in Redis; separates fleets that share a Redis",
        json_schema_extra={"form": "1 to 64 of the characters A-Z a-z 0-9 _ . : -"},
    )
    peer_timeout_s: float = Field(
        default=5.0,
        ge=0.5,
        le=600,
        description="seconds of silence after which a peer counts as dead",
    )
    max_peers: int = Field(
        default=2048,
        ge=4,
        le=16384,
        description="routers and workers that this process may be connected to at a time; each needs up to 5 file "
        "descriptors, for which the soft limit is raised at the start",
    )
    drain_timeout_s: float = Field(
        default=30.0, ge=0, le=3600, description="seconds for open requests to finish after SIGTERM"
    )
    event_log: Path | None = Field(
        default=None,
        description="file for the events and instructions of the handoff state machines, for `kvrelay replay`; {name} "
        "is replaced by the service's id; contains prompts and output as token ids (default: none)",
    )

    @field_validator("redis_url")
    @classmethod
    def _redis_scheme(cls, url: str) -> str:
        return url if url == NO_REDIS else check_redis_url(url)

    @field_validator("model")
    @classmethod
    def _model_is_there(cls, model: str) -> str:
        if not model:
            raise ValueError("the demo model is not installed: name a model")
        if not model.startswith(("/", "./", "../", "~")):
            return model
        path = Path(model).expanduser()
        if not path.exists():
            raise ValueError(f"there is no directory {path}")
        if not (path / "config.json").is_file():
            raise ValueError(f"{path} is not a model directory: it has no config.json")
        return str(path)

    @field_validator("served_model_name")
    @classmethod
    def _names_have_text(cls, names: str) -> str:
        for name in names.split(","):
            if not 0 < len(name.strip()) <= MAX_MODEL_NAME_CHARS:
                raise ValueError(f"{names!r}: each name must have 1 to {MAX_MODEL_NAME_CHARS} characters")
        return names

    @model_validator(mode="before")
    @classmethod
    def _read_redis_password(cls, values: Any) -> Any:
        """Inserts the file's password into the URL, so the frozen object contains it."""
        named = values.get("redis_password_file") if isinstance(values, dict) else None
        if not named or not isinstance(named, str | Path):
            return values
        path = Path(named)
        try:
            password = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"redis_password_file: cannot read {path}: {error}") from error
        if not password:
            raise ValueError(f"redis_password_file: {path} is empty")
        url = values.get("redis_url") or cls.model_fields["redis_url"].default
        return {**values, "redis_url": with_password(str(url), password)}

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names for clients, each once. The default name may contain commas, as a directory's may."""
        if "served_model_name" not in self.model_fields_set:
            return (self.served_model_name,)
        return tuple(dict.fromkeys(name.strip() for name in self.served_model_name.split(",")))

    @property
    def model_name(self) -> str:
        """The first name. It also names the fleet in Redis and in metrics."""
        return self.model_names[0]

    @property
    def secret_files(self) -> list[Path]:
        return super().secret_files + ([self.redis_password_file] if self.redis_password_file else [])

    @property
    def uses_redis(self) -> bool:
        """Returns whether Redis is configured, reachable or not."""
        return self.redis_url != NO_REDIS

    @property
    def peer_interval_s(self) -> float:
        """Seconds between life signs to a peer: several may be late or lost before `peer_timeout_s` has passed."""
        return self.peer_timeout_s / LIFE_SIGNS_PER_TIMEOUT

    def printable(self) -> dict[str, Any]:
        """All values as JSON types, with secrets masked."""
        values = self.model_dump(mode="json")
        values["redis_url"] = mask_password(self.redis_url)
        return values

    def log_values(self, log: logging.Logger) -> None:
        """Logs the configuration with secrets masked."""
        log.info("configuration: %s", " ".join(f"{name}={value}" for name, value in self.printable().items()))
