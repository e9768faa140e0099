"""Reads a model's tokenizer files, from a directory or the hub, without importing torch.

Texts are tokenized as by transformers. It writes the tokenizer if it builds the named class itself, or if there is no
`tokenizer.json` (`model_directory.build_tokenizer`).

The files of many models disagree about added tokens: a special token, or one that was added later, may be in one of
them only. `AddedTokens` follows transformers: if `tokenizer_config.json` has an `added_tokens_decoder`, it lists all
added tokens; otherwise `added_tokens.json` and `special_tokens_map.json` do. A token that only `tokenizer.json` names
keeps the flags it has there.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from kvrelay.model_directory import (
    build_tokenizer,
    identity_of,
    is_taken_from_file,
    object_in,
    token_text,
    wrong_file,
)

logger = logging.getLogger(__name__)
TOKENIZER_PATTERNS = [
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "config.json",
    "generation_config.json",
]
"""The files to download from the hub: everything that a tokenizer may need, without the weights."""
_RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-9, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-9, 10.0),
    "min_new_tokens": (0, 2**31 - 1),
    "max_new_tokens": (1, 2**31 - 1),
}
_WHOLE = {"top_k": "top_k", "min_new_tokens": "min_tokens", "max_new_tokens": "max_tokens"}
"""Fields whose values are whole numbers, and their names here."""
_NOT_HONOURED: dict[str, tuple[object, ...]] = {
    "begin_suppress_tokens": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "exponential_decay_length_penalty": (),
    "bad_words_ids": (),
    "sequence_bias": (),
    "min_length": (0,),
    "max_length": (20,),  # the default of transformers, which older files state
    "max_time": (),
    "num_beams": (1,),
    "typical_p": (1,),
    "top_h": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
    "watermarking_config": (),
    "num_return_sequences": (1,),
    "constraints": (),
    "force_words_ids": (),
    "dola_layers": (),
    "token_healing": (False,),
}
"""Fields of `generation_config.json` that change what transformers generates and nothing here, with the values that
have no effect beside null and an empty list."""

_PARTS = ("normalizer", "pre_tokenizer")
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MORE_TOKENS = ("extra_special_tokens", "additional_special_tokens")
"""Fields with further special tokens: a list of them, or an object with their names. The first non-empty one counts."""


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """The contents of the files beside `tokenizer.json`. Methods raise ValueError if a file describes no tokens."""

    config: Mapping[str, Any]
    special_tokens_map: Mapping[str, Any] = field(default_factory=dict)
    legacy: Mapping[str, Any] = field(default_factory=dict)
    """The content of `added_tokens.json`: ids by text."""

    @property
    def _is_legacy(self) -> bool:
        return "added_tokens_decoder" not in self.config

    @property
    def _fields(self) -> Mapping[str, Any]:
        return {**self.config, **self.special_tokens_map} if self._is_legacy else self.config

    def texts(self) -> dict[str, str]:
        """The texts of the named special tokens, by the names that chat templates use, such as `eos_token`."""
        more = self._more()
        named = {**self._fields, **(more if isinstance(more, dict) else {})}
        tokens = {name: token_text(value) for name, value in named.items() if name.endswith("_token")}
        return {name: text for name, text in tokens.items() if text}

    def add_to(self, backend: tokenizers.Tokenizer) -> None:
        """Adds the tokens that the backend lacks, in the order of ids, and gives the others the files' flags."""
        present = backend.get_added_tokens_decoder()
        same = {_described(token) for token in present.values()}
        listed = self._of_legacy(present) if self._is_legacy else self._of_decoder()
        named = frozenset(self.texts().values())
        for token in listed:
            token.special = token.special or token.content in named
        known = {token.content for token in (*present.values(), *listed)}
        more = {token.content: token for token in self._special() if token.content not in known}
        backend.add_tokens([token for token in listed if _described(token) not in same] + list(more.values()))

    def _of_decoder(self) -> list[AddedToken]:
        decoder = self.config["added_tokens_decoder"]
        if not isinstance(decoder, dict):
            raise ValueError("added_tokens_decoder holds no object")
        return [_token(entry) for _, entry in sorted(decoder.items(), key=lambda item: _id(item[0]))]

    def _of_legacy(self, present: Mapping[int, AddedToken]) -> list[AddedToken]:
        special = {token.content for token in self._special()}
        beside = {
            _id(token_id): AddedToken(text, normalized=text not in special, special=text in special)
            for text, token_id in self.legacy.items()
        }
        tokens = {**beside, **present}
        return [tokens[token_id] for token_id in sorted(tokens)]

    def _special(self) -> list[AddedToken]:
        """Special tokens: first the names that most models have, then other names, then the unnamed ones."""
        names = [name for name in self._fields if name.endswith("_token") and name not in NAMED_TOKENS]
        values = [self._fields.get(name) for name in (*NAMED_TOKENS, *names)]
        more = self._more()
        values += more.values() if isinstance(more, dict) else more if isinstance(more, list) else []
        return [_token(value, special=True) for value in values if token_text(value)]

    def _more(self) -> Any:
        return next((self._fields[name] for name in MORE_TOKENS if self._fields.get(name)), None)


def _token(value: Any, *, special: bool | None = None) -> AddedToken:
    content = token_text(value)
    if not content:
        raise ValueError(f"{value!r} describes no token")
    flags = {name: bool(value[name]) for name in FLAGS if name in value} if isinstance(value, dict) else {}
    if special is not None:
        flags["special"] = special
    return AddedToken(content, **flags)


def _described(token: AddedToken) -> tuple[Any, ...]:
    return token.content, *(getattr(token, name) for name in FLAGS)


def _id(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is no id of an added token") from None


class TokenizerNotFound(Exception):
    """The model's directory has no usable tokenizer."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The values for parameters that a request leaves out: those of the model, else OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    max_tokens: int | None = None
    """None: the endpoint's own."""
    suppressed_ids: tuple[int, ...] = ()
    """Tokens that no output has unless its request biases them."""
    stop: tuple[str, ...] = ()
    """Stop strings of requests that have none."""


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """The contents of a model's files for tokenizer, template and sampling."""

    tokenizer_json: str
    chat_template: str | None
    added_tokens: AddedTokens
    sampling_defaults: SamplingDefaults
    identity: str = ""
    """See `kvrelay.model_directory`; empty without a `tokenizer.json`."""
    response_template: Any = None
    """How the model's outputs are read, as transformers describes it; unchecked."""


def load_source(model: str) -> TokenizerSource:
    """Reads the tokenizer of a directory or a hub name. Blocks; may download. Raises TokenizerNotFound."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        folder = _download(model)
    if fault := wrong_file(folder, needs_weights=False):
        raise TokenizerNotFound(fault)
    has_file = (folder / "tokenizer.json").is_file()
    if has_file and is_taken_from_file(folder):
        return _read(folder)
    with tempfile.TemporaryDirectory(prefix="kvrelay-tokenizer-") as built:
        try:
            build_tokenizer(folder, Path(built))
        except ValueError as error:
            if not has_file:
                raise TokenizerNotFound(
                    f"no tokenizer.json in {folder}, and converting its tokenizer failed: {error}"
                ) from None
            logger.warning("transformers makes no tokenizer of %s, so its tokenizer.json is used: %s", folder, error)
            return _read(folder)
        return _read(folder, Path(built))


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=TOKENIZER_PATTERNS))
    except Exception as error:
        raise TokenizerNotFound(f"{model!r} is no directory, and the hub did not give it: {error}") from error


def _read(folder: Path, built: Path | None = None) -> TokenizerSource:
    """`built`: holds the tokenizer that transformers makes of the files in `folder`, which has all added tokens."""
    config, own = _read_json(folder / "tokenizer_config.json"), folder / "tokenizer.json"
    own_json = _read_text(own) if own.is_file() else ""
    if built is None:
        others = (_read_json(folder / name) for name in ("special_tokens_map.json", "added_tokens.json"))
        tokenizer_json, added_tokens = own_json, AddedTokens(config, *others)
    else:
        tokenizer_json = _read_text(built / "tokenizer.json")
        added_tokens = AddedTokens(_read_json(built / "tokenizer_config.json") | {"added_tokens_decoder": {}})
        if own_json and (parts := _differing_parts(own_json, tokenizer_json)):
            logger.warning(
                "%s: transformers has another %s for its tokenizer_class than tokenizer.json, and texts are tokenized "
                "as there",
                folder,
                " and ".join(parts),
            )
    return TokenizerSource(
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(folder, config),
        added_tokens=added_tokens,
        sampling_defaults=sampling_defaults(_read_json(folder / "generation_config.json")),
        identity=identity_of(own_json),
        response_template=config.get("response_template"),
    )


def _differing_parts(first: str, second: str) -> list[str]:
    """The parts of two files of a tokenizer that tokenize differently."""
    one, other = _parts(first), _parts(second)
    return [name for name in _PARTS if one[name] != other[name]]


def _parts(tokenizer_json: str) -> dict[str, Any]:
    """Without a vocabulary, the library reads and writes in no time what versions of it have written differently."""
    content = json.loads(tokenizer_json)
    small = {"model": {"type": "BPE", "vocab": {}, "merges": []}, **{name: content.get(name) for name in _PARTS}}
    parts: dict[str, Any] = json.loads(
        tokenizers.Tokenizer.from_str(json.dumps(small)).to_str(), object_hook=_without_offsets
    )
    return parts


def _without_offsets(part: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name != "trim_offsets"}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return object_in(path, _read_text(path))
    except ValueError as error:
        raise TokenizerNotFound(str(error)) from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerNotFound(f"{path} is not valid UTF-8: {error}") from error


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The default template from, in this order: its own file, the processor's JSON file, the tokenizer's config."""
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        return _read_text(own_file)
    template = _read_json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):
        if not all(isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in template):
            raise TokenizerNotFound(f"the chat templates of {folder} are no objects with a name and a template")
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None


def sampling_defaults(generation_config: Mapping[str, Any]) -> SamplingDefaults:
    """Reads the content of `generation_config.json`; `do_sample: false` makes greedy decoding the default. A value that
    a request could not have is ignored, with a warning, and another warning names the fields that are not honoured."""
    values: dict[str, Any] = {}
    for name, (low, high) in _RANGES.items():
        value = generation_config.get(name)
        if value is None:
            continue
        is_usable = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        if not is_usable or (name in _WHOLE and value != int(value)):
            logger.warning("generation_config.json: %s = %r is not usable and left out", name, value)
        elif name in _WHOLE:
            values[_WHOLE[name]] = int(value)
        else:
            values[name] = float(value)
    if generation_config.get("do_sample") is False:
        values["temperature"] = 0.0
    suppressed = generation_config.get("suppress_tokens") or []
    if isinstance(suppressed, list) and all(type(each) is int for each in suppressed):
        values["suppressed_ids"] = tuple(dict.fromkeys(suppressed))
    else:
        logger.warning("generation_config.json: suppress_tokens is not a list of token ids and left out")
    stop = generation_config.get("stop_strings") or []
    stop = [stop] if isinstance(stop, str) else stop
    if isinstance(stop, list) and all(isinstance(each, str) and each for each in stop):
        values["stop"] = tuple(stop)
    else:
        logger.warning("generation_config.json: stop_strings is not a list of texts and left out")
    ignored = [
        name for name, harmless in _NOT_HONOURED.items() if not _is_harmless(generation_config.get(name), harmless)
    ]
    if ignored:
        logger.warning(
            "generation_config.json: %s have no effect: outputs may differ from those of transformers",
            ", ".join(ignored),
        )
    return SamplingDefaults(**values)


def _is_harmless(value: Any, harmless: tuple[object, ...]) -> bool:
    return value is None or value in ([], {}) or value in harmless
