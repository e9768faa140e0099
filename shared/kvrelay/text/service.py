"""Tokenizes texts and renders chats without blocking the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import tokenizers

from kvrelay.protocol.sampling import ReasoningChannels, ReasoningSpan
from kvrelay.text.chat_template import ChatTemplate, ChatTemplateError, Message
from kvrelay.text.content_tokens import ContentTokens
from kvrelay.text.fill_in_middle import FillInMiddle, find_fill_in_middle
from kvrelay.text.grammar_check import MAX_CPU_S, GrammarCheck
from kvrelay.text.output_parsing.dialect import AUTO, Dialect, MarkedDialect, find_dialect
from kvrelay.text.output_parsing.reasoning import TokenCounter
from kvrelay.text.tokenizer import Detokenizer, Tokenizer, make_detokenizer
from kvrelay.text.tokenizer_files import SamplingDefaults, TokenizerNotFound, load_source

T = TypeVar("T")

OPENAI_DEFAULTS = SamplingDefaults()

SHORT_TEXT_CHARS = 2048
"""Shorter texts are processed on the event loop: they take at most 0.5 ms, about as long as a switch to a thread."""

SHORT_CHAT_MESSAGES = 8

NO_DIALECT = MarkedDialect()

TAIL_TOKENS = 16
"""The end of a prompt that may open the reasoning: a marker and whitespace."""
MESSAGE_TOKENS = 64
"""The end of a prompt with what the chat template writes of an answer."""

_UNITS_PER_WORD = 64  # encoding a bad word twice costs about as much as so many characters

THREADS = 2
"""Number of threads for short texts, and as many more for long ones."""
LONG_TEXT_CHARS = 16_384
"""Longer texts have their own threads, so that shorter ones never wait behind them."""

MAX_CHARS_PER_TOKEN = 16
MAX_TEXT_CHARS = 1 << 22
"""Texts with more characters, or more for each token that they may have, are refused before they are tokenized: a
mebi-character takes 1 to 2 s of a core and 170 MB. Texts of any language have 2 to 5 characters per token."""


class TextTooLong(ValueError):
    """The text is too long to be tokenized. The message is for the client."""


class ChatOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of rendering messages to a prompt."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    template_kwargs: Mapping[str, Any] = {}
    tools: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class DecodedPrompt:
    """A prompt's text, with the offset in characters at which each token starts."""

    text: str
    offsets: list[int]


class TextService:
    """Tokenizer, template and defaults of one model. The async methods never block the event loop; others are cheap."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        defaults: SamplingDefaults = OPENAI_DEFAULTS,
        tokenizer_identity: str = "",
        max_grammar_cpu_s: float = MAX_CPU_S,
        dialect: Dialect = NO_DIALECT,
    ) -> None:
        """`max_grammar_cpu_s`: to compile a grammar."""
        self.dialect = dialect
        self._markers = tokenizer.special_ids_of(dialect.markers)
        self.tokenizer = tokenizer
        self.fill_in_middle = find_fill_in_middle(tokenizer)
        self.tokenizer_identity = tokenizer_identity
        self.template = template
        self.sampling_defaults = defaults
        self.grammars = GrammarCheck(tokenizer, max_grammar_cpu_s)
        self._contents = _content_tokens(tokenizer, template) if template is not None else None
        self._short = ThreadPoolExecutor(THREADS, "text-short")
        self._long = ThreadPoolExecutor(THREADS, "text-long")

    @classmethod
    def load(
        cls,
        model: str,
        *,
        max_grammar_cpu_s: float = MAX_CPU_S,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
    ) -> TextService:
        """Reads a model directory or hub name. Blocks. Raises TokenizerNotFound, ChatTemplateError, UnknownParser."""
        source = load_source(model)
        try:
            backend = tokenizers.Tokenizer.from_str(source.tokenizer_json)
        except Exception as error:  # the library raises plain exceptions
            raise TokenizerNotFound(f"the tokenizer.json of {model} cannot be read: {error}") from error
        try:
            source.added_tokens.add_to(backend)
        except ValueError as error:
            raise TokenizerNotFound(f"the added tokens of {model} cannot be read: {error}") from error
        tokenizer = Tokenizer(backend)
        if not tokenizer.encode("a", add_special_tokens=False):
            raise TokenizerNotFound(f"the tokenizer of {model} knows no text: its files are missing or empty")
        template = None
        if source.chat_template is not None:
            template = ChatTemplate(source.chat_template, source.added_tokens.texts())
        return cls(
            tokenizer,
            template,
            defaults=source.sampling_defaults,
            tokenizer_identity=source.identity,
            max_grammar_cpu_s=max_grammar_cpu_s,
            dialect=find_dialect(
                tool_parser,
                reasoning_parser,
                source.chat_template,
                source.response_template,
                [tokenizer.token_string(token_id) for token_id in sorted(tokenizer.special_ids)],
            ),
        )

    def close(self) -> None:
        """Stops the threads and drops their work."""
        self.grammars.close()
        for threads in (self._short, self._long):
            threads.shutdown(wait=False, cancel_futures=True)

    async def encode(self, text: str, *, add_special_tokens: bool, max_tokens: int | None = None) -> list[int]:
        """Raises TextTooLong for a text whose length shows that it has more than `max_tokens`. Others may have more
        too."""
        check_length(len(text), max_tokens)
        return await self._run(len(text), lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def encode_around(
        self, model: FillInMiddle, prefix: str, suffix: str, *, add_special_tokens: bool, max_tokens: int
    ) -> list[int]:
        """The prompt for a text between prefix and suffix. Raises TextTooLong as `encode`."""
        num_chars = len(prefix) + len(suffix)
        check_length(num_chars, max_tokens)
        return await self._run(num_chars, lambda: model.encode(prefix, suffix, add_special_tokens=add_special_tokens))

    async def encode_chat(
        self, messages: list[Message], options: ChatOptions, max_tokens: int | None = None
    ) -> list[int]:
        """The token ids of a conversation, with the template's special tokens. Those that a content spells out are
        text. Raises ChatTemplateError, and TextTooLong as `encode`."""
        template, spelled = self.template, self._contents
        if template is None or spelled is None:
            raise ChatTemplateError("this model has no chat template; use /v1/completions")

        def render(contents: tuple[list[Message], Mapping[str, Any], list[dict[str, Any]]]) -> str:
            text = template.render(
                contents[0],
                tools=contents[2],
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                template_kwargs=contents[1],
            )
            check_length(len(text), max_tokens)
            return text

        def encode(text: str) -> list[int]:
            return self.tokenizer.encode(text, add_special_tokens=options.add_special_tokens)

        def render_and_encode() -> list[int]:
            contents = messages, options.template_kwargs, list(options.tools)
            return spelled.encode(render, contents, encode, add_special_tokens=options.add_special_tokens)

        num_chars = count_chars([*messages, *options.tools], LONG_TEXT_CHARS + 1)
        if (
            len(messages) > SHORT_CHAT_MESSAGES
            or options.template_kwargs
            or (num_chars <= SHORT_TEXT_CHARS and spelled.are_spelled([*messages, *options.tools]))
        ):
            num_chars = max(num_chars, SHORT_TEXT_CHARS + 1)  # it takes longer than its length shows
        return await self._run(num_chars, render_and_encode)

    async def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word, at the beginning of a text and behind a space, as in vLLM."""
        if not words:
            return ()
        num_units = sum(map(len, words)) + _UNITS_PER_WORD * len(words)
        return await self._run(num_units, lambda: _spellings(self.tokenizer, words))

    async def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return await self._run(
            len(token_ids), lambda: self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        )

    async def spell(self, token_ids: list[int]) -> list[str]:
        """Each token as its vocabulary spells it."""
        return await self._run(len(token_ids), lambda: [self.tokenizer.token_string(each) for each in token_ids])

    async def decode_prompt(self, token_ids: list[int], *, skip_special_tokens: bool) -> DecodedPrompt:
        return await self._run(len(token_ids), lambda: self._decode_prompt(token_ids, [], skip_special_tokens))

    async def locate_tokens(self, text: str, *, add_special_tokens: bool) -> DecodedPrompt:
        """The text with the offsets of its tokens, including special tokens that the text spells out."""

        def locate() -> DecodedPrompt:
            token_ids, added = self.tokenizer.encode_marked(text, add_special_tokens=add_special_tokens)
            return DecodedPrompt(text, self._decode_prompt(token_ids, added, skip_special_tokens=False).offsets)

        return await self._run(len(text), locate)

    def _decode_prompt(self, token_ids: list[int], silent: list[bool], skip_special_tokens: bool) -> DecodedPrompt:
        """`silent` marks tokens without text; it is empty if there are none."""
        detokenizer = make_detokenizer(self.tokenizer, [], skip_special_tokens=skip_special_tokens)
        pieces: list[str] = []
        offsets: list[int] = []
        num_chars = 0
        for index, token_id in enumerate(token_ids):
            offsets.append(num_chars)
            if not (silent and silent[index]):
                pieces.append(detokenizer.feed([token_id]))
                num_chars += len(pieces[-1])
        pieces.append(detokenizer.flush())
        return DecodedPrompt("".join(pieces), offsets)

    def detokenizer(
        self, prompt_ids: list[int], *, skip_special_tokens: bool, shows_markers: bool = False
    ) -> Detokenizer:
        """Returns the incremental detokenizer for a sequence that follows this prompt. `shows_markers`: the special
        tokens that an output parser reads have text."""
        return make_detokenizer(
            self.tokenizer,
            prompt_ids,
            skip_special_tokens=skip_special_tokens,
            shown=self._markers if shows_markers else frozenset(),
        )

    def reasoning_counter(self, *, begins_inside: bool) -> TokenCounter | None:
        """None if the model has no reasoning between single tokens."""
        return self.dialect.new_counter(self.tokenizer.backend.token_to_id, begins_inside=begins_inside)

    @property
    def can_limit_reasoning(self) -> bool:
        """Whether the model's reasoning is between single tokens, so that a budget can end it."""
        return self.reasoning_before(begins_inside=False, token_budget=0) is not None

    def reasoning_before(
        self, *, begins_inside: bool, token_budget: int | None
    ) -> ReasoningSpan | ReasoningChannels | None:
        """See `Dialect.reasoning_before`."""
        return self.dialect.reasoning_before(
            self.tokenizer.backend.token_to_id,
            lambda text: self.tokenizer.encode(text, add_special_tokens=False),
            begins_inside=begins_inside,
            token_budget=token_budget,
        )

    def begins_inside_reasoning(self, prompt_ids: list[int]) -> bool:
        """Returns whether the prompt ends with the beginning of reasoning."""
        return not self.dialect.is_plain and self.dialect.is_opened_by(self._tail(prompt_ids))

    def has_ended_reasoning(self, prompt_ids: list[int]) -> bool:
        """Returns whether the prompt ends with the end of reasoning."""
        return not self.dialect.is_plain and self.dialect.is_closed_by(self._tail(prompt_ids))

    def prompt_end(self, prompt_ids: list[int]) -> str:
        """Returns the end of the prompt if parsers must see it, else ""."""
        return self._tail(prompt_ids, MESSAGE_TOKENS) if self.dialect.reads_prompt else ""

    def _tail(self, prompt_ids: list[int], num_tokens: int = TAIL_TOKENS) -> str:
        return self.tokenizer.decode(prompt_ids[-num_tokens:], skip_special_tokens=False)

    async def _run(self, num_units: int, work: Callable[[], T]) -> T:
        """Runs `work` here or in a thread, depending on `num_units`, its input in characters or tokens."""
        if num_units <= SHORT_TEXT_CHARS:
            return _contained(work)
        threads = self._long if num_units > LONG_TEXT_CHARS else self._short
        return await asyncio.get_running_loop().run_in_executor(threads, _contained, work)


def check_length(num_chars: int, max_tokens: int | None) -> None:
    """Raises TextTooLong for a text that is too long to be tokenized, with `max_tokens` at most if there is a limit."""
    limit = MAX_TEXT_CHARS
    if max_tokens is not None:
        limit = min(limit, max(LONG_TEXT_CHARS, MAX_CHARS_PER_TOKEN * max_tokens))
    if num_chars > limit:
        context = "" if max_tokens is None else f" to a context of {max_tokens} tokens"
        raise TextTooLong(f"a text of {num_chars} characters is too long{context}: at most {limit} are tokenized")


def _contained(work: Callable[[], T]) -> T:
    """Runs `work`, and turns a panic of the tokenizer's library into RuntimeError.

    The library panics on some texts with unusual added tokens, and its PanicException is no `Exception`. Only this
    request must fail.
    """
    try:
        return work()
    except BaseException as error:
        if type(error).__module__ == "pyo3_runtime":
            raise RuntimeError(f"the tokenizer failed: {error}") from error
        raise


def _spellings(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare, spaced = (tuple(tokenizer.encode(start + word.lstrip(), add_special_tokens=False)) for start in ("", " "))
        found[bare] = None
        # A space that is a token of its own leaves the tokens of the word, which are forbidden already.
        if len(spaced) == len(bare) and spaced[:1] != bare[:1]:  # some tokenizers drop invisible characters
            found[spaced] = None
    return tuple(word for word in found if word)


def _content_tokens(tokenizer: Tokenizer, template: ChatTemplate) -> ContentTokens:
    between = template.between_turns()
    added = tokenizer.backend.get_added_tokens_decoder().values()
    return ContentTokens(tokenizer, {token.content for token in added if token.content in between}, template.source)


def count_chars(value: Any, enough: int) -> int:
    """Counts the characters of all texts in messages, because templates also render tool calls and reasoning. A number,
    list or object counts as one character. Stops at `enough` or a little above."""
    num_chars, values = 0, [value]
    while values and num_chars < enough:
        each = values.pop()
        if isinstance(each, str):
            num_chars += len(each)
        else:
            num_chars += 1
            if isinstance(each, dict):
                num_chars += sum(map(len, each))
                values += each.values()
            elif isinstance(each, list):
                values += each
    return num_chars
