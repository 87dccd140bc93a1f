"""Templates that would take too long, or too much memory, are refused; published ones render as before."""

import pytest

from heddle.data import chat_template
from heddle.data.chat_template import MAX_UNITS, ChatTemplate
from heddle.data.documents import UnreadableError

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
LOOP = "{% for a in range(90000) %}"
TRAPS = {
    "nested loops": LOOP * 4 + "x" + "{% endfor %}" * 4,
    "loops without text": LOOP * 3 + "{% set x = 1 %}" + "{% endfor %}" * 3,
    "loops in a macro": "{% macro m() %}" + LOOP * 3 + "{% endfor %}" * 3 + "{% endmacro %}{{ m() }}",
    "macros that call themselves": "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "a tree of macros": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(90) }}"
    ),
    "a recursive loop": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "a long range": "{% for a in range(10 ** 9) %}x{% endfor %}",
    "a product of text": "{{ 'a' * 2000000000 }}",
    "a product of a list": "{{ [0] * 2000000000 }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "powers of powers": "{{ ((9 ** 64) ** 64) ** 64 }}",
    "a text that doubles": (
        "{% set n = namespace(x='aaaaaaaa') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
    ),
    "a sum that doubles": (
        "{% set n = namespace(x='aaaaaaaa') %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}"
    ),
    "a list that doubles": (
        "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}"
    ),
    "a block that doubles": (
        "{% set n = namespace(x='aaaaaaaa') %}{% for a in range(60) %}{% set b %}{{ n.x }}{{ n.x }}{% endset %}"
        "{% set n.x = b %}{% endfor %}"
    ),
    "replacements": (
        "{% set n = namespace(x='a' * 99) %}{% for a in range(9) %}{% set n.x = n.x.replace('a', n.x) %}{% endfor %}"
    ),
    "replacements by a filter": (
        "{% set n = namespace(x='a' * 99) %}{% for a in range(9) %}{% set n.x = n.x | replace('a', n.x) %}{% endfor %}"
    ),
    "text between many": "{{ ('a' * 90000).join(range(90000) | map('string') | list) }}",
    "a wide text": "{{ 'a'.ljust(2000000000) }}",
    "a wide filter": "{{ 'a' | center(2000000000) }}",
    "a wide number": "{{ '%2000000000d' % 1 }}",
    "a wide number by a filter": "{{ '%2000000000d' | format(1) }}",
    "a wide format": "{{ '{:>2000000000}'.format('a') }}",
    "a width among the arguments": "{{ '%*d' % (2000000000, 1) }}",
    "deep indents": "{{ 'a\n' | indent(2000000000) }}",
    "lists of lists": LOOP + "{{ range(90000) | list }}{% endfor %}",
    "random words": "{{ lipsum(n=90000) }}",
    "deep brackets": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "many blocks": "{% for a in [1] %}" * 60 + "{% endfor %}" * 60,
    "a large template": "x{{ 1 }}" * 100_000,
    "the class of a text": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a change of the messages": "{{ messages.append(1) }}",
    "counting switched off": "{% set environment = 1 %}{% set count = 1 %}" + LOOP * 4 + "{% endfor %}" * 4,
}


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_is_refused(name: str) -> None:
    with pytest.raises(UnreadableError) as refusal:
        ChatTemplate(TRAPS[name]).render(messages=MESSAGES)
    assert len(str(refusal.value)) < 200


def test_work_is_bounded_for_each_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role ~ ': ' ~ m.content | trim }}{% endfor %}")
    for _ in range(3):
        assert template.render(messages=MESSAGES) == "user: aassistant: b"
    assert 0 < template._environment.work < MAX_UNITS / 1000
    monkeypatch.setattr(chat_template, "MAX_UNITS", template._environment.work - 1)
    with pytest.raises(UnreadableError, match="it takes too many steps"):
        template.render(messages=MESSAGES)


def test_the_longest_conversation_is_rendered() -> None:
    long = [{"role": "user", "content": "a line\n" * 100}] * 1000
    text = ChatTemplate("{% for m in messages %}{{ '<s>' + m['role'] + '\\n' + m['content'] }}{% endfor %}")
    assert len(text.render(messages=long)) == 1000 * (3 + 4 + 1 + 700)
