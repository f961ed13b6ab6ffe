"""Chat templates: rendered as transformers renders them, bounded, and honest when they refuse."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Environment
from transformers import PreTrainedTokenizerFast

from handler import template_sandbox
from handler.template import ChatTemplate, TemplateRefusal
from handler.template_forms import Forms
from handler_support import CHATML, byte_level_tokenizer

SPECIALS = {"bos_token": "<s>", "eos_token": "<|im_end|>"}

TEMPLATES = {
    "chatml": CHATML,
    "llama2-like": (
        "{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>\\n' + "
        "messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}{% set rest = messages[1:] %}{% else %}"
        "{% set system = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}"
        "{% if loop.index0 == 0 %}{% set text = system + (m['content'] or '') %}{% else %}"
        "{% set text = m['content'] %}{% endif %}{% if m['role'] == 'user' %}"
        "{{ bos_token + '[INST] ' + text.strip() + ' [/INST]' }}{% elif m['role'] == 'assistant' %}"
        "{{ ' ' + (text or '').strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "blocks-on-lines": (
        "{{ bos_token }}\n{% for m in messages %}\n    {% if m.role == 'user' %}\n"
        "User: {{ m.content }}\n    {% else %}\n{{ m.role | capitalize }}: {{ m.content }}\n"
        "    {% endif %}\n{% endfor %}\n{# a note #}\n{% if add_generation_prompt %}\nAssistant:\n"
        "{% endif %}\n\n"
    ),
    "dashes": (
        "{%- for m in messages -%}\n  {{- '<|' ~ m.role ~ '|>\\n' -}}\n  {{ m.content }}\n"
        "{%- endfor -%}\n{%- if add_generation_prompt -%} <|assistant|> {%- endif -%}"
    ),
    "namespace-and-macro": (
        "{%- macro turn(role, text) -%}<{{ role }}>{{ text }}</{{ role }}>{%- endmacro -%}"
        "{%- set ns = namespace(last=-1, names={}) -%}{%- for m in messages[::-1] -%}"
        "{%- if ns.last < 0 and m.role == 'user' -%}"
        "{%- set ns.last = messages | length - 1 - loop.index0 -%}{%- endif -%}{%- endfor -%}"
        "{%- for m in messages -%}{{ turn(m.role, m.content) }}"
        "{%- if loop.index0 == ns.last %}*{% endif -%}{%- endfor -%}{{ dict(a=1)['a'] }}"
    ),
    "loop-controls": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% if loop.index0 > 3 %}{% break %}{% endif %}({{ m.content }}){% endfor %}"
    ),
    "tools": (
        "{% if tools %}# Tools\n{% for t in tools %}{{ t | tojson }}\n"
        "{{ t.function.parameters | tojson(indent=2) }}\n"
        "{{ t | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}\n{% endfor %}"
        "{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
        "{{ c.function.arguments | tojson }}</call>{% endfor %}{% endfor %}"
    ),
    "generation-block": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "date": "{{ strftime_now('%Y-%m-%d %A') }} {{ messages[0].content }}",
    "thinking": (
        "{% for m in messages %}{% if m.content is string %}{% set text = m.content %}{% else %}"
        "{% set text = '' %}{% endif %}{{ m.role }}:"
        "{% if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ text.split('</think>')[-1].lstrip('\\n') }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% if enable_thinking is defined and "
        "enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    ),
    "parts": (
        "{% for m in messages %}{% if m.content is string %}S:{{ m.content }}{% else %}"
        "{% for p in m.content %}P:{{ p.text }};{% endfor %}{% endif %}{% endfor %}"
    ),
    "alternation": (
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('turns must alternate') }}{% endif %}{{ m['content'] }}{% endfor %}"
    ),
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "wetter",
            "description": "Wetter für <Ort> & 'Tag' — 天気",
            "parameters": {"type": "object", "properties": {"ort": {"type": "string"}}},
        },
    }
]
CALL = {"type": "function", "function": {"name": "wetter", "arguments": {"ort": "Köln", "n": 1}}}

TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["", " padded ", "\n\n", "<think>a</think>\nb", "{{ bos_token }}", "it's <b>"]
)
PLAIN = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXT}
)
REASONED = st.fixed_dictionaries({"role": st.just("assistant"), "content": TEXT, "reasoning": TEXT})
CALLING = st.just({"role": "assistant", "content": None, "tool_calls": [CALL]})
CONVERSATIONS = st.lists(PLAIN | REASONED | CALLING, min_size=1, max_size=5)


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    tokenizer = byte_level_tokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIALS)


def rendered(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    """Ours: the text, or `!` where the template refuses."""
    try:
        return ChatTemplate(source, SPECIALS).render(messages, **options)
    except TemplateRefusal:
        return "!"


def expected(
    reference: PreTrainedTokenizerFast, source: str, messages: list[dict[str, Any]], **options: Any
) -> str:
    """transformers' text, or `!` where it raises."""
    options |= options.pop("variables", {})
    options.setdefault("add_generation_prompt", True)
    try:
        return str(
            reference.apply_chat_template(messages, chat_template=source, tokenize=False, **options)
        )
    except Exception:  # noqa: BLE001 - a template raises all kinds of things
        return "!"


@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=CONVERSATIONS, tools=st.sampled_from([None, TOOLS]), prompt=st.booleans())
def test_equal_to_transformers(
    reference: PreTrainedTokenizerFast,
    name: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    prompt: bool,
) -> None:
    options = {
        "tools": tools,
        "add_generation_prompt": prompt,
        "variables": {"enable_thinking": False},
    }
    source = TEMPLATES[name]
    assert rendered(source, messages, **dict(options)) == expected(
        reference, source, messages, **dict(options)
    )


@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=CONVERSATIONS)
def test_continuing_is_equal_to_transformers(
    reference: PreTrainedTokenizerFast, name: str, messages: list[dict[str, Any]]
) -> None:
    options = {"continue_final_message": True, "add_generation_prompt": False}
    source = TEMPLATES[name]
    assert rendered(source, messages, **options) == expected(reference, source, messages, **options)


def test_continuing_a_message_of_parts(reference: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
    ]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    text = rendered(TEMPLATES["parts"], messages, **options)
    assert text == expected(reference, TEMPLATES["parts"], messages, **options) == "S:aP:b"
    assert messages[1]["content"] == [{"type": "text", "text": "b"}]


def test_the_date_is_that_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ strftime_now('%d.%m.%Y %H:%M') }}")

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> "Later":
            return cls(2031, 2, 3, 4, 5)

    monkeypatch.setattr(template_sandbox, "datetime", Later)
    assert template.render([]) == "03.02.2031 04:05"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() | length }}",
        "{% set _ = messages.append(1) %}{{ messages | length }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% set ns = namespace(_x=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}{{ ns._x }}",
        "{% for i in range(99999999) %}x{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
        "{{ 'x' * 100000000 }}",
        "{{ [1] * 100000000 }}",
        "{{ 9 ** 99999999 }}",
        "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s * 2 %}{% endfor %}",
        "{{ messages[0].content + 1 }}",
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
    ],
)
def test_what_a_template_may_not_do_is_a_refusal(source: str) -> None:
    with pytest.raises(TemplateRefusal):
        ChatTemplate(source).render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "source",
    [
        "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    ],
)
def test_a_template_cannot_run_for_ever(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_RENDER_S", 0.05)
    with pytest.raises(TemplateRefusal, match=r"ran for more than 0.05 seconds"):
        ChatTemplate(source).render([{"role": "user", "content": "hi"}])


def test_loops_keep_their_variables() -> None:
    source = (
        "{% for x in 'abc' %}{{ loop.index }}{{ loop.revindex }}{{ loop.length }}{{ loop.last }}"
        "{{ loop.previtem }}{{ loop.nextitem }}{{ x }};{% else %}none{% endfor %}"
        "{% for x in missing %}x{% else %}none{% endfor %}"
        "{% for x in [1, 2, 3] if x > 1 %}{{ x }}{{ loop.first }}{% endfor %}"
        "{% for x in [[1, [2]]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}"
    )
    expected_text = Environment().from_string(source).render()
    assert ChatTemplate(source).render([]) == expected_text


def test_the_authors_own_words_reach_the_client() -> None:
    with pytest.raises(TemplateRefusal, match=r"^turns must alternate$"):
        ChatTemplate(TEMPLATES["alternation"]).render([{"role": "assistant", "content": "x"}])


@pytest.mark.parametrize(
    ("source", "line", "word"),
    [("a\n{% for m in messages %}", 2, "endfor"), ("{{ x | nofilter }}", 1, "nofilter")],
)
def test_a_template_that_does_not_compile(source: str, line: int, word: str) -> None:
    with pytest.raises(ValueError, match=f"line {line}: .*{word}"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    ("source", "text", "parts"),
    [
        (CHATML, True, False),
        ("{% for m in messages %}{{ '<u>' + m.content }}{% endfor %}", True, False),
        (TEMPLATES["parts"], True, True),
        ("{% for p in messages[0].content %}{{ p.text }}{% endfor %}", False, True),
        ("{{ messages[0]['content'] | map(attribute='text') | join }}", False, True),
        ("{{ raise_exception('never') }}", False, False),
    ],
)
def test_which_forms_of_content_a_template_takes(source: str, text: bool, parts: bool) -> None:
    assert ChatTemplate(source).forms("user") == Forms(text, parts)


def test_forms_differ_by_role() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content | trim }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    template = ChatTemplate(source)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.forms("system").fitted(parts) == "ab"
    assert template.forms("user").fitted(parts) == parts
    assert template.forms("user").fitted("ab") == [{"type": "text", "text": "ab"}]
    assert template.forms("anyone") == template.forms("user")


def test_to_json_keeps_order_and_letters() -> None:
    value = json.dumps(TOOLS[0], ensure_ascii=False)
    assert ChatTemplate("{{ tools[0] | tojson }}").render([], tools=TOOLS) == value


def test_the_demo_models_template(reference: PreTrainedTokenizerFast, demo_model: Path) -> None:
    source = (demo_model / "chat_template.jinja").read_text()
    messages = [{"role": "user", "content": "What is deep learning?"}]
    assert rendered(source, messages) == expected(reference, source, messages)
