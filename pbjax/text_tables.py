"""Plain text for a terminal of 100 columns: tables, wrapped lines, numbers of few digits.

The only place that lays out a table; nothing here needs jax or a terminal.
"""

import textwrap
import unicodedata
from collections.abc import Collection, Iterable, Sequence

WIDTH = 100


def table_text(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    left: Collection[str] = (),
) -> str:
    """A plain table: the first column is aligned to the left, the others to the right.

    Args:
      title: The line above the table; no line if it is empty.
      columns: The heads.
      rows: The cells of each row; numbers are written with four digits at most.
      left: Heads of further columns that are aligned to the left.

    Returns:
      Lines without spaces at their ends.
    """
    lines = [list(columns), *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    sides = ["<" if i == 0 or head in left else ">" for i, head in enumerate(columns)]

    def line(cells: Sequence[str]) -> str:
        aligned = zip(cells, sides, widths, strict=True)
        return "  ".join(f"{cell:{side}{width}}" for cell, side, width in aligned).rstrip()

    head, *body = map(line, lines)
    return "\n".join([*filter(None, [title]), head, "-" * len(head), *body])


def count(number: int, noun: str) -> str:
    """A count and its noun in the singular or plural: 1 token, 2 tokens."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return short(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def printable(text: str, keep: str = "") -> str:
    """A text whose control characters, which could command a terminal, are written as escapes.

    Args:
      text: A text of any origin.
      keep: Control characters that stay, such as line feeds.
    """
    return "".join(
        character
        if character in keep or unicodedata.category(character) != "Cc"
        # repr writes "\\x1b", in quotes
        else repr(character)[1:-1]
        for character in text
    )


def wrapped(text: str) -> list[str]:
    """The lines of a text, of at most WIDTH columns; words are never broken."""
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False)


def short(value: int | float) -> str:
    """A number in four digits; whole, and with commas, from 1,000 on."""
    if value == 0:
        return "0"
    if abs(value) >= 999.95:
        return f"{value:,.0f}"
    if abs(value) < 0.001:
        return "0.000"
    return f"{value:.3f}" if abs(value) < 9.9995 else f"{value:.1f}"


def size(num_bytes: int | float) -> str:
    """A number of bytes with its unit: B, kB, MB or GB, powers of 1,000."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.1f} {unit}"
    return f"{num_bytes:,.0f} B"
