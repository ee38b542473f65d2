"""Tokens into text one at a time: characters over several tokens, and stop strings."""

from os.path import commonprefix

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import models
from pbjax.errors import InputError, InputTypeError
from pbjax.inference.generation.prompts import read_messages, read_prompts
from pbjax.inference.generation.text import TextStream
from tests import chats
from tests.cases import examples

BYTES = chats.by_bytes(["<end>"])


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


# Bytes of characters, of parts of them, and of none.
PARTS = st.lists(
    st.sampled_from([*"aé日😀".encode(), 0xE2, 0x82, 0xAC, 0xFF, 0xF0]), min_size=1, max_size=70
)


def ids_of(content):
    """The tokens of bytes, which need be no text."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    names = {byte: chr(byte) for byte in kept} | {b: chr(256 + i) for i, b in enumerate(moved)}
    assert set(names.values()) == set(alphabet)
    return [BYTES.token_to_id(names[byte]) for byte in content]


@settings(max_examples=examples(300))
@given(PARTS, PARTS)
def test_text_has_nothing_of_a_prompt_that_ends_inside_a_character(before, after):
    prompt, new = ids_of(before), ids_of(after)
    made = TextStream(BYTES, prompt, ())
    found = "".join(made.push(token)[0] for token in new)
    old, whole = (bytes(part).decode(errors="replace") for part in (before, before + after))
    expected = whole[len(commonprefix([old, whole])) :]  # noqa: RUF071
    # A character that is still incomplete, or none, at the end is not in the text.
    assert expected.startswith(found)
    assert set(expected[len(found) :]) <= {"\ufffd"}
    assert len(expected) - len(found) <= 3


@pytest.mark.parametrize("stop", ["\ufffd", "so"])
def test_stop_string_is_not_found_in_the_prompt(stop):
    made = TextStream(BYTES, ids_of(b"so: \xe2\x82"), (stop,))
    assert [made.push(token) for token in ids_of(b"\xacb")] == [("€", False), ("b", False)]
    made = TextStream(BYTES, ids_of(b"so: \xe2"), (stop,))
    assert [made.push(token) for token in ids_of(b"ab")] == [("a", False), ("b", False)]


@pytest.mark.parametrize(
    ("text", "begin"),
    [("Hi", 1), ("<s>Hi", 1), ("<s><s>Hi", 2), ("<s>", 1), ("", 1), ("</s>Hi", 1)],
)
def test_text_that_begins_with_the_first_token_does_not_get_another(text, begin):
    ((*found,),) = read_prompts([text], None, chats.tokenizer(), 300).rows
    first = chats.tokenizer().token_to_id("<s>")
    assert found[: begin + 1].count(first) == begin
    assert chats.tokenizer().decode(found, skip_special_tokens=True) == (
        "Hi" if "Hi" in text else ""
    )


CHAT = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("messages", "template", "kind", "message"),
    [
        (CHAT, None, InputError, "no chat template; both are needed"),
        ("Hi", "a", InputTypeError, "a str; a list of messages"),
        ([], "a", InputError, "a conversation has none"),
        ([CHAT, []], "a", InputError, "a conversation has none"),
    ],
)
def test_wrong_messages_are_refused(messages, template, kind, message):
    made = template and models.ChatTemplate(source=template)
    # The bare function: jaxtyping's check of the test run would come before ours.
    plain = getattr(read_messages, "__wrapped__", read_messages)
    with pytest.raises(kind, match=message):
        plain(messages, made, chats.tokenizer(), 300)


def test_several_conversations_are_several_prompts():
    template = models.ChatTemplate(source="{{ bos_token }}<s>{{ messages[0].content }}")
    found = read_messages([CHAT, CHAT], template, chats.tokenizer(), 300)
    assert [chats.tokenizer().decode(row, skip_special_tokens=False) for row in found.rows] == [
        "<s>Hi"
    ] * 2
