"""The two compiled programs of a run: prompts into a cache and a first token, then more tokens.

The second one is a loop on the device up to a limit that is an input, so that the same program
makes one token for a stream or all of them at once. The cache is donated from call to call; the
small arrays beside it are not, so that they can be read while the next call runs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from pbjax.inference.generation.sampling import Settings, StaticSettings, choose, keys_of


@runtime_checkable
class CachedDecoder(Protocol):
    """An nnx module that predicts tokens over a KV cache.

    The cache is any tree of arrays with the batch as first axis; outputs have `logits` (B, T, V)
    and `cache`.
    """

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        ...

    @property
    def max_seq_len(self) -> int | None:
        """The longest sequence; None = any."""
        ...

    def empty_cache(self, batch_size: int, num_keys: int) -> object:
        """Returns a cache without tokens."""
        ...

    # Its other methods are called by name as functions of the weights: see Decoder.


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A decoder as functions of its weights, the same objects for decoders of the same structure.

    Attributes:
      empty_cache: Turns (weights, batch size, tokens of a sequence) into a cache.
      prefill: Turns (weights, prompts, lengths, cache) into logits and cache.
      decode: Turns (weights, tokens, cache) into logits and cache.
    """

    empty_cache: Callable
    prefill: Callable
    decode: Callable


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules for choosing tokens, with one row for each sequence.

    Attributes:
      settings: Settings of the choice.
      seeds: Seeds of the random numbers.
      stop_tokens: Tokens that end any sequence; -1 means none.
    """

    settings: Settings
    seeds: UInt32[Array | np.ndarray, " B"]
    stop_tokens: Int[Array | np.ndarray, " stops"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The tokens generated so far.

    Attributes:
      tokens: At [b, i] token i of sequence b; undefined after the sequence has ended.
      log_probs: Log-probabilities of the tokens under the model's own distribution.
      done: Whether each sequence has ended.
      seen: Whether each sequence has each token, its prompt included; None where it is not needed.
      step: Number of tokens of a sequence that has not ended.
    """

    tokens: Int[Array, "B S"]
    log_probs: Float[Array, "B S"]
    done: Bool[Array, " B"]
    seen: Bool[Array, "B V"] | None
    step: Int[Array, ""]


@partial(jax.jit, static_argnames=("decoder", "num_keys", "static"))
def begin(
    weights: object,
    prompts: Int[Array | np.ndarray, "B T"],
    lengths: Int[Array | np.ndarray, " B"],
    rules: Rules,
    *,
    decoder: Decoder,
    num_keys: int,
    static: StaticSettings,
) -> tuple[object, State]:
    """Runs the prompts and chooses the first token of each sequence.

    Args:
      weights: Weights of the decoder.
      prompts: Tokens, padded on the right.
      lengths: Number of tokens of each row.
      rules: Rules of the choice.
      decoder: The decoder's functions.
      num_keys: Tokens of a sequence that the cache has room for.
      static: The compiled part of the rules.

    Returns:
      The cache and the state.
    """
    batch_size = prompts.shape[0]
    cache = decoder.empty_cache(weights, batch_size, num_keys)
    output = decoder.prefill(weights, prompts, lengths, cache)
    logits = output.logits[:, 0].astype(jnp.float32)
    state = State(
        tokens=jnp.zeros((batch_size, num_keys), jnp.int32),
        log_probs=jnp.zeros((batch_size, num_keys), jnp.float32),
        done=jnp.zeros(batch_size, bool),
        seen=_seen(prompts, lengths, logits.shape[1]) if static.penalises else None,
        step=jnp.int32(0),
    )
    return output.cache, _extend(state, logits, rules, static)


@partial(jax.jit, static_argnames=("decoder", "static"), donate_argnames=("cache",))
def advance(
    weights: object,
    cache: object,
    state: State,
    stopped: Bool[Array | np.ndarray, " B"],
    limit: Int[Array, ""] | np.int32,
    rules: Rules,
    *,
    decoder: Decoder,
    static: StaticSettings,
) -> tuple[object, State]:
    """Generates until each sequence has ended or has `limit` tokens.

    Args:
      weights: Weights of the decoder.
      cache: The cache, which is donated and returned with more tokens.
      state: The tokens generated so far.
      stopped: Whether each sequence ends here for a reason unknown to the device.
      limit: Most tokens of a sequence.
      rules: Rules of the choice.
      decoder: The decoder's functions.
      static: The compiled part of the rules.

    Returns:
      The cache and the state.
    """

    def unfinished(carry):
        _, state = carry
        return (state.step < limit) & ~state.done.all()

    def step(carry):
        cache, state = carry
        last = jax.lax.dynamic_slice_in_dim(state.tokens, state.step - 1, 1, axis=1)
        output = decoder.decode(weights, last, cache)
        logits = output.logits[:, 0].astype(jnp.float32)
        return output.cache, _extend(state, logits, rules, static)

    start = replace(state, done=state.done | stopped)
    return jax.lax.while_loop(unfinished, step, (cache, start))


@partial(jax.jit, static_argnames="width")
def window(
    state: State, start: Int[Array, ""] | np.int32, *, width: int
) -> tuple[Int[Array, "B width"], Float[Array, "B width"]]:
    """Returns some columns of tokens and log-probabilities."""
    part = partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=width, axis=1)
    return part(state.tokens), part(state.log_probs)


def _extend(
    state: State, logits: Float[Array, "B V"], rules: Rules, static: StaticSettings
) -> State:
    """The state with one more token for each sequence that has not ended."""
    with jax.named_scope("sampling"):
        keys = keys_of(rules.seeds, state.step)
        tokens = choose(logits, state.seen, rules.settings, keys, static)
        chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
        log_probs = chosen - jax.nn.logsumexp(logits, axis=1)
        seen = state.seen
        if seen is not None:
            seen = jax.vmap(lambda row, token: row.at[token].set(True))(seen, tokens)
        stops = (tokens[:, None] == rules.stop_tokens[None, :]).any(axis=1)
        return State(
            tokens=_put(state.tokens, tokens, state.step),
            log_probs=_put(state.log_probs, log_probs, state.step),
            done=state.done | stops,
            seen=seen,
            step=state.step + 1,
        )


def _put(held: Array, column: Array, index: Array) -> Array:
    return jax.lax.dynamic_update_slice(held, column[:, None], (0, index))


def _seen(prompts, lengths, vocab_size: int) -> Bool[Array, "B V"]:
    columns = jnp.arange(prompts.shape[1], dtype=jnp.int32)[None, :]
    # Padding becomes an id outside the vocabulary, which is dropped.
    ids = jnp.where(columns < lengths[:, None], prompts, vocab_size)
    empty = jnp.zeros((prompts.shape[0], vocab_size), bool)
    return jax.vmap(lambda row, tokens: row.at[tokens].set(True, mode="drop"))(empty, ids)
