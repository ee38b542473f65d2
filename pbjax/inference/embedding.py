"""Embeddings of many texts by an encoder, at full speed whatever their lengths.

Texts are packed end to end into rows of one length (`pbjax.inference.packing`), so that nothing is
computed on padding. The sizes of batches come from a short list, so that few programs are compiled.
A text's vector depends on that text alone, up to rounding.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jaxtyping import Array, Float, Int

from pbjax.buckets import Buckets
from pbjax.errors import InputError, InputTypeError, ModelError
from pbjax.graph.functional import shared_method
from pbjax.inference.packing import Packing, pack
from pbjax.inference.texts import check_unicode, warn_of_cut
from pbjax.runtime.program_cache import keep_programs

Pooling = Literal["mean", "first"]
type Texts = Sequence[str] | Sequence[Sequence[int]] | Sequence[np.ndarray] | np.ndarray
type Tokens = Sequence[int] | np.ndarray
METHOD = "packed_hidden_state"
# Rows shorter than these cost more to launch than their shorter attention saves.
SHORTEST_ROW = 128
# Batches whose results are not fetched yet: one is prepared while another is computed.
IN_FLIGHT = 2


@runtime_checkable
class PackedEncoder(Protocol):
    """An nnx module that encodes several sequences in one row, each on its own."""

    @property
    def max_seq_len(self) -> int:
        """The longest sequence."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        ...

    # packed_hidden_state(input_ids, segment_ids, position_ids, offsets) is called by name.


def embed(
    model: PackedEncoder,
    texts: Texts,
    *,
    tokenizer: tokenizers.Tokenizer | None = None,
    max_tokens: int | None = None,
    pooling: Pooling = "mean",
    normalize: bool = True,
    batch_tokens: int = 16384,
    progress: Callable[[int, int], object] | None = None,
) -> Float[np.ndarray, "texts D"]:
    """Returns one vector for every text.

    Args:
      model: An encoder with `packed_hidden_state`, such as the BERT of `models`.
      texts: Texts, or rows of token ids with the model's special tokens.
      tokenizer: From `models.load_tokenizer`; needed for texts. Its truncation and padding are set.
      max_tokens: Longer texts are cut; None = at the model's longest sequence, with a warning.
      pooling: The mean of the tokens' vectors, or the vector of the first token.
      normalize: Whether the vectors are scaled to length one.
      batch_tokens: Tokens of a batch on the device, at most, padding included.
      progress: Called with (texts done, texts in all).

    Returns:
      The vectors in the order of the texts, in f32; zeros for a text without tokens.

    Raises:
      InputError: An argument has a value that is not allowed, or a row of ids is too long or has an
        id outside the vocabulary.
      InputTypeError: The model is no such encoder, or texts or tokenizer are of another type.
      ModelError: The model gave values that are not finite.

    Source: Reimers and Gurevych 2019, section 3 (pooling).
    """
    sequences = _sequences(model, texts, tokenizer, max_tokens)
    keep_programs()
    if pooling not in get_args(Pooling):
        raise InputError(
            f"embed(pooling={pooling!r}): unknown; {' and '.join(get_args(Pooling))} are allowed;"
            " choose one"
        )
    lengths = [len(sequence) for sequence in sequences]
    packing = pack(lengths, _row_length(model.max_seq_len, max(lengths), batch_tokens))
    step, done = progress or _ignore, lengths.count(0)
    vectors = None
    step(done, len(lengths))
    batches = _batches(model, packing, sequences, batch_tokens // packing.row_length, pooling)
    for first, found in _behind(batches, IN_FLIGHT):
        found = jax.device_get(found)
        if vectors is None:
            vectors = np.zeros((len(lengths), found.shape[2]), np.float32)
        for row, values in zip(packing.rows[first:], found, strict=False):
            vectors[list(row)] = values[: len(row)]
            done += len(row)
        step(done, len(lengths))
    if vectors is None:
        raise InputError("embed(texts): no text has a token; one or more are needed; give a text")
    _check_finite(vectors)
    return _unit(vectors) if normalize else vectors


def _batches(
    model: PackedEncoder,
    packing: Packing,
    sequences: Sequence[Tokens],
    most_rows: int,
    pooling: Pooling,
) -> Iterator[tuple[int, Float[Array, "R S D"]]]:
    """Starts one batch after another; yields its first row and its vectors."""
    method = shared_method(model, METHOD)
    counts = Buckets.growing(1, most_rows, waste=1.0)
    # A power of two, so that other texts use the same programs.
    num_segments = 1 << (packing.most_segments - 1).bit_length()
    for first in range(0, len(packing.rows), most_rows):
        num_rows = counts.least(min(most_rows, len(packing.rows) - first))
        rows = packing.arrays(sequences, first, num_rows, num_segments)
        arrays = (rows.input_ids, rows.segment_ids, rows.position_ids, rows.offsets)
        options = {"apply": method.apply, "num_segments": num_segments, "pooling": pooling}
        yield first, _pooled(method.params, *arrays, **options)


@partial(jax.jit, static_argnames=("apply", "num_segments", "pooling"))
def _pooled(
    params: object,
    input_ids: Int[Array, "R L"],
    segment_ids: Int[Array, "R L"],
    position_ids: Int[Array, "R L"],
    offsets: Int[Array, " C"],
    *,
    apply: Callable,
    num_segments: int,
    pooling: Pooling,
) -> Float[Array, "R S D"]:
    """Returns a vector for every segment of every row, in f32; zeros for missing segments."""
    hidden = apply(params, input_ids, segment_ids, position_ids, offsets)
    with jax.named_scope("pooling"):
        numbers = jnp.arange(1, num_segments + 1, dtype=segment_ids.dtype)
        shape = (segment_ids.shape[0], num_segments, segment_ids.shape[1])
        counted = jnp.broadcast_to(segment_ids[:, None], shape) == jnp.broadcast_to(
            numbers[None, :, None], shape
        )
        if pooling == "first":
            counted &= jnp.broadcast_to(position_ids[:, None] == 0, shape)
        # Values outside the segments may be NaN, and 0 * NaN must not count.
        inside = jnp.broadcast_to((segment_ids > 0)[:, :, None], hidden.shape)
        tokens = jnp.where(inside, hidden.astype(jnp.float32), 0.0)
        weights = counted.astype(jnp.float32)
        sums = jnp.einsum("RSL,RLD->RSD", weights, tokens, precision="highest")
        totals = jnp.maximum(weights.sum(axis=2, keepdims=True), 1.0)
        return sums / jnp.broadcast_to(totals, sums.shape)


def _sequences(
    model: PackedEncoder,
    texts: Texts,
    tokenizer: tokenizers.Tokenizer | None,
    max_tokens: int | None,
) -> list[Tokens]:
    """Returns the tokens of each text, checked."""
    if not isinstance(model, PackedEncoder) or not hasattr(model, METHOD):
        raise InputTypeError(
            f"embed(model): a {type(model).__name__} without {METHOD}; an encoder of several"
            " sequences in one row is needed; pass a BERT of models.load"
        )
    limit = model.max_seq_len if max_tokens is None else max_tokens
    if not 1 <= limit <= model.max_seq_len:
        raise InputError(
            f"embed(max_tokens={max_tokens}): out of range; 1 to {model.max_seq_len} are allowed"
            " for this model; choose one of them"
        )
    if isinstance(texts, str):
        raise InputTypeError("embed(texts): a text; a list of texts is needed; pass [text]")
    if len(texts) == 0:
        raise InputError("embed(texts): there are none; one or more are needed; give a text")
    strings = [text for text in texts if isinstance(text, str)]
    if strings and len(strings) < len(texts):
        raise InputTypeError(
            "embed(texts): some are texts and some are not; only texts, or only rows of integer"
            " token ids, are allowed; convert them"
        )
    if strings:
        encoded = _encode(strings, tokenizer, limit, model.vocab_size)
        if max_tokens is None:  # otherwise the caller asked for it
            remedy = "the model takes no more: split them, or pass max_tokens to cut them"
            warn_of_cut("embed(texts)", encoded, limit, remedy)
        return [encoding.ids for encoding in encoded]
    rows = [text for text in texts if not isinstance(text, str)]
    for index, row in enumerate(rows):
        _check_tokens(index, row, limit, model.vocab_size)
    return rows


def _encode(
    texts: list[str], tokenizer: tokenizers.Tokenizer | None, limit: int, vocab_size: int
) -> list[tokenizers.Encoding]:
    if not isinstance(tokenizer, tokenizers.Tokenizer):
        raise InputTypeError(
            f"embed(tokenizer): a {type(tokenizer).__name__}; texts need a tokenizers.Tokenizer;"
            " pass models.load_tokenizer(FOLDER), or rows of token ids"
        )
    if tokenizer.get_vocab_size() > vocab_size:
        raise InputError(
            f"embed(tokenizer): it has {tokenizer.get_vocab_size()} tokens; at most the model's"
            f" {vocab_size} are allowed; load it from the model's folder"
        )
    check_unicode("embed(texts)", texts)
    tokenizer.no_padding()
    tokenizer.enable_truncation(limit)
    return tokenizer.encode_batch_fast(texts)


def _check_tokens(index: int, sequence: Tokens, limit: int, vocab_size: int) -> None:
    tokens = np.asarray(sequence)
    if tokens.ndim != 1 or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
        raise InputTypeError(
            f"embed(texts): number {index} is of dtype {tokens.dtype} and shape {tokens.shape};"
            " texts, or rows of integer token ids, are allowed; convert them"
        )
    if len(tokens) > limit:
        raise InputError(
            f"embed(texts): number {index} has {len(tokens)} tokens; 0 to {limit} are possible;"
            " cut it"
        )
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        bad = tokens.min() if tokens.min() < 0 else tokens.max()
        raise InputError(
            f"embed(texts): number {index} has token {bad}; 0 to {vocab_size - 1} are in the"
            " vocabulary; use the model's own tokenizer"
        )


def _row_length(max_seq_len: int, longest: int, batch_tokens: int) -> int:
    longest_row = max(SHORTEST_ROW, max_seq_len)
    rooms = Buckets.growing(SHORTEST_ROW, longest_row, waste=0.25, multiple=64)
    row_length = rooms.least(longest)
    if batch_tokens < row_length:
        raise InputError(
            f"embed(batch_tokens={batch_tokens}): less than a row of {row_length} tokens; one row"
            " or more is allowed; raise it"
        )
    return row_length


def _behind[T](items: Iterator[T], distance: int) -> Iterator[T]:
    """Yields the items, each only after `distance` later ones have been taken."""
    waiting: list[T] = []
    for item in items:
        waiting.append(item)
        if len(waiting) > distance:
            yield waiting.pop(0)
    yield from waiting


def _check_finite(vectors: Float[np.ndarray, "texts D"]) -> None:
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        raise ModelError(
            f"embed(): the vectors of text {bad[0]} and {len(bad) - 1} others are not finite;"
            " finite weights are needed; load the model with verify=True"
        )


def _unit(vectors: Float[np.ndarray, "texts D"]) -> Float[np.ndarray, "texts D"]:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(norms > 0, norms, 1)


def _ignore(*_: object) -> None:
    pass
