"""Turns tokens into text one at a time: only whole characters, and nothing of a stop string."""

from collections.abc import Collection, Sequence

import tokenizers

from pbjax.errors import InputError, InputTypeError

# Decoders write it for bytes that are no character, at most one for each byte, ...
REPLACEMENT = "\ufffd"
# ... of which a character has this many before its last one.
UNFINISHED = 3
# Tokens before the new ones that decoding them may depend on.
CONTEXT = 32


class TextStream:
    """The text of one sequence while it grows."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, prompt: Sequence[int], stop_strings: tuple[str, ...]
    ) -> None:
        """Starts after a prompt, on which the first character may depend.

        A character that the prompt begins and the new tokens complete belongs to the new text.
        """
        self._tokenizer, self._stop_strings = tokenizer, stop_strings
        self._ids = list(prompt)[-CONTEXT:]
        self._known = self._decoded()
        self._held = ""

    def push(self, token_id: int) -> tuple[str, bool]:
        """Takes a token.

        Returns:
          The text that is certain now, and whether a stop string ends it.
        """
        self._held += self._grown(token_id)
        places = [self._held.find(stop) for stop in self._stop_strings]
        if found := [place for place in places if place >= 0]:
            text, self._held = self._held[: min(found)], ""
            return text, True
        cut = len(self._held) - self._possible_stop()
        text, self._held = self._held[:cut], self._held[cut:]
        return text, False

    def finish(self) -> str:
        """Returns the text that was held back because a stop string might have begun."""
        text, self._held = self._held, ""
        return text

    def _grown(self, token_id: int) -> str:
        """The whole characters that a token adds to the text that is known."""
        self._ids.append(token_id)
        whole = self._decoded()
        end = len(whole)
        while end > max(0, len(whole) - UNFINISHED) and whole[end - 1] == REPLACEMENT:
            end -= 1
        new = whole[_shared(self._known, whole[:end]) : end]
        if new:
            self._known = whole[:end]
        if end == len(whole) and len(self._ids) > 2 * CONTEXT:
            self._ids = self._ids[-CONTEXT:]
            self._known = self._decoded()
        return new

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=True)

    def _possible_stop(self) -> int:
        """How many characters at the end may begin a stop string."""
        longest = max(map(len, self._stop_strings), default=1) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in self._stop_strings):
                return count
        return 0


def _shared(one: str, other: str) -> int:
    """How many characters two texts have in common at their start."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((count for count, (a, b) in pairs if a != b), min(len(one), len(other)))


def check_stop_strings(
    stop_strings: Sequence[str], tokenizer: tokenizers.Tokenizer | None
) -> tuple[str, ...]:
    """Returns checked stop strings as a tuple.

    Raises:
      InputError: There is no tokenizer, one is empty, or they are a single string.
      InputTypeError: They are not texts.
    """
    texts = stop_strings if isinstance(stop_strings, Collection) else ()
    if texts is not stop_strings or not all(isinstance(text, str) for text in texts):
        raise InputTypeError(
            f"generate(stop_strings={stop_strings!r}): of type {type(stop_strings).__name__}; "
            "several texts are allowed; write for instance stop_strings=['\\n\\n']"
        )
    if isinstance(stop_strings, str) or "" in stop_strings:
        raise InputError(
            f"generate(stop_strings={stop_strings!r}): a single text, or an empty one; a sequence "
            "of non-empty texts is allowed; write for instance stop_strings=['\\n\\n']"
        )
    if stop_strings and tokenizer is None:
        raise InputError(
            f"generate(stop_strings={list(stop_strings)}): there is no tokenizer; only texts can "
            "be searched; pass tokenizer=models.load_tokenizer(FOLDER), or stop_tokens"
        )
    return tuple(stop_strings)
