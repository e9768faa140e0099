"""A model directory's tokenizer files are read without torch, whatever form they come in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from kvrelay.text.service import TextService
from kvrelay.text.sources import TokenizerNotFound, load_source
from tests.fakes.text_model import CHATML, write_text_model


def test_reads_a_directory(tmp_path: Path) -> None:
    source = load_source(str(write_text_model(tmp_path)))
    assert source.chat_template == CHATML
    assert source.added_tokens.texts() == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


@pytest.mark.parametrize(
    "entry",
    [
        "{{ old }}",
        [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ old }}"}],
        {"tool_use": "no", "default": "{{ old }}"},
    ],
)
def test_takes_the_template_from_the_config(tmp_path: Path, entry: object) -> None:
    write_text_model(tmp_path, template=None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}))
    assert load_source(str(tmp_path)).chat_template == "{{ old }}"


@pytest.mark.parametrize("entry", [["{{ old }}"], [{"template": "{{ old }}"}], [{"name": "default"}]])
def test_templates_without_names_are_refused(tmp_path: Path, entry: object) -> None:
    write_text_model(tmp_path, template=None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}))
    with pytest.raises(TokenizerNotFound, match="a name and a template"):
        load_source(str(tmp_path))


def test_a_model_may_have_no_template(tmp_path: Path) -> None:
    assert load_source(str(write_text_model(tmp_path, template=None))).chat_template is None


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerNotFound, match=r"no tokenizer\.json"):
        load_source(str(tmp_path))


def test_a_tokenizer_that_knows_no_text_is_refused(tmp_path: Path) -> None:
    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerNotFound, match="knows no text"):
        TextService.load(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"7", b'{"eos_token": "\xff"}'])
@pytest.mark.parametrize(
    "name",
    [
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        "generation_config.json",
    ],
)
def test_a_file_that_is_no_json_object_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    write_text_model(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerNotFound, match=name.replace(".", r"\.")):
        TextService.load(str(tmp_path))


def test_a_tokenizer_of_vocabulary_and_merges_is_converted(tmp_path: Path) -> None:
    """GPT-2's files of old; transformers converts them in a process of its own."""
    whole, old = tmp_path / "whole", tmp_path / "old"
    whole.mkdir()
    old.mkdir()
    write_text_model(whole)
    model = json.loads((whole / "tokenizer.json").read_text())["model"]
    (old / "vocab.json").write_text(json.dumps(model["vocab"]))
    (old / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    (old / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (old / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (old / "chat_template.jinja").write_text("{{ t }}")
    converted, direct = TextService.load(str(old)), TextService.load(str(whole))
    assert converted.template is not None
    for text in ("The otter", "東京 🦦"):
        assert converted.tokenizer.encode(text, add_special_tokens=False) == direct.tokenizer.encode(
            text, add_special_tokens=False
        )


def test_the_router_imports_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from kvrelay_router.asgi.app import create_app\n"
        "from kvrelay_router.http.http_server import serve\n"
        "from kvrelay.text.service import TextService\n"
        "TextService.load(sys.argv[1])\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program, str(write_text_model(tmp_path))], check=True)
