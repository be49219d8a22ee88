"""Where a chat template is found, and the limits of what one may do."""

import json

import pytest
from chat_templates import CHATML, MODELS, save_tokenizer

from optimus_jax.data import template_sandbox
from optimus_jax.data.chat_template import ChatTemplate
from optimus_jax.data.records import NotConversationError
from optimus_jax.data.tokenizers import load_tokenizer
from optimus_jax.errors import DataError

MESSAGES = [{"role": "user", "content": "hi", "more": [1, 2, 3]}]


def rendered(text, **variables):
    return ChatTemplate(text, variables).render(MESSAGES)


def test_the_template_is_found_where_models_have_it(tmp_path):
    save_tokenizer(tmp_path, **MODELS["mistral"])
    config = tmp_path / "tokenizer_config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"chat_template": "of the config"}))
    (tmp_path / "other.jinja").write_text("another")
    asked = load_tokenizer(str(tmp_path), chat_template=str(tmp_path / "other.jinja"))
    assert asked.chat_template.text == "another"
    assert load_tokenizer(str(tmp_path)).chat_template.text == MODELS["mistral"]["template"]
    (tmp_path / "chat_template.jinja").unlink()
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).chat_template.text == "of the config"
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "{{ bos_token }}"}]
    config.write_text(
        json.dumps(values | {"chat_template": named, "bos_token": {"content": "<s>"}})
    )
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.chat_template.render(MESSAGES) == "<s>"
    assert tokenizer.files["chat_template.jinja"] == b"{{ bos_token }}", "a run keeps a copy"
    assert json.loads(tokenizer.files["tokenizer_config.json"])["bos_token"] == "<s>"
    config.write_text(json.dumps(values | {"chat_template": named[:1]}))
    assert load_tokenizer(str(tmp_path)).chat_template is None
    with pytest.raises(DataError, match=r"cannot be read(.|\n)*none\.jinja"):
        load_tokenizer("bytes", chat_template=str(tmp_path / "none.jinja"))


def test_templates_are_told_apart_by_their_digests():
    digests = {
        ChatTemplate(CHATML).digest,
        ChatTemplate(CHATML + " ").digest,
        ChatTemplate(CHATML, {"bos_token": "<s>"}).digest,
    }
    assert len(digests) == 3


def test_blanks_and_json_are_written_as_transformers_writes_them():
    assert rendered("  {% if true %}\nx\n  {% endif %}\n") == "x\n"
    assert rendered("{{ {'a': '<\u4e2d>'} | tojson }}") == '{"a": "<\u4e2d>"}'
    assert rendered("{% for m in messages %}{% continue %}x{% endfor %}y") == "y"
    assert rendered("{{ dict(a=1) }}{{ dict.fromkeys('b') }}") == "{'a': 1}{'b': None}"
    assert (
        rendered("{% for pair in 'abc' | batch(2) %}{{ pair | join('+') }};{% endfor %}")
        == "a+b;c;"
    )
    assert rendered("{% set ns = namespace(a=1) %}{% set ns.a = 2 %}{{ ns.a }}") == "2"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[3].content }}", "undefined|no element"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{% set ns = namespace(__init__=1) %}", "no attribute"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "no attribute|unsafe"),
        ("{{ dict.update(messages[0], {'role': 'assistant'}) }}", "no attribute"),
        ("{{ 1 / 0 }}", "division"),
        ("{% for i in range(1000000) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_what_a_template_refuses_or_must_not_do_concerns_its_record(template, message):
    with pytest.raises(NotConversationError, match=message):
        rendered(template)


def test_the_sandbox_has_no_chance():
    with pytest.raises(DataError, match="is not a chat template"):
        rendered("{{ messages | random }}")
    assert rendered("{{ lipsum is defined }}") == "False"


TIMES_99 = "{% for i in range(99) %}"
MANY = "{% for a in range(1000) %}{% for b in range(1000) %}{% for c in range(1000) %}"


@pytest.mark.parametrize(
    "template",
    [
        MANY + "{% endfor %}{% endfor %}{% endfor %}",
        MANY + "x{% endfor %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(30) }}",
        "{{ 'x' * 1000000000 }}",
        "{{ [0] * 1000000000 }}",
        "{{ 10 ** 1000000000 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ 'x' | center(1000000000) }}",
        "{{ 'x' | indent(1000000000, true) }}",
        "{{ messages | tojson(indent=1000000000) }}",
        "{{ messages | batch(1000000000, 'x') | list }}",
        "{{ messages | slice(1000000000) | list }}",
        "{% set x = 'x' * 10000 %}{{ x | replace('x', x) | replace('x', x) }}",
        "{% set x = 'x' * 10000 %}{{ x.replace('x', x).replace('x', x) }}",
        "{% set x = 'x' * 10000 %}{{ range(100000) | join(x) }}",
        "{% set x = 'x' * 10000 %}{{ x.join(x) }}",
        "{% set n = namespace(s='x') %}" + TIMES_99 + "{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s='x') %}" + TIMES_99 + "{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s=[1]) %}" + TIMES_99 + "{% set n.s = n.s + n.s %}{% endfor %}",
    ],
)
def test_a_template_without_end_is_an_error(template, monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 10_000)
    monkeypatch.setattr(template_sandbox, "MAX_CHARACTERS", 1 << 20)
    with pytest.raises(DataError, match="does not end, or makes too much text"):
        rendered(template)


def test_data_do_not_depend_on_the_day():
    with pytest.raises(DataError, match="asks for the date"):
        rendered("{{ strftime_now('%d') }}")
    assert rendered("{% if strftime_now is defined %}now{% else %}then{% endif %}") == "then"


def test_a_damaged_template_is_an_error_with_its_line():
    with pytest.raises(DataError, match=r"is not a chat template\n.*\(line 2\)"):
        rendered("a\n{% for x %}")
