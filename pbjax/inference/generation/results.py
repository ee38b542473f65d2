"""The results of generation: single tokens, and whole completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop_token", "stop_string", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One generated token.

    Attributes:
      sequence: Number of the prompt that it continues, from 0.
      token_id: The token.
      log_prob: Its log-probability, in nats, under the model's own distribution: before penalty,
        temperature and filters.
      text: The text that it adds; empty while a character is incomplete or a stop string may have
        begun. None without a tokenizer.
      finish_reason: The reason why the sequence ends with it; None while it goes on.
    """

    sequence: int
    token_id: int
    log_prob: float
    text: str | None
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The continuation of one prompt.

    Attributes:
      token_ids: The tokens, a stop token included.
      log_probs: Their log-probabilities, as in `Token`.
      text: Their text up to the stop token or stop string; None without a tokenizer.
      finish_reason: The reason for its end: a stop token, a stop string, or the allowed length.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    text: str | None
    finish_reason: FinishReason

    @classmethod
    def of(cls, tokens: Sequence[Token]) -> "Completion":
        """Joins the tokens of one sequence, up to the one that ends it."""
        reason = tokens[-1].finish_reason
        if reason is None:
            raise AssertionError("the last token does not end the sequence")
        texts = [token.text for token in tokens if token.text is not None]
        return cls(
            token_ids=tuple(token.token_id for token in tokens),
            log_probs=tuple(token.log_prob for token in tokens),
            text="".join(texts) if texts else None,
            finish_reason=reason,
        )
