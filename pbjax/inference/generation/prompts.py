"""Turns prompts of any kind into rows of tokens that start at column 0, and sizes for padding.

Padding is removed here on both sides, so that nothing after this depends on it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import tokenizers
from jaxtyping import Int

from pbjax.buckets import Buckets
from pbjax.errors import InputError, InputTypeError
from pbjax.inference.texts import check_unicode

SMALLEST_BUCKET, BUCKET_MULTIPLE = 16, 8
# For models without a longest sequence; longer sequences get arrays of their own length.
LARGEST_BUCKET = 2**20


type Messages = Sequence[Mapping[str, object]]


@runtime_checkable
class ChatTemplate(Protocol):
    """What makes a text of messages, such as `models.load_chat_template` reads."""

    def render(self, messages: Messages) -> str:
        """Returns the text of a conversation, up to where the model's answer begins."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Token sequences of one batch.

    Attributes:
      rows: The tokens of each sequence.
    """

    rows: tuple[tuple[int, ...], ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(map(len, self.rows))

    @property
    def lengths(self) -> Int[np.ndarray, " B"]:
        """Number of tokens of each sequence."""
        return np.array([len(row) for row in self.rows], np.int32)

    def padded(self, length: int) -> Int[np.ndarray, "B T"]:
        """Returns the sequences with zeros after each up to one length."""
        ids = np.zeros((len(self.rows), length), np.int32)
        for row, tokens in zip(ids, self.rows, strict=True):
            row[: len(tokens)] = tokens
        return ids


def bucket(count: int, limit: int | None) -> int:
    """Returns the size of arrays for some tokens: 16, 32, 56, 88, 136 and so on.

    Args:
      count: Tokens that must fit.
      limit: The longest sequence of the model, which no size exceeds; None = any.
    """
    largest = max(count, LARGEST_BUCKET) if limit is None else limit
    smallest = min(SMALLEST_BUCKET, largest)
    return Buckets.growing(smallest, largest, multiple=BUCKET_MULTIPLE).least(count)


def read_prompts(
    prompts: str | Sequence[str] | Sequence[Sequence[int]] | np.ndarray,
    attention_mask: np.ndarray | Sequence[Sequence[int]] | None,
    tokenizer: tokenizers.Tokenizer | None,
    vocab_size: int,
) -> Prompts:
    """Turns a caller's prompts into rows of tokens.

    Args:
      prompts: A text, texts, rows of token ids of any lengths, or an array of them.
      attention_mask: 1 for tokens, 0 for padding on the left, on the right or both; None = all 1.
      tokenizer: Tokenizer for texts; its truncation and padding are turned off.
      vocab_size: Number of tokens; ids are below it.

    Raises:
      InputError: There is no prompt or an empty one, an id is outside the vocabulary, the mask does
        not fit or has a hole, or texts come without a tokenizer.
      InputTypeError: Prompts or tokenizer are of another type.
    """
    _check_tokenizer(tokenizer)
    texts = [prompts] if isinstance(prompts, str) else prompts
    if not isinstance(texts, Sequence | np.ndarray) or getattr(texts, "ndim", 1) == 0:
        raise InputTypeError(
            f"generate(prompts): a {type(prompts).__name__}; a text, a list of texts, or rows of "
            "token ids are allowed; for one prompt pass [ids]"
        )
    if len(texts) == 0:
        raise InputError("generate(prompts): there are none; one or more are needed; give a prompt")
    if isinstance(texts[0], str):
        rows = _encode(texts, attention_mask, tokenizer)
    else:
        rows = _strip(_integer_rows(texts), attention_mask)
    return _checked(rows, vocab_size)


def read_messages(
    messages: Messages | Sequence[Messages],
    chat_template: ChatTemplate | None,
    tokenizer: tokenizers.Tokenizer | None,
    vocab_size: int,
) -> Prompts:
    """Turns conversations into rows of tokens, by a chat template that writes all special ones.

    Args:
      messages: A conversation, or several.
      chat_template: Template of the model.
      tokenizer: Tokenizer; its truncation and padding are turned off.
      vocab_size: Number of tokens; ids are below it.

    Raises:
      InputError: There is no message, no template or no tokenizer.
      InputTypeError: The messages are of another type.
    """
    _check_tokenizer(tokenizer)
    if tokenizer is None or chat_template is None:
        raise InputError(
            "generate(messages): there is no tokenizer, or no chat template; both are needed; pass "
            "tokenizer=models.load_tokenizer(FOLDER) and "
            "chat_template=models.load_chat_template(FOLDER)"
        )
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise InputTypeError(
            f"generate(messages): a {type(messages).__name__}; a list of messages, or several such "
            "lists, are allowed; pass for instance [{'role': 'user', 'content': 'Hello'}]"
        )
    single = bool(messages) and isinstance(messages[0], Mapping)
    chats: list[Messages] = [messages] if single else list(messages)  # pyrefly: ignore[bad-assignment]
    if not chats or not all(chats):
        raise InputError(
            "generate(messages): a conversation has none; one or more are needed; give a message"
        )
    texts = [chat_template.render(chat) for chat in chats]
    check_unicode("generate(messages)", texts)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return _checked([encoding.ids for encoding in encoded], vocab_size)


def _check_tokenizer(tokenizer: object) -> None:
    if tokenizer is not None and not isinstance(tokenizer, tokenizers.Tokenizer):
        raise InputTypeError(
            f"generate(tokenizer): a {type(tokenizer).__name__}; a tokenizers.Tokenizer is "
            "allowed; pass models.load_tokenizer(FOLDER)"
        )


def _checked(rows: Sequence[Sequence[int] | np.ndarray], vocab_size: int) -> Prompts:
    for index, row in enumerate(rows):
        _check_row(index, row, vocab_size)
    return Prompts(rows=tuple(tuple(int(token) for token in row) for row in rows))


def _encode(texts, attention_mask, tokenizer) -> list[Sequence[int]]:
    if tokenizer is None:
        raise InputError(
            "generate(prompts): they are texts and there is no tokenizer; texts need one; pass "
            "tokenizer=models.load_tokenizer(FOLDER), or token ids"
        )
    if attention_mask is not None:
        raise InputError(
            "generate(attention_mask): the prompts are texts; a mask is for token ids; leave it out"
        )
    if other := [type(text).__name__ for text in texts if not isinstance(text, str)]:
        raise InputTypeError(
            f"generate(prompts): texts and a {other[0]} among them; only texts, or only token ids, "
            "are allowed; convert them"
        )
    check_unicode("generate(prompts)", texts)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return [_begun_once(encoding) for encoding in tokenizer.encode_batch(list(texts))]


def _begun_once(encoding: tokenizers.Encoding) -> list[int]:
    """The tokens of a text, which may itself begin with what the tokenizer puts before all."""
    ids, added = encoding.ids, encoding.special_tokens_mask
    count = added.index(0) if 0 in added else 0
    doubled = count and ids[count : 2 * count] == ids[:count] and not any(added[count : 2 * count])
    return ids[count:] if doubled else ids


def _integer_rows(prompts) -> list[np.ndarray]:
    rows = [np.asarray(row) for row in prompts]
    for index, row in enumerate(rows):
        integers = row.size == 0 or np.issubdtype(row.dtype, np.integer)
        if row.ndim != 1 or not integers:
            raise InputTypeError(
                f"generate(prompts): number {index} is of dtype {row.dtype} and shape {row.shape}; "
                "texts or rows of integer token ids are allowed; for one prompt pass [ids]"
            )
    return rows


def _strip(rows: list[np.ndarray], attention_mask) -> list[np.ndarray]:
    """The rows without their padding."""
    if attention_mask is None:
        return rows
    if not isinstance(attention_mask, Sequence | np.ndarray):
        raise InputTypeError(
            f"generate(attention_mask): a {type(attention_mask).__name__}; rows of 0 and 1 are "
            "allowed; give one value a token"
        )
    masks = [np.asarray(mask) for mask in attention_mask]
    shapes = [mask.shape for mask in masks]
    if shapes != [row.shape for row in rows]:
        raise InputError(
            f"generate(attention_mask): rows of shapes {shapes}; those of the prompts are "
            f"{[row.shape for row in rows]}; give one value a token"
        )
    for index, mask in enumerate(masks):
        if not np.isin(mask, (0, 1)).all():
            raise InputError(
                f"generate(attention_mask): row {index} has values besides 0 and 1; 1 is a token, "
                "0 is padding; correct it"
            )
        places = np.flatnonzero(mask)
        if len(places) and places[-1] - places[0] + 1 != len(places):
            raise InputError(
                f"generate(attention_mask): row {index} has padding between its tokens; padding on "
                "the left or on the right is allowed; remove the tokens that do not count"
            )
    return [row[np.asarray(mask) != 0] for row, mask in zip(rows, masks, strict=True)]


def _check_row(index: int, row: Sequence[int] | np.ndarray, vocab_size: int) -> None:
    if len(row) == 0:
        raise InputError(
            f"generate(prompts): number {index} has no token; one or more are needed; begin with "
            "the model's first token, such as <|begin_of_text|>, or leave it out"
        )
    low, high = int(np.min(row)), int(np.max(row))
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise InputError(
            f"generate(prompts): number {index} has token {bad}; 0 to {vocab_size - 1} are in the "
            "vocabulary; use the model's own tokenizer"
        )
