"""Chooses the next token from scores: penalty, temperature, filters, draw.

The order is Hugging Face's: repetition penalty, temperature, top-k, top-p, min-p. Each filter
keeps the tokens whose score reaches a threshold, so that tokens of equal scores are kept or dropped
together. Not here: when to stop.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from pbjax.arguments import number, whole_number
from pbjax.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings of one sequence.

    Attributes:
      temperature: Divisor of the scores; 0 takes the best token.
      top_k: How many of the best tokens may be drawn; None = all.
      top_p: Least total probability of the tokens that may be drawn.
      min_p: Least probability of a token that may be drawn, as a share of the best one's.
      repetition_penalty: Divisor of positive scores, and factor of negative ones, of tokens that
        occurred already; 1 = none.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        """Takes numbers of any library; raises unless every setting is a number in its range."""
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            object.__setattr__(self, name, number(f"generate({name})", getattr(self, name)))
        if self.top_k is not None:
            object.__setattr__(self, "top_k", whole_number("generate(top_k)", self.top_k))
        self._require("temperature", 0 <= self.temperature < math.inf, "0 or a positive number")
        self._require("top_k", self.top_k is None or self.top_k >= 1, "1 or more, or None")
        self._require("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        self._require("min_p", 0 <= self.min_p <= 1, "0 to 1")
        penalty = self.repetition_penalty
        self._require("repetition_penalty", 0 < penalty < math.inf, "a positive number")
        if self.temperature == 0 and self.filters:
            raise InputError(
                f"generate(temperature={self.temperature}): the best token is taken, which "
                "top_k, top_p and min_p cannot change; they are allowed with temperatures above 0; "
                "raise temperature or leave them out"
            )

    def _require(self, name: str, fulfilled: bool, allowed: str) -> None:
        if not fulfilled:
            raise InputError(
                f"generate({name}={getattr(self, name)}): out of range; {allowed} is allowed; "
                f"correct {name}"
            )

    @property
    def filters(self) -> bool:
        """Whether some tokens may not be drawn."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0

    @property
    def static(self) -> "StaticSettings":
        """The part of the settings that is compiled."""
        return StaticSettings(
            draws=self.temperature > 0,
            sorts=self.top_k is not None or self.top_p < 1,
            penalises=self.repetition_penalty != 1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticSettings:
    """The part of the settings that is compiled; the others are inputs.

    Attributes:
      draws: Whether tokens are drawn at all.
      sorts: Whether scores must be sorted, for top-k or top-p.
      penalises: Whether the tokens that occurred must be remembered.
    """

    draws: bool
    sorts: bool
    penalises: bool


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of every sequence as arrays; see `Sampling`. A top_k of vocab_size means all."""

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    repetition_penalty: Float[Array, " B"]


def settings_of(sampling: Sampling, batch_size: int, vocab_size: int) -> Settings:
    """Returns the same settings for every sequence of a batch."""

    def everywhere(value: float | int, dtype: type = np.float32) -> Array:
        return jnp.asarray(np.full(batch_size, value, dtype))

    return Settings(
        temperature=everywhere(sampling.temperature),
        top_k=everywhere(min(sampling.top_k or vocab_size, vocab_size), np.int32),
        top_p=everywhere(sampling.top_p),
        min_p=everywhere(sampling.min_p),
        repetition_penalty=everywhere(sampling.repetition_penalty),
    )


def penalise(
    scores: Float[Array, "B V"], seen: Bool[Array, "B V"], penalty: Float[Array, " B"]
) -> Float[Array, "B V"]:
    """Makes the tokens that occurred already less likely.

    Source: Keskar et al. 2019 (CTRL), section 4.1; negative scores as in Hugging Face.
    """
    penalty = jnp.broadcast_to(penalty[:, None], scores.shape)
    return jnp.where(seen, jnp.where(scores > 0, scores / penalty, scores * penalty), scores)


def keep_likely(
    scores: Float[Array, "B V"], settings: Settings, *, sorts: bool
) -> Float[Array, "B V"]:
    """Sets the scores of tokens that may not be drawn to -inf.

    Args:
      scores: Scores divided by the temperature.
      settings: top_k, top_p and min_p of each row.
      sorts: Whether top_k or top_p of any row excludes a token.

    Source: Fan et al. 2018 (top-k), Holtzman et al. 2020 (top-p), Nguyen et al. 2024 (min-p).
    """
    threshold = scores.max(axis=1) + jnp.log(settings.min_p)
    if sorts:
        ranked = -jnp.sort(-scores, axis=1)
        kth = jnp.take_along_axis(ranked, settings.top_k[:, None] - 1, axis=1)
        ranked = jnp.where(ranked >= kth, ranked, -jnp.inf)
        # A token stays if the better ones have less than top_p together. The best always stays,
        # even where float32 rounds top_p to 0.
        probabilities = jax.nn.softmax(ranked, axis=1)
        before = jnp.cumsum(probabilities, axis=1) - probabilities
        count = jnp.sum(before < settings.top_p[:, None], axis=1, keepdims=True)
        last = jnp.take_along_axis(ranked, jnp.maximum(count, 1) - 1, axis=1)
        threshold = jnp.maximum(threshold, jnp.maximum(kth, last)[:, 0])
    return jnp.where(scores >= threshold[:, None], scores, -jnp.inf)


def choose(
    scores: Float[Array, "B V"],
    seen: Bool[Array, "B V"] | None,
    settings: Settings,
    keys: Key[Array, " B"],
    static: StaticSettings,
) -> Int[Array, " B"]:
    """Chooses a token for every row, by its own key and settings alone.

    Args:
      scores: The model's scores in f32.
      seen: Whether each token occurred already; None unless `static` penalises.
      settings: Settings of each row.
      keys: Random key of each row.
      static: The compiled part of the settings.
    """
    if seen is not None:
        scores = penalise(scores, seen, settings.repetition_penalty)
    best = jnp.argmax(scores, axis=1).astype(jnp.int32)
    if not static.draws:
        return best
    greedy = settings.temperature == 0
    scaled = scores / jnp.where(greedy, 1.0, settings.temperature)[:, None]
    kept = keep_likely(scaled, settings, sorts=static.sorts)
    drawn = jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)
    return jnp.where(greedy, best, drawn)


def keys_of(seeds: UInt32[Array | np.ndarray, " B"], step: Int[Array, ""]) -> Key[Array, " B"]:
    """Returns the random key of each sequence's token number `step`."""
    return jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), step))(seeds)
