"""Templates render as transformers renders them, refuse what they do not take, and run nothing dangerous."""

from __future__ import annotations

import pytest

from kvrelay.text.chat_template import ChatTemplate, ChatTemplateError, Message
from tests.fakes.text_model import CHATML, write_text_model

SYSTEM: Message = {"role": "system", "content": "Be brief. "}
USER: Message = {"role": "user", "content": "What is an otter?"}
ASSISTANT: Message = {"role": "assistant", "content": "An otter is "}


@pytest.fixture(scope="module")
def chatml() -> ChatTemplate:
    return ChatTemplate(CHATML, {})


@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER], [USER, ASSISTANT, USER]])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_as_transformers_does(
    messages: list[Message], add_generation_prompt: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from transformers import AutoTokenizer

    folder = write_text_model(tmp_path_factory.mktemp("model"))
    reference = AutoTokenizer.from_pretrained(folder)
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    template = ChatTemplate(CHATML, {})
    assert template.render(messages, add_generation_prompt=add_generation_prompt) == expected


def test_a_final_message_is_continued(chatml: ChatTemplate) -> None:
    text = chatml.render([USER, ASSISTANT], add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nAn otter is ")


def test_a_trimmed_final_message_is_continued_without_its_space() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}", {})
    assert template.render([ASSISTANT], continue_final_message=True) == "[An otter is"


def test_developer_is_system_where_the_template_does_not_know_it(chatml: ChatTemplate) -> None:
    assert "<|im_start|>system\n" in chatml.render([{"role": "developer", "content": "x"}, USER])
    knowing = ChatTemplate("{% if messages[0].role == 'developer' %}yes{% endif %}", {})
    assert knowing.render([{"role": "developer", "content": "x"}]) == "yes"


def test_a_raised_exception_is_the_error(chatml: ChatTemplate) -> None:
    with pytest.raises(ChatTemplateError, match="tools are not for this model"):
        chatml.render([USER, {"role": "tool", "content": "42"}])


def test_a_role_that_would_vanish_is_refused() -> None:
    template = ChatTemplate("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", {})
    assert template.render([USER]) == USER["content"]
    with pytest.raises(ChatTemplateError, match="no place for the role 'system'"):
        template.render([SYSTEM, USER])


def test_text_parts_are_joined_for_templates_that_take_strings(chatml: ChatTemplate) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "user\none\ntwo<|im_end|>" in chatml.render([{"role": "user", "content": parts}])


def test_text_parts_go_to_templates_that_take_them() -> None:
    source = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"
    )
    template = ChatTemplate(source, {})
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert template.render([{"role": "user", "content": parts}]) == "<one><two>"
    continued = template.render([{"role": "user", "content": parts}], continue_final_message=True)
    assert continued == "<one><two"


def test_special_tokens_and_kwargs_are_variables() -> None:
    template = ChatTemplate("{{ bos_token }}{{ mood }}{{ tools is none }}", {"bos_token": "<s>"})
    assert template.render([USER], template_kwargs={"mood": "calm"}) == "<s>calmTrue"


@pytest.mark.parametrize("name", ["self", "variables", "args", "kwargs", "context"])
def test_a_variable_may_have_any_name(name: str) -> None:
    """Clients choose the names; those of our own or of jinja's parameters are no exception."""
    template = ChatTemplate("{{ messages[0].content }}{{ add_generation_prompt }}", {})
    assert template.render([USER], template_kwargs={name: 1}) == f"{USER['content']}True"


def test_generation_blocks_and_loop_controls_are_understood() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert ChatTemplate(source, {}).render([USER, USER]) == USER["content"]


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ nothing.at.all }}",
        "{{ messages[0]['content'] + 1 }}",
    ],
)
def test_errors_and_escapes_are_template_errors(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, {}).render([USER])


def test_a_template_that_does_not_compile_is_refused_at_once() -> None:
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate("{% for %}", {})


def test_tojson_does_not_escape_for_html() -> None:
    assert (
        ChatTemplate("{{ messages[0].content | tojson }}", {}).render([{"role": "user", "content": "<é>"}]) == '"<é>"'
    )
