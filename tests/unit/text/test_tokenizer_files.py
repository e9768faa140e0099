"""A model directory's tokenizer files: read without torch, with the added tokens that transformers knows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from kvrelay.model_directory import end_token_ids, identity_of, identity_of_file
from kvrelay.text.service import TextService
from kvrelay.text.tokenizer_files import TokenizerNotFound, load_source
from tests.e2e.conftest import DEMO_MODEL
from tests.fakes.text_model import CHATML, write_text_model
from tests.thoroughness import examples


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
    stated = {"tokenizer_class": "TokenizersBackend", "chat_template": entry}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(stated))
    assert load_source(str(tmp_path)).chat_template == "{{ old }}"


@pytest.mark.parametrize("entry", [["{{ old }}"], [{"template": "{{ old }}"}], [{"name": "default"}]])
def test_templates_without_names_are_refused(tmp_path: Path, entry: object) -> None:
    write_text_model(tmp_path, template=None)
    stated = {"tokenizer_class": "TokenizersBackend", "chat_template": entry}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(stated))
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


# -- tokens that stand beside `tokenizer.json` are those that transformers knows, too --------------------------------


TOKENS = ["<s>", "</s>", "<tool>", "<|im_end|>", "<x>"]
TEXTS = ["otter", "<s>an <tool> otter <|im_end|></s>", " <x> <x>y <tool>", "<|im_end|> <s> "]
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
NAMES = ["bos_token", "eos_token", "pad_token", "unk_token", "image_token"]


def entry(content: str, flags: list[bool]) -> dict[str, Any]:
    return {"content": content, **dict(zip(FLAGS, flags, strict=True))}


FLAG_LISTS = st.lists(st.booleans(), min_size=len(FLAGS), max_size=len(FLAGS))
NAMED = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(TOKENS), max_size=3)
LISTED = st.dictionaries(st.sampled_from(TOKENS), FLAG_LISTS, max_size=4)
MORE = st.one_of(
    st.none(),
    st.lists(st.sampled_from(TOKENS), unique=True, min_size=1, max_size=2).map(
        lambda tokens: {"additional_special_tokens": tokens}
    ),
    st.sampled_from(TOKENS).map(lambda token: {"extra_special_tokens": {"video_token": token}}),
)


def write(folder: Path, present: dict[str, list[bool]], files: dict[str, Any]) -> None:
    """A tokenizer of bytes with these added tokens, and other files beside it."""
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(**entry(content, flags)) for content, flags in present.items()])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for name in ("tokenizer_config", "special_tokens_map", "added_tokens"):
        path = folder / f"{name}.json"
        path.unlink(missing_ok=True)
        if files.get(name) is not None:
            path.write_text(json.dumps(files[name]))


def assert_as_transformers(folder: Path) -> None:
    ours, theirs = TextService.load(str(folder)), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.tokenizer.encode(text, add_special_tokens=False) == ids
        shown = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.tokenizer.decode(ids, skip_special_tokens=True) == shown
    assert load_source(str(folder)).added_tokens.texts() == theirs.special_tokens_map


@given(present=LISTED, named=NAMED, listed=st.none() | LISTED, more=MORE, names_in_map=st.booleans())
@settings(deadline=None, max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_they_are_those_of_transformers(
    present: dict[str, list[bool]],
    named: dict[str, str],
    listed: dict[str, list[bool]] | None,
    more: dict[str, Any] | None,
    names_in_map: bool,
    tmp_path: Path,
) -> None:
    """`listed`: in an `added_tokens_decoder`, with ids that go on where those of the tokenizer end."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **(more or {})}
    if listed is not None:
        ids = {content: 256 + index for index, content in enumerate([*present, *(listed.keys() - present.keys())])}
        decoder = {str(ids[content]): entry(content, flags) for content, flags in listed.items()}
        config["added_tokens_decoder"] = decoder
    files = {"tokenizer_config": config, "special_tokens_map": named if names_in_map else None}
    if not names_in_map:
        config.update(named)
    write(tmp_path / "model", present, files)
    assert_as_transformers(tmp_path / "model")


@pytest.mark.parametrize("special", [None, "<tool>"])
def test_a_list_of_texts_and_ids_is_read_where_there_is_no_other(special: str | None, tmp_path: Path) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": [special] if special else []}
    added = {"<x>": 258, "<tool>": 257, "<s>": 256}
    present = {"<s>": [False, False, False, False, True]}
    write(tmp_path / "model", present, {"tokenizer_config": config, "added_tokens": added})
    assert_as_transformers(tmp_path / "model")
    tokenizer = TextService.load(str(tmp_path / "model")).tokenizer
    assert tokenizer.encode("<x><tool>", add_special_tokens=False) == [258, 257]


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"added_tokens_decoder": []}},
        {"tokenizer_config": {"added_tokens_decoder": {"7": "<x>", "x": {"content": "<tool>"}}}},
        {"tokenizer_config": {"added_tokens_decoder": {"7": {"special": True}}}},
        {"tokenizer_config": {}, "added_tokens": {"<x>": None}},
    ],
)
def test_what_describes_no_token_is_refused(files: dict[str, Any], tmp_path: Path) -> None:
    stated = {"tokenizer_class": "PreTrainedTokenizerFast", **files["tokenizer_config"]}
    write(tmp_path / "model", {}, files | {"tokenizer_config": stated})
    with pytest.raises(TokenizerNotFound, match="added tokens"):
        TextService.load(str(tmp_path / "model"))


# -- the tokens that end an output ------------------------------------------------------------------------------------


@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_end_tokens_are_those_of_both_configs_and_the_tokenizer(tmp_path: Path, data: st.DataObject) -> None:
    """transformers reads each of the three; vLLM and SGLang end at all of them."""
    for path in tmp_path.iterdir():
        path.unlink()
    write_text_model(tmp_path)
    ids = st.none() | st.integers(0, 9) | st.lists(st.integers(0, 9), min_size=1, max_size=3)
    own, generation = data.draw(ids), data.draw(ids)
    config = {"model_type": "llama", "eos_token_id": own, "bos_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = _listed(AutoConfig.from_pretrained(tmp_path).eos_token_id)
    if data.draw(st.booleans()):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
        expected |= _listed(GenerationConfig.from_pretrained(tmp_path).eos_token_id)
    token = data.draw(st.sampled_from([None, "<|im_end|>", "<|endoftext|>", "a", "<|absent|>"]))
    form = data.draw(st.sampled_from([token, token and {"__type": "AddedToken", "content": token, "special": True}]))
    stated: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if data.draw(st.booleans()):
        (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": form}))
    else:
        stated["eos_token"] = form
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(stated))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    if token != "<|absent|>":  # which transformers appends to the vocabulary
        expected |= _listed(tokenizer.eos_token_id)
    found = end_token_ids(tmp_path)
    assert set(found) == expected and len(found) == len(expected)


def _listed(ids: int | list[int] | None) -> set[int]:
    return set() if ids is None else set(ids) if isinstance(ids, list) else {ids}


@pytest.mark.parametrize("vocabulary", [{"a": 0, "</s>": 1}, [["a", 0.0], ["</s>", -1.0]]])
def test_the_end_token_may_be_an_ordinary_one(vocabulary: object, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert end_token_ids(tmp_path) == (1,)
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": [4, true, 5]}}')
    assert end_token_ids(tmp_path) == (4, 5, 1)


def test_tokens_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [7]}')
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        end_token_ids(tmp_path)


# -- tokenizers are the same if their token ids mean the same --------------------------------------------------------


BPE = {
    "truncation": None,
    "added_tokens": [{"id": 3, "content": "<s>", "special": True}],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
}


def changed(**model: object) -> str:
    return identity_of(json.dumps(BPE | {"model": BPE["model"] | model}))  # type: ignore[operator]


def test_what_depends_on_the_version_that_wrote_it_does_not_count() -> None:
    same = {**BPE, "truncation": {"max_length": 5}, "added_tokens": [{"id": 3, "content": "<s>", "special": False}]}
    assert identity_of(json.dumps(BPE)) == identity_of(json.dumps(same, indent=2)) == changed(merges=[["a", "b"]])
    assert len(identity_of(json.dumps(BPE))) == 16


@pytest.mark.parametrize("model", [{"vocab": {"a": 1, "b": 0, "ab": 2}}, {"merges": ["b a"]}])
def test_other_ids_and_merges_do(model: dict[str, object]) -> None:
    assert changed(**model) not in ("", identity_of(json.dumps(BPE)))
    assert identity_of(json.dumps(BPE | {"added_tokens": []})) not in ("", identity_of(json.dumps(BPE)))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}", '{"model": 3}', '{"model": {"vocab": {}, "merges": [3]}}'])
def test_what_is_no_tokenizer_is_unknown(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    assert identity_of_file(tmp_path / "tokenizer.json") == ""
    assert identity_of_file(tmp_path / "absent") == ""


def test_router_and_worker_find_the_same_identity() -> None:
    text = TextService.load(str(DEMO_MODEL))
    text.close()
    assert text.tokenizer_identity == identity_of_file(DEMO_MODEL / "tokenizer.json") != ""
