"""Tokenizers are the same if their token ids mean the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvrelay.text.service import TextService
from kvrelay.tokenizer_identity import identity_of, identity_of_file
from tests.e2e.conftest import DEMO_MODEL

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
