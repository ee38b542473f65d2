"""Packs sequences of different lengths end to end into rows of one length, with little padding.

Pure: no jax, and no model. An encoder whose tokens see only those of their own sequence, by the
segment ids, then computes only on the padding at the ends of rows. The rows are filled best fit,
longest sequence first.

Source: Johnson 1973 (bin packing); Krell et al. 2021, section 3 (for encoders).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Int

from pbjax.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Some rows of a packing, as arrays.

    Attributes:
      input_ids: Tokens; 0 where there is none.
      segment_ids: Number of a token's sequence in its row, from 1 on; 0 where there is none.
      position_ids: Position of a token in its sequence.
      offsets: Start of each sequence, and of the empty end of each row, among the tokens of all
        rows; the remaining entries are the number of these tokens.
    """

    input_ids: Int[np.ndarray, "R L"]
    segment_ids: Int[np.ndarray, "R L"]
    position_ids: Int[np.ndarray, "R L"]
    offsets: Int[np.ndarray, " C"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The sequences of each row.

    Attributes:
      row_length: Tokens of a row.
      lengths: Tokens of each sequence.
      rows: The sequences of each row by index, in order. Empty sequences are in no row.
    """

    row_length: int
    lengths: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]

    @property
    def most_segments(self) -> int:
        """The most sequences of any row."""
        return max(map(len, self.rows), default=0)

    @property
    def filled(self) -> float:
        """Share of all places that hold a token; 1 for no rows."""
        places = self.row_length * len(self.rows)
        return sum(self.lengths) / places if places else 1.0

    def cumulative_lengths(self, row: int) -> Int[np.ndarray, " S1"]:
        """Returns the start of each sequence of a row, and the end of the last one."""
        return np.cumsum([0, *(self.lengths[index] for index in self.rows[row])], dtype=np.int32)

    def arrays(
        self,
        sequences: Sequence[Sequence[int] | np.ndarray],
        first: int,
        num_rows: int,
        num_segments: int | None = None,
    ) -> PackedRows:
        """Returns rows as arrays; those beyond the last are empty.

        Args:
          sequences: The tokens of each packed sequence.
          first: The first row.
          num_rows: How many rows.
          num_segments: Number of sequences in a row that get offsets; None = `most_segments`.
        """
        ids, segments, positions = np.zeros((3, num_rows, self.row_length), np.int32)
        num_segments = self.most_segments if num_segments is None else num_segments
        starts: list[int] = []
        for place in range(num_rows):
            row = self.rows[first + place] if first + place < len(self.rows) else ()
            bounds = self.cumulative_lengths(first + place) if row else np.zeros(1, np.int32)
            stretches = zip(row, pairwise(bounds), strict=True)
            for number, (index, (start, stop)) in enumerate(stretches, 1):
                ids[place, start:stop] = sequences[index]
                segments[place, start:stop] = number
                positions[place, start:stop] = np.arange(stop - start)
            starts += (place * self.row_length + bounds).tolist()
        offsets = np.full(num_rows * (num_segments + 1) + 1, ids.size, np.int32)
        offsets[: len(starts)] = starts
        return PackedRows(
            input_ids=ids, segment_ids=segments, position_ids=positions, offsets=offsets
        )


def pack(lengths: Sequence[int], row_length: int) -> Packing:
    """Packs sequences into rows by best fit, the longest first.

    All rows but one are more than half full, and there are at most 11/9 of the fewest possible,
    plus one.

    Args:
      lengths: Tokens of each sequence.
      row_length: Tokens of a row.

    Raises:
      InputError: A length is negative or above the length of a row.
    """
    lengths = tuple(map(int, lengths))
    if bad := [length for length in lengths if not 0 <= length <= row_length]:
        raise InputError(
            f"pack(row_length={row_length}): a sequence has {bad[0]} tokens; 0 to {row_length} fit"
            " into a row; cut it, or make the rows longer"
        )
    rows: list[list[int]] = []
    # Rows by their number of free places, and a bit for every such number that occurs: the lowest
    # bit from a length on is the tightest fit, found without a search.
    by_room: list[list[int]] = [[] for _ in range(row_length + 1)]
    rooms = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        if not length:
            break
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row = row_length, len(rows)
            rows.append([])
        rows[row].append(index)
        by_room[room - length].append(row)
        rooms |= 1 << (room - length)
    return Packing(row_length=row_length, lengths=lengths, rows=tuple(map(tuple, rows)))
