"""Plain text of at most 100 columns: tables, wrapped lines, numbers of few digits."""

import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 100


def table_text(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A plain table; the first column is aligned to the left, all others to the right.

    Args:
      title: Line above it.
      columns: Heads.
      rows: Cells; numbers are written with four digits.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(columns), *cells]) for i in range(len(columns))]

    def line(row: Sequence[str]) -> str:
        rest = (f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        return "  ".join((f"{row[0]:{widths[0]}}", *rest)).rstrip()

    rule = "-" * len(line(list(columns)))
    return "\n".join([title, line(list(columns)), rule, *(line(row) for row in cells)])


def count(number: int, noun: str) -> str:
    """A number of things: 1 token, 2 tokens."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return short(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def wrapped(text: str) -> list[str]:
    """A text as lines of at most WIDTH columns."""
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False)


def short(value: int | float) -> str:
    """At most four digits, and a dot or a comma."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) < 0.001:
        return "0.000"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def size(num_bytes: int | float) -> str:
    """Bytes in the unit that leaves the fewest digits."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.1f} {unit}"
    return f"{num_bytes:,.0f} B"
