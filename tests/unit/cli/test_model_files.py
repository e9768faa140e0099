"""Where the files of a model are found before a service starts."""

from __future__ import annotations

import hashlib
import json
import random
import re
import socket
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrelay.cli import preflight
from kvrelay.cli.launch_plan import make_plan
from kvrelay.cli.preflight import cache_directory, find_model, find_models
from kvrelay.config import ConfigError, WorkerConfig
from kvrelay.model_directory import wrong_file
from kvrelay.text.tokenizer_files import TokenizerNotFound, load_source
from kvrelay.worker.worker_main import load_runner
from tests.e2e.conftest import DEMO_MODEL
from tests.fakes.text_model import write_text_model
from tests.thoroughness import examples

COMMIT = "5" * 40
WEIGHTS = safetensors.numpy.save({"a": np.zeros(1, np.float32)})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_a_directory_with_weights_is_taken(model: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"no model\.safetensors and no model\.safetensors\.index\.json; --load-format"
    ):
        find_model(str(model), {}, needs_weights=True)
    find_model(str(model), {}, needs_weights=False)
    (model / "model.safetensors").write_bytes(WEIGHTS)
    find_model(str(model), {}, needs_weights=True)


def test_missing_shards_are_counted_and_named(model: Path) -> None:
    shards = [f"model-{number}-of-3.safetensors" for number in (1, 2, 3)]
    index = {"weight_map": dict(zip("abc", shards, strict=True))}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / shards[0]).write_bytes(WEIGHTS)
    with pytest.raises(ConfigError, match=rf"2 of the weight files .* the first is {shards[1]}; complete the download"):
        find_model(str(model), {}, needs_weights=True)
    for shard in shards:
        (model / shard).write_bytes(WEIGHTS)
    find_model(str(model), {}, needs_weights=True)
    (model / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not an index of weight files"):
        find_model(str(model), {}, needs_weights=True)


def test_other_formats_are_named(model: Path) -> None:
    (model / "model-q4.gguf").touch()
    with pytest.raises(ConfigError, match=r"model-q4\.gguf is of a format that is not read"):
        find_model(str(model), {}, needs_weights=True)
    (model / "pytorch_model.bin").write_bytes(b"\x80\x02")
    find_model(str(model), {}, needs_weights=True)


# -- files that are not what their names say -------------------------------------------------------------------------


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n"
PAGE = b"\n<!DOCTYPE html>\n<html><body>Sign in</body></html>"
NOT_WHAT_IT_SAYS = [
    ("model.safetensors", POINTER, "is a pointer of Git LFS.*`git lfs pull`"),
    ("model.safetensors", b"", r"model\.safetensors is empty: download it again"),
    ("model.safetensors", WEIGHTS[:-1], "is cut off: its header says at least 68 bytes, and it has 67"),
    ("model.safetensors", WEIGHTS[:20], "is cut off"),
    ("model.safetensors", WEIGHTS + b"x", "is too long"),
    ("model.safetensors", PAGE, "is a page of HTML"),
    ("model.safetensors", b"broken", "is not of the format safetensors"),
    ("model.safetensors", b"PK\x03\x04zip of torch", "is a zip archive"),
    ("model.safetensors", b"GGUF\x03", "is of the format GGUF"),
    ("model.safetensors", b"\x02\0\0\0\0\0\0\0{]", "its header cannot be read"),
    ("tokenizer.json", POINTER, r"tokenizer\.json is a pointer of Git LFS"),
    ("tokenizer.json", b'{"model": {"vocab"', "is not valid JSON, perhaps cut off"),
    ("tokenizer.model", b"/annex/objects/SHA256E-s499723", "is a pointer of git-annex"),
    ("config.json", PAGE, r"config\.json is a page of HTML.*: download it again"),
    ("config.json", b"", r"config\.json is empty"),
    ("config.json", b"{", r"config\.json is not valid JSON"),
    ("config.json", b"[]", "holds no JSON object"),
    ("generation_config.json", b"<?xml version='1.0'?><Error/>", "is an XML document"),
    ("chat_template.jinja", PAGE, "is a page of HTML"),
]


@pytest.mark.parametrize(("name", "content", "message"), NOT_WHAT_IT_SAYS)
def test_a_file_that_is_not_what_its_name_says_is_refused_before_anything_starts(
    name: str, content: bytes, message: str, model: Path
) -> None:
    (model / "model.safetensors").write_bytes(WEIGHTS)
    find_model(str(model), {}, needs_weights=True)
    (model / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"--model {model}: .*{message}"):
        find_model(str(model), {}, needs_weights=True)
    config = WorkerConfig(model=str(model), worker_id="w", role="decode")
    with pytest.raises(ValueError, match=message):
        load_runner(config)
    if name == "model.safetensors":
        find_model(str(model), {}, needs_weights=False)
    else:
        with pytest.raises(TokenizerNotFound, match=message):
            load_source(str(model))


def test_weights_in_parts_and_of_torch_are_looked_at(model: Path) -> None:
    index = model / "model.safetensors.index.json"
    index.write_bytes(POINTER)
    with pytest.raises(ConfigError, match=r"index\.json is a pointer of Git LFS"):
        find_model(str(model), {}, needs_weights=True)
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    (model / "1.safetensors").write_bytes(WEIGHTS)
    (model / "2.safetensors").write_bytes(POINTER)
    with pytest.raises(ConfigError, match=r"2\.safetensors is a pointer of Git LFS"):
        find_model(str(model), {}, needs_weights=True)
    index.unlink()
    for content, message in ((b"", "is empty"), (b"PK\x03\x04", "is cut off after 4 bytes"), (POINTER, "Git LFS")):
        (model / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(ConfigError, match=rf"pytorch_model\.bin {message}|{message}"):
            find_model(str(model), {}, needs_weights=True)


TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]
SHARDS = ["a.safetensors", "b.safetensors"]


def write_whole(directory: Path, rng: random.Random) -> list[str]:
    """A model whose files are what they say. Returns their names."""
    for path in directory.iterdir():
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    write_text_model(directory)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    for name in rng.sample(["generation_config.json", "special_tokens_map.json"], rng.randint(0, 2)):
        (directory / name).write_text(
            '{"eos_token_id": 1}' if name.startswith("gen") else '{"pad_token": "<|im_end|>"}'
        )
    match rng.choice(["one file", "parts", "torch"]):
        case "one file":
            (directory / "model.safetensors").write_bytes(WEIGHTS)
        case "parts":
            for shard in SHARDS:
                (directory / shard).write_bytes(WEIGHTS)
            index = {"metadata": {}, "weight_map": dict(zip("ab", SHARDS, strict=True))}
            (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        case "torch":
            with zipfile.ZipFile(directory / "pytorch_model.bin", "w") as archive:
                archive.writestr("data.pkl", b"\x80\x02.")
    return sorted(path.name for path in directory.iterdir())


def damage(path: Path, rng: random.Random) -> str | None:
    """Makes a file something else. Returns what a message has to say of it; None if nothing can tell."""
    content = path.read_bytes()
    kinds: dict[str, bytes] = {
        "pointer of Git LFS": POINTER,
        "pointer of Xet": b"# xet version 0\nfilesize = 5",
        "page of HTML": PAGE,
        "XML document": b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>',
    }
    if path.suffix != ".jinja":
        kinds |= {"empty": b"", "cut off|not of the format": content[: rng.randrange(1, len(content))]}
    if path.suffix == ".json":
        kinds |= {"no JSON object|index of weight files": rng.choice([b"[]", b"7", b'"text"', b"null"])}
    if path.name.endswith("index.json"):
        maps = [{}, {"weight_map": {}}, {"weight_map": {"a": 7}}, {"weight_map": SHARDS}, {"weight_map": {"a": None}}]
        kinds |= {"index of weight files": json.dumps(rng.choice(maps)).encode()}
    kind = rng.choice([*kinds, "directory", "link to a file that is not there"])
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind not in kinds:
        path.symlink_to("../../blobs/0123")
    else:
        path.write_bytes(kinds[kind])
    return kind


@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=examples(400), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whichever_file_is_damaged_is_named_with_what_it_is(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    name = rng.choice(write_whole(tmp_path, rng))
    find_model(str(tmp_path), {}, needs_weights=True)
    kind = damage(tmp_path / name, rng)
    message = rf"{re.escape(name)} is .*({kind})"
    with pytest.raises(ConfigError, match=message):
        find_model(str(tmp_path), {}, needs_weights=True)
    if (tmp_path / "config.json").is_file():  # else the configuration refuses it
        with pytest.raises(ValueError, match=message):
            load_runner(WorkerConfig(model=str(tmp_path), worker_id="w", role="decode"))
    if name in TOKENIZER_FILES:
        with pytest.raises(TokenizerNotFound, match=message):
            load_source(str(tmp_path))


def test_a_worker_looks_at_the_cached_files_of_a_name_too(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Path(find_model("org/there", {**hub.environ, "HF_HOME": str(tmp_path)}, needs_weights=True))
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.json").write_bytes(POINTER)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ValueError, match=r"tokenizer\.json is a pointer of Git LFS"):
        load_runner(WorkerConfig(model="org/there", worker_id="w", role="decode"))


def test_the_demo_model_is_what_it_says() -> None:
    assert wrong_file(DEMO_MODEL, needs_weights=True) is None


class Hub(ThreadingHTTPServer):
    """A hub with one repository, `org/there`, whose files are `files`. `asked`: the paths of all requests."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.asked: list[str] = []

    @property
    def environ(self) -> dict[str, str]:
        return {"HF_ENDPOINT": f"http://127.0.0.1:{self.server_port}"}


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.path.startswith("/api/models/org/there/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in self.server.files.items()
            ]
            self._answer(json.dumps(tree).encode(), "application/json")
            return
        if self.path.startswith("/api/models/org/there"):
            siblings = [{"rfilename": name} for name in self.server.files]
            content = json.dumps({"id": "org/there", "sha": COMMIT, "siblings": siblings}).encode()
            self._answer(content, "application/json")
            return
        name = self.path.partition("/resolve/")[2].partition("/")[2]
        if self.path.startswith("/org/there/") and name in self.server.files:
            self._answer(self.server.files[name], "application/octet-stream")
        else:
            self.send_response(404)
            self.send_header("content-length", "0")
            self.end_headers()

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.send_header("etag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("x-repo-commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": WEIGHTS, "model.gguf": b"other"}
    server = Hub({**files, "onnx/model.safetensors": b"other"})
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_model_of_the_hub_is_downloaded_once_and_then_found_without_network(hub: Hub, tmp_path: Path) -> None:
    environ = {**hub.environ, "HF_HOME": str(tmp_path)}
    directory = Path(find_model("org/there", environ, needs_weights=True))
    assert directory.is_relative_to(tmp_path)
    assert {path.name for path in directory.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.asked[0] == "/org/there/resolve/main/config.json"
    num_asked = len(hub.asked)
    assert find_model("org/there", environ, needs_weights=True) == str(directory)
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
    assert find_model("org/there", offline, needs_weights=True) == str(directory)
    assert len(hub.asked) == num_asked


def test_an_incomplete_snapshot_is_completed(hub: Hub, tmp_path: Path) -> None:
    environ = {**hub.environ, "HF_HOME": str(tmp_path)}
    directory = Path(find_model("org/there", environ, needs_weights=False))
    assert not (directory / "model.safetensors").exists()
    num_asked = len(hub.asked)
    assert find_model("org/there", environ, needs_weights=False) == str(directory)
    assert len(hub.asked) == num_asked
    assert find_model("org/there", environ, needs_weights=True) == str(directory)
    assert (directory / "model.safetensors").exists()


def test_a_repository_without_weights_that_are_read_is_refused(hub: Hub, tmp_path: Path) -> None:
    del hub.files["model.safetensors"]
    with pytest.raises(ConfigError, match=r"--model org/there .* no model\.safetensors"):
        find_model("org/there", {**hub.environ, "HF_HOME": str(tmp_path)}, needs_weights=True)


def test_all_services_get_the_directory_and_clients_the_name(hub: Hub, tmp_path: Path) -> None:
    environ = {**hub.environ, "HF_HOME": str(tmp_path), "KVRELAY_MODEL": "org/there"}
    plan = make_plan({}, environ)
    local = find_models(plan, environ)
    assert local == {"model": find_model("org/there", environ, needs_weights=True), "served_model_name": "org/there"}
    found = make_plan(local, environ)
    assert {worker.model for worker in found.workers} == {found.router.model} == {local["model"]}
    assert found.router.model_names == ("org/there",)
    named = make_plan({"served_model_name": "a,b"}, environ)
    assert make_plan(find_models(named, environ), environ).router.model_names == ("a", "b")
    assert find_models(make_plan({}, {}), {}) == {}  # the demo model is a directory


def test_a_name_that_the_hub_does_not_have(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="answers 404: the name is wrong or the model needs a token"):
        find_model("org/gone", {**hub.environ, "HF_HOME": str(tmp_path)}, needs_weights=True)
    assert len(hub.asked) == 1


def test_an_unreachable_hub_is_named_with_what_to_do(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        environ = {"HF_ENDPOINT": f"http://127.0.0.1:{unused.getsockname()[1]}", "HF_HOME": str(tmp_path)}
        with pytest.raises(ConfigError, match=r"--model org/x: .*does not answer .*refused.*HF_ENDPOINT"):
            find_model("org/x", environ, needs_weights=True)
        with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids a download"):
            find_model("org/x", {**environ, "HF_HUB_OFFLINE": "1"}, needs_weights=True)
    with pytest.raises(ConfigError, match="no such directory, and a name on the Hugging Face hub is OWNER/NAME"):
        find_model("a/b/c", {}, needs_weights=True)


def test_a_failed_download_is_one_message(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_ask_hub", lambda model, environ: None)
    with pytest.raises(ConfigError, match=r"--model org/gone: the download failed \(.*404"):
        find_model("org/gone", {**hub.environ, "HF_HOME": str(tmp_path)}, needs_weights=True)


@pytest.mark.parametrize(
    ("environ", "directory"),
    [
        ({"HF_HUB_CACHE": "/a"}, "/a"),
        ({"HF_HOME": "/b"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({}, str(Path("~/.cache/huggingface/hub").expanduser())),
    ],
)
def test_the_cache_is_where_huggingface_hub_has_it(environ: dict[str, str], directory: str) -> None:
    assert str(cache_directory(environ)) == directory
