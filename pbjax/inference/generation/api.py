"""`generate` and `stream`: checks, compiled programs, and the loop that reads their results."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import jax
import numpy as np
import tokenizers

from pbjax.arguments import whole_number, whole_numbers
from pbjax.errors import InputError, InputTypeError, ModelError
from pbjax.graph.functional import shared_method
from pbjax.inference.generation.decoding import (
    CachedDecoder,
    Decoder,
    Rules,
    State,
    advance,
    begin,
    window,
)
from pbjax.inference.generation.prompts import (
    ChatTemplate,
    Messages,
    Prompts,
    bucket,
    read_messages,
    read_prompts,
)
from pbjax.inference.generation.results import Completion, FinishReason, Token
from pbjax.inference.generation.sampling import Sampling, settings_of
from pbjax.inference.generation.text import TextStream, check_stop_strings
from pbjax.runtime.program_cache import keep_programs

# Tokens between two searches for stop strings where the text is not streamed.
CHUNK = 16
METHODS = ("empty_cache", "prefill", "decode")

type PromptRows = str | Sequence[str] | Sequence[Sequence[int]] | np.ndarray
type Seeds = SupportsIndex | Sequence[SupportsIndex] | np.ndarray
type TokenIds = Collection[SupportsIndex] | np.ndarray
type MaskRows = np.ndarray | Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One checked call."""

    model: CachedDecoder
    prompts: Prompts
    max_new_tokens: int
    max_seq_len: int | None
    sampling: Sampling
    rules: Rules
    tokenizer: tokenizers.Tokenizer | None
    stop_strings: tuple[str, ...]


def generate(
    model: CachedDecoder,
    prompts: PromptRows | None = None,
    *,
    max_new_tokens: SupportsIndex,
    messages: Messages | Sequence[Messages] | None = None,
    chat_template: ChatTemplate | None = None,
    attention_mask: MaskRows | None = None,
    tokenizer: tokenizers.Tokenizer | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: Seeds = 0,
    stop_tokens: TokenIds = (),
    stop_strings: Sequence[str] = (),
) -> list[Completion]:
    """Continues prompts.

    A continuation depends on its own prompt, settings and seed, not on its neighbours or padding.
    Arrays have sizes from a short list (16, 32, 56, 88 and so on), so that another call of the same
    batch size and a similar length compiles nothing.

    Args:
      model: A decoder with `empty_cache`, `prefill`, `decode`, `vocab_size` and `max_seq_len`, such
        as the GPT-2, BLOOM and LLaMA of `models`.
      prompts: A text, texts, rows of token ids, or an array of them.
      max_new_tokens: Tokens to generate for each prompt at most.
      messages: In place of prompts, a conversation or several: lists of mappings such as
        {"role": "user", "content": "Hello"}; the model answers.
      chat_template: From `models.load_chat_template`; needed for messages.
      attention_mask: 1 for tokens, 0 for padding on the left, on the right or both.
      tokenizer: From `models.load_tokenizer`; needed for texts and stop strings.
      temperature: Divisor of the scores; 0 takes the best token each time.
      top_k: How many of the best tokens may be drawn; None = all.
      top_p: Draws from the fewest best tokens that have this probability together.
      min_p: Draws from the tokens that have this share of the best one's probability.
      repetition_penalty: Makes tokens that occurred already, in the prompt too, less likely.
      seed: Seed of the random numbers of each sequence; one number means seed, seed + 1 and so on.
      stop_tokens: Tokens that end a sequence, such as `models.load_stop_tokens(FOLDER)`.
      stop_strings: Texts that end a sequence when it contains one.

    Returns:
      One completion for each prompt, in their order.

    Raises:
      InputError: An argument has a value that is not allowed, or a prompt and its continuation are
        longer than the model's positions.
      InputTypeError: The model is no such decoder, or prompts or tokenizer are of another type.
      ModelError: The model gave scores that are not numbers.
    """
    request = _request(
        model,
        _prompts(model, prompts, attention_mask, messages, chat_template, tokenizer),
        max_new_tokens=max_new_tokens,
        sampling=Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
        ),
        tokenizer=tokenizer,
        seed=seed,
        stop_tokens=stop_tokens,
        stop_strings=stop_strings,
    )
    found = [[] for _ in request.prompts.rows]
    for token in _run(request, CHUNK if request.stop_strings else request.max_new_tokens):
        found[token.sequence].append(token)
    return [Completion.of(tokens) for tokens in found]


def stream(
    model: CachedDecoder,
    prompts: PromptRows | None = None,
    *,
    max_new_tokens: SupportsIndex,
    messages: Messages | Sequence[Messages] | None = None,
    chat_template: ChatTemplate | None = None,
    attention_mask: MaskRows | None = None,
    tokenizer: tokenizers.Tokenizer | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: Seeds = 0,
    stop_tokens: TokenIds = (),
    stop_strings: Sequence[str] = (),
) -> Iterator[Token]:
    """Continues prompts and yields each token as soon as it is known.

    The tokens are those of `generate` with the same arguments, made by the same compiled programs.
    Errors of arguments are raised by the call, before the first token is asked for.

    Yields:
      The tokens of each step in the order of the prompts.
    """
    request = _request(
        model,
        _prompts(model, prompts, attention_mask, messages, chat_template, tokenizer),
        max_new_tokens=max_new_tokens,
        sampling=Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
        ),
        tokenizer=tokenizer,
        seed=seed,
        stop_tokens=stop_tokens,
        stop_strings=stop_strings,
    )
    return _run(request, 1)


def _prompts(
    model: CachedDecoder,
    prompts: PromptRows | None,
    attention_mask: MaskRows | None,
    messages: Messages | Sequence[Messages] | None,
    chat_template: ChatTemplate | None,
    tokenizer: tokenizers.Tokenizer | None,
) -> Prompts:
    vocab_size = _vocab_size(model)
    if (prompts is None) == (messages is None):
        raise InputError(
            "generate(): prompts and messages are both given or both absent; one of them is needed;"
            " pass prompts, or messages= with chat_template="
        )
    if prompts is not None:
        return read_prompts(prompts, attention_mask, tokenizer, vocab_size)
    if attention_mask is not None:
        raise InputError(
            "generate(attention_mask): there are messages; a mask is for token ids; leave it out"
        )
    assert messages is not None
    return read_messages(messages, chat_template, tokenizer, vocab_size)


def _vocab_size(model: CachedDecoder) -> int:
    needed = (*METHODS, "vocab_size", "max_seq_len")
    if lacking := [name for name in needed if not hasattr(model, name)]:
        raise InputTypeError(
            f"generate(model): a {type(model).__name__}, which has no {', '.join(lacking)}; a "
            "decoder with a KV cache is needed; load a GPT-2, BLOOM or LLaMA"
        )
    return model.vocab_size


def _request(
    model: CachedDecoder,
    prompts: Prompts,
    *,
    max_new_tokens: SupportsIndex,
    sampling: Sampling,
    tokenizer: tokenizers.Tokenizer | None,
    seed: Seeds,
    stop_tokens: TokenIds,
    stop_strings: Sequence[str],
) -> Request:
    max_new_tokens = whole_number("generate(max_new_tokens)", max_new_tokens)
    stop_tokens = whole_numbers("generate(stop_tokens)", stop_tokens)
    if max_new_tokens < 1:
        raise InputError(
            f"generate(max_new_tokens={max_new_tokens}): nothing to generate; 1 or more are "
            "allowed; raise it"
        )
    vocab_size, limit = model.vocab_size, model.max_seq_len
    if limit is not None and prompts.longest + max_new_tokens > limit:
        raise InputError(
            f"generate(max_new_tokens={max_new_tokens}): with a prompt of {prompts.longest} tokens "
            f"that makes {prompts.longest + max_new_tokens}; the model has {limit} positions; "
            "shorten the prompt or generate fewer"
        )
    if bad := [token for token in stop_tokens if not 0 <= token < vocab_size]:
        raise InputError(
            f"generate(stop_tokens): token {bad[0]} among them; 0 to {vocab_size - 1} are in the "
            "vocabulary; use ids of the model's own tokenizer"
        )
    batch_size = len(prompts.rows)
    rules = Rules(
        settings=settings_of(sampling, batch_size, vocab_size),
        seeds=_seeds(seed, batch_size),
        stop_tokens=np.array([*stop_tokens] or [-1], np.int32),
    )
    return Request(
        model=model,
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        max_seq_len=limit,
        sampling=sampling,
        rules=rules,
        tokenizer=tokenizer,
        stop_strings=check_stop_strings(stop_strings, tokenizer),
    )


def _seeds(seed: Seeds, batch_size: int) -> np.ndarray:
    if isinstance(seed, Sequence) or getattr(seed, "ndim", 0) > 0:
        seeds = whole_numbers("generate(seed)", seed)
    else:
        first = whole_number("generate(seed)", seed)
        seeds = [first + index for index in range(batch_size)]
    if len(seeds) != batch_size:
        raise InputError(
            f"generate(seed): {len(seeds)} seeds for {batch_size} prompts; one number, or one for "
            "each prompt, is allowed; correct them"
        )
    if bad := [value for value in seeds if not 0 <= value < 2**32]:
        raise InputError(
            f"generate(seed): {bad[0]} among them; 0 to {2**32 - 1} are allowed; choose another"
        )
    return np.array(seeds, np.uint32)


def _run(request: Request, chunk: int) -> Iterator[Token]:
    """Runs the programs, `chunk` tokens in a call, and yields the tokens."""
    keep_programs()
    methods = {name: shared_method(request.model, name) for name in METHODS}
    decoder = Decoder(**{name: method.apply for name, method in methods.items()})
    weights = methods["decode"].params
    prompts, last = request.prompts, request.max_new_tokens
    given = {"decoder": decoder, "static": request.sampling.static}
    cache, state = begin(
        weights,
        prompts.padded(bucket(prompts.longest, request.max_seq_len)),
        prompts.lengths,
        request.rules,
        num_keys=bucket(prompts.longest + last, request.max_seq_len),
        **given,
    )
    reader = Reader(request)
    # Read at once, so that the first token does not wait for the second program's compilation.
    yield from reader.read(state)
    unread, limit = None, 1
    while limit < last and not reader.done.all():
        limit = min(limit + chunk, last)
        # A call returns at once: tokens are read while the next ones are computed.
        stopped = reader.done.copy()
        cache, state = advance(
            weights, cache, state, stopped, np.int32(limit), request.rules, **given
        )
        if unread is not None:
            yield from reader.read(unread)
        unread = state
    if unread is not None:
        yield from reader.read(unread)


class Reader:
    """Reads the tokens of states and keeps track of the sequences that have ended."""

    def __init__(self, request: Request) -> None:
        """Starts without tokens."""
        self._request = request
        rows = request.prompts.rows
        self.done = np.zeros(len(rows), bool)
        self._read = 0
        self._stop_tokens = set(request.rules.stop_tokens.tolist())
        tokenizer = request.tokenizer
        self._texts = (
            None
            if tokenizer is None
            else [TextStream(tokenizer, row, request.stop_strings) for row in rows]
        )

    def read(self, state: State) -> Iterator[Token]:
        """Yields the new tokens of a state, step by step."""
        start, step = self._read, int(state.step)
        self._read = step
        first, arrays = 0, (state.tokens, state.log_probs)
        if step - start <= CHUNK < state.tokens.shape[1]:
            # All columns would be far more bytes than the new tokens.
            first = min(start, state.tokens.shape[1] - CHUNK)
            arrays = window(state, np.int32(first), width=CHUNK)
        tokens, log_probs = jax.device_get(arrays)
        for index in range(start, step):
            for row in np.flatnonzero(~self.done):
                place = row, index - first
                yield self._token(int(row), index + 1, int(tokens[place]), log_probs[place])

    def _token(self, row: int, count: int, token_id: int, log_prob: np.float32) -> Token:
        if np.isnan(log_prob):
            raise ModelError(
                f"generate(): the scores of token {count} after prompt {row} are not numbers; "
                "finite scores are needed; load the model with a wider dtype, or check its weights"
            )
        reason: FinishReason | None = None
        if token_id in self._stop_tokens:
            reason = "stop_token"
        elif count == self._request.max_new_tokens:
            reason = "length"
        text = None
        if self._texts is not None:
            text, found = "", False
            if reason != "stop_token":
                text, found = self._texts[row].push(token_id)
            if found:
                reason = "stop_string"
            elif reason is not None:
                text += self._texts[row].finish()
        self.done[row] = reason is not None
        return Token(
            sequence=row,
            token_id=token_id,
            log_prob=float(log_prob),
            text=text,
            finish_reason=reason,
        )
