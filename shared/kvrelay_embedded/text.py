"""Prompts to token ids, and checks that need the tokenizer, from any thread and also under a running event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kvrelay.grammar.grammar_compiler import GrammarError
from kvrelay.text.chat_template import ChatTemplateError
from kvrelay.text.service import ChatOptions, TextService

T = TypeVar("T")


class EmbeddedText:
    """The router's text service, for callers that do not await."""

    def __init__(self, model: str) -> None:
        self.service = TextService.load(model, num_threads=1)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="text")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self.service.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any]) -> list[int]:
        """Raises ValueError if the template refuses the messages."""
        options = ChatOptions(template_kwargs=template_kwargs)
        try:
            return self._wait(self.service.encode_chat([dict(message) for message in messages], options))
        except ChatTemplateError as error:
            raise ValueError(f"The messages cannot be rendered: {error}") from None

    def encode_bad_words(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        return self._wait(self.service.encode_bad_words(words)) if words else ()

    def check_grammar(self, grammar: Any) -> None:
        """Raises ValueError for a grammar that cannot be followed."""
        if grammar is None:
            return
        try:
            self._wait(self.service.grammars.check(grammar))
        except GrammarError as error:
            raise ValueError(f"The output cannot be constrained: {error}") from None

    def close(self) -> None:
        self.service.close()
        self._thread.shutdown(wait=True)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """A thread of its own, because a notebook's thread has an event loop that runs."""
        return self._thread.submit(asyncio.run, work).result()
