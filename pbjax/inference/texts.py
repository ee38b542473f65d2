"""Sentences in and sentence embeddings out of a text encoder, for the demo."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from pbjax.errors import FileError, InputError, PbjaxWarning, warn
from pbjax.files import read_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Tokenized sentences.

    Attributes:
      input_ids: Token ids, padded at the end.
      attention_mask: 1 for a token, 0 for padding.
    """

    input_ids: Int[np.ndarray, "B T"]
    attention_mask: Int[np.ndarray, "B T"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimilarPair:
    """Two sentences and the cosine of their embeddings."""

    first: str
    second: str
    cosine: float


def read_lines(path: Path, option: str = "--texts") -> list[str]:
    """Every line of a text file or of standard input as it is, without a byte-order mark.

    Lines end as editors and `wc -l` count them: at a line feed, with or without a carriage return.

    Args:
      path: The file.
      option: The option that gave it, for messages.

    Raises:
      FileError: The file cannot be read, or has no line that is not blank.
    """
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(
            f"{option} {path}: {error}; a UTF-8 text file with one text a line is allowed; "
            "give another file"
        ) from error
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    if not any(line.strip() for line in lines):
        raise FileError(f"{option} {path}: no text; one or more are needed; write one a line")
    return lines


def read_sentences(path: Path, count: int | None) -> list[str]:
    """The first `count` lines of a text file, or all for None, that are not blank.

    Raises:
      FileError: The file cannot be read, or has too few sentences.
    """
    lines = read_lines(path)
    sentences = [line.strip() for line in lines if line.strip()]
    if blank := len(lines) - len(sentences):
        warn(f"--texts {path}: {blank} of {len(lines)} lines are blank and are left out")
    if count is not None and len(sentences) < count:
        raise FileError(
            f"--texts {path}: {len(sentences)} sentences; {count} are needed for the batch; lower "
            "--batch or add lines"
        )
    return sentences[:count]


def check_unicode(asked: str, texts: Sequence[str]) -> None:
    """Refuses texts that are not valid Unicode, such as arguments in another encoding.

    Args:
      asked: The call and the argument, for the message.
      texts: The texts.

    Raises:
      InputError: A text holds half of a surrogate pair.
    """
    for number, text in enumerate(texts):
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise InputError(
                f"{asked}: text {number} is {text!a}, which is no Unicode; texts of whole "
                "characters are allowed; decode the bytes by their encoding"
            )


def warn_of_cut(asked: str, encoded: Sequence, limit: int, remedy: str) -> None:
    """Warns if a tokenizer has cut texts.

    Args:
      asked: The call and the argument, for the message.
      encoded: The encodings of all texts.
      limit: The most tokens that were kept of a text.
      remedy: What to do, for the message.
    """
    cut = sum(bool(encoding.overflowing) for encoding in encoded)
    if cut:
        warnings.warn(
            f"{asked}: {cut} of {len(encoded)} texts have more than {limit} tokens, of which the "
            f"first {limit} count; {remedy}",
            PbjaxWarning,
            stacklevel=3,
        )


def encode(tokenizer, sentences: Sequence[str], seq_len: int) -> Encoded:
    """Tokenizes sentences, cut and padded to one length.

    Args:
      tokenizer: A `tokenizers.Tokenizer`; its truncation and padding are set.
      sentences: The texts.
      seq_len: Tokens per sentence.
    """
    tokenizer.enable_truncation(seq_len)
    tokenizer.enable_padding(length=seq_len)
    encoded = tokenizer.encode_batch(list(sentences))
    warn_of_cut("optimize(--texts)", encoded, seq_len, "raise --seq for all of them")
    return Encoded(
        input_ids=np.array([e.ids for e in encoded], np.int32),
        attention_mask=np.array([e.attention_mask for e in encoded], np.int32),
    )


def sentence_embeddings(
    hidden: Float[np.ndarray, "B T D"], mask: Int[np.ndarray, "B T"]
) -> Float[np.ndarray, "B D"]:
    """Means of the token vectors over the mask, scaled to length one.

    A sentence without tokens, as some tokenizers make of an empty text, has the zero vector.

    Source: Reimers and Gurevych 2019, section 3 (mean pooling).
    """
    weights = mask[:, :, None].astype(np.float32)
    sums = (hidden.astype(np.float32) * weights).sum(axis=1)
    means = sums / np.maximum(weights.sum(axis=1), 1.0)
    lengths = np.linalg.norm(means, axis=1, keepdims=True)
    return means / np.where(lengths > 0, lengths, 1.0)


def most_similar(
    sentences: Sequence[str], embeddings: Float[np.ndarray, "B D"], count: int
) -> list[SimilarPair]:
    """The pairs of different sentences with the largest cosines, best first."""
    cosines = embeddings @ embeddings.T
    pairs = [
        SimilarPair(first=a, second=sentences[j], cosine=float(cosines[i, j]))
        for i, a in enumerate(sentences)
        for j in range(i + 1, len(sentences))
        if a != sentences[j]
    ]
    return sorted(pairs, key=lambda pair: -pair.cosine)[:count]
