"""Text for a terminal, to the letter: tables, wrapped lines, numbers, sizes."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbjax.text_tables import WIDTH, count, short, size, table_text, wrapped


def lines(*expected):
    return "\n".join(expected)


def test_first_column_is_left_and_the_others_are_right():
    rows = [("attention", 12.34, "TENSOR"), ("norm", 1234, "-")]
    assert table_text("stages", ("stage", "ms", "class"), rows) == lines(
        "stages",
        "stage         ms   class",
        "------------------------",
        "attention   12.3  TENSOR",
        "norm       1,234       -",
    )


def test_named_columns_are_left_too_and_no_line_ends_in_spaces():
    rows = [("a", "bb", "c"), ("aa", "b", "ccc")]
    assert table_text("", ("x", "y", "last"), rows, left=("y", "last")) == lines(
        "x   y   last",
        "------------",
        "a   bb  c",
        "aa  b   ccc",
    )


def test_heads_wider_than_their_cells_keep_their_width():
    assert table_text("t", ("", "tokens/s"), [("a", "1")]) == lines(
        "t",
        "   tokens/s",
        "-----------",
        "a         1",
    )


def test_a_last_column_without_a_head_is_not_ruled():
    assert table_text("t", ("size", "ms", ""), [("8", "1.0", "best")]) == lines(
        "t",
        "size   ms",
        "---------",
        "8     1.0  best",
    )


def test_a_table_without_rows_has_its_heads():
    assert table_text("t", ("a", "b"), []) == lines("t", "a  b", "----")


def test_cells_are_written_by_their_type():
    row = ("float", 0.5, 12345, True, None)
    assert table_text("", tuple("abcde"), [row]).splitlines()[-1].split() == [
        "float",
        "0.500",
        "12,345",
        "True",
        "None",
    ]


def test_rows_may_be_an_iterator():
    assert table_text("", ("a",), iter([("b",), ("c",)])) == lines("a", "-", "b", "c")


@pytest.mark.parametrize("row", [("a",), ("a", "b", "c")])
def test_a_row_of_another_length_is_refused(row):
    with pytest.raises(ValueError, match="zip"):
        table_text("t", ("x", "y"), [row])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0, "0"),
        (0.0009, "0.000"),
        (-0.0009, "0.000"),
        (0.001, "0.001"),
        (7, "7.000"),
        (9.9994, "9.999"),
        (9.9996, "10.0"),
        (10, "10.0"),
        (-12.34, "-12.3"),
        (999.94, "999.9"),
        (999.96, "1,000"),
        (1000, "1,000"),
        (-1234.5, "-1,234"),
        (1234567.8, "1,234,568"),
    ],
)
def test_numbers_have_four_digits_and_thousands_have_commas(value, text):
    assert short(value) == text


@given(st.floats(-9999.4, 9999.4))
def test_no_number_below_ten_thousand_has_more_than_four_digits(value):
    assert sum(letter.isdigit() for letter in short(value)) <= 4


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 tokens"), (1, "1 token"), (2, "2 tokens"), (1000, "1,000 tokens")],
)
def test_one_is_singular(number, text):
    assert count(number, "token") == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (1_000_000, "1.0 MB"),
        (1_550_000, "1.6 MB"),
        (1_000_000_000, "1.0 GB"),
        (1.5e12, "1,500.0 GB"),
    ],
)
def test_bytes_have_the_largest_unit_that_they_fill(num_bytes, text):
    assert size(num_bytes) == text


def test_lines_are_wrapped_at_the_page_and_continue_indented():
    text = " ".join(["word"] * 25)
    assert wrapped(text) == [" ".join(["word"] * 20), "  " + " ".join(["word"] * 5)]
    assert len(wrapped(text)[0]) == WIDTH - 1


def test_a_line_may_fill_the_page():
    text = "x" * 49 + " " + "y" * 50
    assert wrapped(text) == [text]
    assert wrapped(text + "y") == ["x" * 49, "  " + "y" * 51]


def test_words_are_not_broken():
    path = "a" * (WIDTH + 20)
    assert wrapped(f"see {path} for more") == ["see", f"  {path}", "  for more"]


def test_an_empty_text_has_no_lines():
    assert wrapped("") == []


def test_the_module_needs_neither_jax_nor_rich():
    code = "import sys, pbjax.text_tables; print({'jax', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
