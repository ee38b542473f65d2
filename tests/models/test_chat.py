"""Chat templates: transformers' ids, and what is refused."""

import json

import pytest

import models
from models.chat import ChatTemplate
from tests.chats import CHATS, NAMES, REFERENCE, TEMPLATES, tokenizer


def load(path, template=None, **config):
    path.mkdir(exist_ok=True)
    fields = {**NAMES, **({} if template is None else {"chat_template": template}), **config}
    (path / "tokenizer_config.json").write_text(json.dumps(fields))
    return models.load_chat_template(path)


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_those_of_transformers(name, tmp_path):
    template, expected = load(tmp_path, TEMPLATES[name]), json.loads(REFERENCE.read_text())[name]
    encode = tokenizer().encode
    for chat, messages in CHATS.items():
        for prompt in (False, True):
            text = template.render(messages, add_generation_prompt=prompt)
            found = encode(text, add_special_tokens=False).ids
            assert found == expected[f"{chat} {prompt}"], (chat, prompt)


def test_template_of_its_own_file_comes_first(tmp_path):
    named = [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "c"}]
    assert load(tmp_path, named).render([]) == "c"
    (tmp_path / "chat_template.jinja").write_text("d{{ bos_token }}{{ eos_token }}")
    assert load(tmp_path, named).render([]) == "d<s></s>"


def test_special_tokens_of_older_folders_are_read(tmp_path):
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<b>"}')
    assert load(tmp_path, "{{ bos_token }}{{ eos_token }}").render([]) == "<b></s>"
    assert load(tmp_path, "{{ bos_token }}", added_tokens_decoder={}).render([]) == "<s>"


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (TEMPLATES["inst"], [{"role": "tool", "content": "a"}], "refuses.*Roles must alternate"),
        ("{{ messages[0].content + 'a' }}", [{"content": 1}], "refuses the messages: unsupported"),
        ("{{ ''.__class__.__mro__ }}", [], "refuses the messages: access to attribute"),
        ("a", [{"content": object()}], "message 0: Object of type object is not JSON"),
        ("a", ["Hello"], "message 0: a str; a mapping with role and content"),
    ],
)
def test_what_a_template_cannot_take_is_refused(tmp_path, template, messages, message):
    # The bare function: jaxtyping's check of the test run would come before ours.
    render = getattr(ChatTemplate.render, "__wrapped__", ChatTemplate.render)
    loaded = load(tmp_path, template)
    with pytest.raises(models.InputError, match=message):
        render(loaded, messages)


def test_missing_and_broken_templates_are_refused(tmp_path):
    with pytest.raises(models.CheckpointError, match="has no chat template, neither"):
        load(tmp_path)
    with pytest.raises(models.CheckpointError, match=r"line 1: .*a template of jinja2 is needed"):
        load(tmp_path, "{% if %}").render([])
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(models.CheckpointError, match="UTF-8 text is needed"):
        load(tmp_path)
