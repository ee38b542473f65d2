"""The chat template of a folder: messages as the text that its model was trained on.

A template is a program of somebody else: it runs in jinja2's sandbox, on plain data alone.

Source: transformers 5.24, `utils/chat_template_utils.py`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from models.errors import CheckpointError, InputError
from models.hf_folder import find_folder, read_json

TEMPLATE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# Names of what a model thought before it answered; templates read the first, or the second.
REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A chat template and what it may refer to.

    Attributes:
      source: The template, in jinja2's language.
      variables: What it can name beside the messages: special tokens, and tools or documents.
      origin: The file, for messages.
    """

    source: str
    variables: Mapping[str, object] = field(default_factory=dict)
    origin: str = "chat template"

    def render(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True
    ) -> str:
        """Returns the text of a conversation.

        Args:
          messages: Mappings such as {"role": "user", "content": "Hello"}, of plain data.
          add_generation_prompt: Whether the text ends where the answer of the model begins.

        Raises:
          CheckpointError: The template is no jinja2.
          InputError: The template refuses the messages or fails on them, or they hold other than
            plain data.
        """
        try:
            template = _environment().from_string(self.source, FUNCTIONS)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"{self.origin}: line {error.lineno}: {error.message}; a template of jinja2 is"
                " needed; fetch the file again"
            ) from error
        plain = [_message(number, message) for number, message in enumerate(messages)]
        given = {"tools": None, "documents": None, **self.variables}
        try:
            return template.render(
                messages=plain, add_generation_prompt=add_generation_prompt, **given
            )
        except Exception as error:  # a template can raise anything
            raise InputError(
                f"{self.origin}: the template refuses the messages:"
                f" {error or type(error).__name__}; roles and contents that it expects are allowed;"
                " correct the messages"
            ) from error


def load_chat_template(folder: str | Path) -> ChatTemplate:
    """Reads the chat template of a folder: chat_template.jinja, or in tokenizer_config.json.

    Args:
      folder: A Hugging Face folder or one of `convert`.

    Returns:
      The template, for `pbjax.generate(messages=, chat_template=)`.

    Raises:
      CheckpointError: There is none, or a file is corrupt.
    """
    path = find_folder(folder)
    file = path / TOKENIZER_CONFIG
    config = read_json(file) if file.is_file() else {}
    source = config.get("chat_template")
    if isinstance(source, list):
        parts = [part for part in source if isinstance(part, dict)]
        source = {part.get("name"): part.get("template") for part in parts}.get("default")
    if (path / TEMPLATE).is_file():
        file = path / TEMPLATE
        source = _text(file)
    if not isinstance(source, str):
        raise CheckpointError(
            f"{path}: has no chat template, neither {TEMPLATE} nor a text or one named default as"
            f" chat_template of {TOKENIZER_CONFIG}; one is needed for messages; give the folder of"
            " a model that was trained to chat"
        )
    return ChatTemplate(source=source, variables=_special_tokens(path, config), origin=str(file))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{file}: not readable ({error}); UTF-8 text is needed; fetch the file again"
        ) from error


def _special_tokens(path: Path, config: Mapping[str, object]) -> dict[str, object]:
    """Returns the texts of special tokens by name, as transformers finds them."""
    fields = dict(config)
    if "added_tokens_decoder" not in config and (path / SPECIAL_TOKENS).is_file():
        fields |= read_json(path / SPECIAL_TOKENS)
    found: dict[str, object] = {}
    for name in SPECIAL:
        value = fields.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found


def _message(number: int, message: object) -> dict[str, object]:
    """Returns a message as plain data, without what is None."""
    if not isinstance(message, Mapping):
        raise InputError(
            f"message {number}: a {type(message).__name__}; a mapping with role and content is"
            " needed; pass for instance {'role': 'user', 'content': 'Hello'}"
        )
    try:
        plain = json.loads(json.dumps({k: v for k, v in message.items() if v is not None}))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"message {number}: {error}; texts, numbers, lists and mappings of them are allowed;"
            " convert it"
        ) from error
    thoughts = next((plain[name] for name in REASONING if plain.get(name) is not None), None)
    return plain if thoughts is None else {"thinking": thoughts, **plain, REASONING[0]: thoughts}


def _environment() -> jinja2.Environment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    made.filters["tojson"] = _to_json
    return made


class _Generation(Extension):
    """The block {% generation %}, which marks what a model is trained on, and changes no text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Scope:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body, lineno=line)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Takes the place of jinja2's own filter, which escapes what HTML needs."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


# What templates call by these names.
FUNCTIONS = {"raise_exception": _raise, "strftime_now": _now}
