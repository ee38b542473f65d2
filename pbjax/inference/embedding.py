"""Embeddings of many texts by an encoder, at full speed whatever their lengths.

Texts are packed end to end into rows of one length (`pbjax.inference.packing`), so that nothing is
computed on padding. The sizes of batches come from a short list, so that few programs are compiled.
A text's vector depends on that text alone, up to rounding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import jax
import numpy as np
import tokenizers
from jaxtyping import Array, Float, Int

from pbjax.buckets import Buckets
from pbjax.errors import InputError, InputTypeError, ModelError
from pbjax.graph.functional import shared_method
from pbjax.inference.packing import Packing, pack
from pbjax.inference.pooling import pool, pooling_modes
from pbjax.inference.texts import check_unicode, warn_of_cut
from pbjax.runtime.program_cache import keep_programs

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


@runtime_checkable
class Layer(Protocol):
    """What follows the pooling."""

    @property
    def name(self) -> str:
        """Its kind, such as Dense; one called Normalize scales vectors to length one."""
        ...

    @property
    def width(self) -> int | None:
        """Values of the vectors that it takes; None = any."""
        ...

    @property
    def apply(self) -> Callable[[np.ndarray], np.ndarray]:
        """Computes it."""
        ...


@runtime_checkable
class Settings(Protocol):
    """What a folder says of its vectors, such as `models.load_sentence_settings` reads."""

    @property
    def pooling(self) -> tuple[str, ...]:
        """Names out of `pooling.POOLING`."""
        ...

    @property
    def include_prompt(self) -> bool:
        """Whether the tokens of a prompt are pooled too."""
        ...

    @property
    def layers(self) -> Sequence[Layer]:
        """What follows the pooling."""
        ...

    @property
    def max_tokens(self) -> int | None:
        """Longer texts are cut; None = at the model's longest sequence."""
        ...

    @property
    def lower_case(self) -> bool:
        """Whether texts are lower-cased."""
        ...

    @property
    def prompts(self) -> Mapping[str, str]:
        """What may stand before each text, by name."""
        ...

    @property
    def default_prompt(self) -> str | None:
        """The name of the one that stands there unless another is chosen."""
        ...


def embed(
    model: PackedEncoder,
    texts: Texts,
    *,
    tokenizer: tokenizers.Tokenizer | None = None,
    settings: Settings | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
    max_tokens: int | None = None,
    pooling: str | Sequence[str] | None = None,
    normalize: bool | None = None,
    batch_tokens: int = 16384,
    progress: Callable[[int, int], object] | None = None,
) -> Float[np.ndarray, "texts E"]:
    """Returns one vector for every text.

    Args:
      model: An encoder with `packed_hidden_state`, such as the BERT of `models`.
      texts: Texts, or rows of token ids with the model's special tokens.
      tokenizer: From `models.load_tokenizer`; needed for texts. Its truncation and padding are set.
      settings: From `models.load_sentence_settings`: pooling, layers after it, length and prompts
        of the folder. None = means of length one.
      prompt_name: The prompt of the settings that stands before each text; None = their default.
      prompt: What stands before each text, in place of one of the settings.
      max_tokens: Longer texts are cut; None = as the settings say, and at the model's longest
        sequence, with a warning.
      pooling: A name out of `pbjax.inference.pooling.POOLING`, or several, whose vectors are
        joined; None = as the settings say.
      normalize: Whether the vectors are scaled to length one; None = as the settings say.
      batch_tokens: Tokens of a batch on the device, at most, padding included.
      progress: Called with (texts done, texts in all).

    Returns:
      The vectors in the order of the texts, in f32. Those of a text without tokens are pooled as
      zeros.

    Raises:
      InputError: An argument has a value that is not allowed, or a row of ids is too long or has an
        id outside the vocabulary.
      InputTypeError: The model is no such encoder, or texts or tokenizer are of another type.
      ModelError: The model gave values that are not finite.

    Source: Reimers and Gurevych 2019, section 3 (pooling).
    """
    chosen = pooling if pooling is not None else settings.pooling if settings else "mean"
    modes = pooling_modes("embed", chosen)
    prefix = _prompt(settings, prompt_name, prompt)
    sequences, skip = _sequences(model, texts, tokenizer, max_tokens, settings, prefix)
    keep_programs()
    lengths = [len(sequence) for sequence in sequences]
    packing = pack(lengths, _row_length(model.max_seq_len, max(lengths), batch_tokens))
    step, done = progress or _ignore, lengths.count(0)
    vectors = None
    step(done, len(lengths))
    most_rows = batch_tokens // packing.row_length
    batches = _batches(model, packing, sequences, most_rows, modes, skip)
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
    vectors = _after_pooling(vectors, settings, normalize)
    return _unit(vectors) if normalize or (settings is None and normalize is None) else vectors


def _prompt(settings: Settings | None, name: str | None, prompt: str | None) -> str:
    """What stands before each text; empty for nothing."""
    if prompt is not None:
        if name is not None:
            raise InputError(
                f"embed(prompt={prompt!r}, prompt_name={name!r}): two prompts; one is allowed; "
                "leave one of them out"
            )
        return prompt
    known = settings.prompts if settings else {}
    name = settings.default_prompt if settings and name is None else name
    if name is None:
        return ""
    if name not in known:
        raise InputError(
            f"embed(prompt_name={name!r}): no prompt has that name; those of the settings are "
            f"{', '.join(known) or 'none'}; choose one of them, or pass prompt= as a text"
        )
    return known[name]


def _after_pooling(
    vectors: Float[np.ndarray, "texts D"], settings: Settings | None, normalize: bool | None
) -> Float[np.ndarray, "texts E"]:
    """Applies the layers of the settings, without those that normalize=False leaves out."""
    for layer in settings.layers if settings else ():
        if layer.name == "Normalize" and normalize is False:
            continue
        if layer.width not in (None, vectors.shape[1]):
            raise InputError(
                f"embed(pooling): vectors of {vectors.shape[1]} values; the settings' {layer.name} "
                f"takes {layer.width}; leave pooling to the settings, or leave out the settings"
            )
        vectors = layer.apply(vectors)
    return vectors


def _batches(
    model: PackedEncoder,
    packing: Packing,
    sequences: Sequence[Tokens],
    most_rows: int,
    modes: tuple[str, ...],
    skip: int,
) -> Iterator[tuple[int, Float[Array, "R S E"]]]:
    """Starts one batch after another; yields its first row and its vectors."""
    method = shared_method(model, METHOD)
    counts = Buckets.growing(1, most_rows, waste=1.0)
    # A power of two, so that other texts use the same programs.
    num_segments = 1 << (packing.most_segments - 1).bit_length()
    for first in range(0, len(packing.rows), most_rows):
        num_rows = counts.least(min(most_rows, len(packing.rows) - first))
        rows = packing.arrays(sequences, first, num_rows, num_segments)
        arrays = (rows.input_ids, rows.segment_ids, rows.position_ids, rows.offsets)
        options = {"apply": method.apply, "num_segments": num_segments, "modes": modes}
        yield first, _pooled(method.params, *arrays, np.int32(skip), **options)


@partial(jax.jit, static_argnames=("apply", "num_segments", "modes"))
def _pooled(
    params: object,
    input_ids: Int[Array, "R L"],
    segment_ids: Int[Array, "R L"],
    position_ids: Int[Array, "R L"],
    offsets: Int[Array, " C"],
    skip: Int[Array, ""],
    *,
    apply: Callable,
    num_segments: int,
    modes: tuple[str, ...],
) -> Float[Array, "R S E"]:
    """Returns a vector for every segment of every row, as `pool` does."""
    hidden = apply(params, input_ids, segment_ids, position_ids, offsets)
    with jax.named_scope("pooling"):
        return pool(hidden, segment_ids, position_ids, skip, num_segments=num_segments, modes=modes)


def _sequences(
    model: PackedEncoder,
    texts: Texts,
    tokenizer: tokenizers.Tokenizer | None,
    max_tokens: int | None,
    settings: Settings | None,
    prompt: str,
) -> tuple[list[Tokens], int]:
    """Returns the tokens of each text, checked, and how many at their start are not pooled."""
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
    if not strings:
        rows = [text for text in texts if not isinstance(text, str)]
        for index, row in enumerate(rows):
            _check_tokens(index, row, limit, model.vocab_size)
        return rows, 0
    check_unicode("embed(texts)", [prompt, *strings])
    tokenizer = _tokenizer(tokenizer, model.vocab_size, settings)
    if max_tokens is None and settings and settings.max_tokens:
        limit = min(limit, settings.max_tokens)
    tokenizer.enable_truncation(limit)
    encoded = tokenizer.encode_batch_fast([prompt + text for text in strings])
    if max_tokens is None:  # otherwise the caller asked for it
        longest = "the model takes" if limit == model.max_seq_len else "the folder allows"
        remedy = f"{longest} no more: split them, or pass max_tokens to choose another number"
        warn_of_cut("embed(texts)", encoded, limit, remedy)
    skipped = prompt and settings is not None and not settings.include_prompt
    return [encoding.ids for encoding in encoded], _length(tokenizer, prompt) if skipped else 0


def _tokenizer(
    tokenizer: tokenizers.Tokenizer | None, vocab_size: int, settings: Settings | None
) -> tokenizers.Tokenizer:
    """Returns the tokenizer, checked and without padding; one that lower-cases is a copy."""
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
    if settings and settings.lower_case:
        tokenizer = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        steps = [tokenizers.normalizers.Lowercase()]
        steps += [tokenizer.normalizer] if tokenizer.normalizer is not None else []
        tokenizer.normalizer = tokenizers.normalizers.Sequence(steps)
    tokenizer.no_padding()
    return tokenizer


def _length(tokenizer: tokenizers.Tokenizer, prompt: str) -> int:
    """Tokens of a prompt by itself, without the one that ends a text."""
    encoding = tokenizer.encode(prompt)
    return len(encoding.ids) - (encoding.special_tokens_mask[-1:] == [1])


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
