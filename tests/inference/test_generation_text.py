"""Tokens into text one at a time: characters over several tokens, and stop strings."""

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from pbjax.inference.generation.text import TextStream
from tests.cases import examples


def by_bytes():
    """A tokenizer with one token a byte, as the last resort of GPT-2's and LLaMA 3's."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return made


BYTES = by_bytes()


def stream(text, stops=(), prompt="so: "):
    """The pieces that a text comes in, a token at a time, and whether a stop string came."""
    made = TextStream(BYTES, BYTES.encode(prompt).ids, tuple(stops))
    pieces = []
    for token in BYTES.encode(text).ids:
        piece, stopped = made.push(token)
        pieces.append(piece)
        if stopped:
            return pieces, True
    return [*pieces, made.finish()], False


def test_character_of_several_tokens_comes_whole():
    pieces, _ = stream("a😀é")
    assert [piece for piece in pieces if piece] == ["a", "😀", "é"]


def test_special_token_is_no_text():
    assert "".join(stream("a<end>b")[0]) == "ab"


def test_what_may_begin_a_stop_string_is_held_back():
    pieces, stopped = stream("no: nothing", ["nobody"])
    assert not stopped
    assert pieces[:3] == ["", "", "no:"]
    assert "".join(pieces) == "no: nothing"


def test_held_text_comes_at_the_end():
    pieces, stopped = stream("yes no", ["nobody"])
    assert pieces[-1] == "no"
    assert not stopped


def test_text_ends_before_the_first_stop_string():
    assert "".join(stream("one two three", ["three", "two"])[0]) == "one "
    assert stream("one two", ["one"]) == (["", "", ""], True)


@settings(max_examples=examples(100))
@given(
    st.text("abc é", max_size=12), st.lists(st.text("abc é", min_size=1, max_size=3), max_size=3)
)
def test_streamed_text_is_the_text_up_to_the_first_stop_string(text, stops):
    pieces, stopped = stream(text, stops)
    found = "".join(pieces)
    places = [text.index(stop) for stop in stops if stop in text]
    assert stopped == bool(places)
    if not places:
        assert found == text
        return
    # The first to be complete ends the text; of several that end there, the one that begins first.
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    begins = [text[: min(ends)].find(stop) for stop in stops]
    assert found == text[: min(begin for begin in begins if begin >= 0)]
