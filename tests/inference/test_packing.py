from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbjax.errors import InputError
from pbjax.inference.packing import pack

lengths = st.lists(st.integers(0, 40), max_size=80)


@given(lengths)
def test_every_sequence_stands_once_and_fits(given_lengths):
    packing = pack(given_lengths, 40)
    standing = sorted(index for row in packing.rows for index in row)
    assert standing == [index for index, length in enumerate(given_lengths) if length]
    for row in packing.rows:
        assert 0 < sum(given_lengths[index] for index in row) <= 40


@given(lengths)
def test_at_most_one_row_is_half_empty(given_lengths):
    rows = pack(given_lengths, 40).rows
    fills = [sum(given_lengths[index] for index in row) for row in rows]
    assert sum(fill <= 20 for fill in fills) <= 1


@given(lengths, st.integers(0, 3), st.integers(1, 5))
def test_arrays_hold_each_sequence_with_its_own_positions(given_lengths, first, count):
    packing = pack(given_lengths, 40)
    sequences = [[1000 * i + k + 1 for k in range(n)] for i, n in enumerate(given_lengths)]
    arrays = packing.arrays(sequences, first, count)
    assert arrays.input_ids.shape == (count, 40)
    for place, row in enumerate(packing.rows[first : first + count]):
        for number, index in enumerate(row, start=1):
            here = arrays.segment_ids[place] == number
            assert arrays.input_ids[place][here].tolist() == sequences[index]
            assert arrays.position_ids[place][here].tolist() == list(range(len(sequences[index])))
    there = sum(len(row) for row in packing.rows[first : first + count])
    assert len(set(zip(*np.nonzero(arrays.segment_ids), strict=True))) == sum(
        given_lengths[index] for row in packing.rows[first : first + count] for index in row
    )
    assert (arrays.segment_ids.max(axis=1).sum() if count else 0) == there
    outside = arrays.segment_ids == 0
    assert not arrays.input_ids[outside].any()
    assert not arrays.position_ids[outside].any()


@given(lengths)
def test_cumulative_lengths_bound_the_sequences(given_lengths):
    packing = pack(given_lengths, 40)
    for number, row in enumerate(packing.rows):
        bounds = packing.cumulative_lengths(number)
        assert np.diff(bounds).tolist() == [given_lengths[index] for index in row]
        assert bounds[0] == 0


def test_figures_of_a_packing():
    packing = pack([30, 10, 0, 25], 40)
    assert packing.rows == ((0, 1), (3,))
    assert packing.most_segments == 2
    assert packing.filled == pytest.approx(65 / 80)


def test_nothing_fills_no_row():
    packing = pack([], 8)
    assert packing.rows == ()
    assert packing.most_segments == 0
    assert packing.filled == 1


@settings(max_examples=20)
@given(st.randoms(use_true_random=False))
def test_mixed_lengths_fill_nine_tenths(random):
    found = pack([random.randint(3, 128) for _ in range(500)], 128)
    assert found.filled > 0.9


@pytest.mark.parametrize("length", [-1, 9])
def test_sequence_that_does_not_fit_is_refused(length):
    with pytest.raises(InputError, match=f"a sequence has {length} tokens; 0 to 8 fit"):
        pack([3, length], 8)


@given(lengths, st.integers(0, 3), st.integers(1, 5))
def test_offsets_are_where_the_sequences_begin(given_lengths, first, count):
    packing = pack(given_lengths, 40)
    sequences = [[1] * length for length in given_lengths]
    arrays = packing.arrays(sequences, first, count, packing.most_segments + 2)
    assert arrays.offsets.shape == (count * (packing.most_segments + 3) + 1,)
    assert arrays.offsets[0] == 0
    assert arrays.offsets[-1] == count * 40
    assert (np.diff(arrays.offsets) >= 0).all()
    # Within a run of the offsets every token is of the same sequence, and at each begins another.
    flat = arrays.segment_ids.reshape(-1)
    runs = [flat[a:b] for a, b in pairwise(arrays.offsets) if b > a]
    assert all(len(set(run.tolist())) == 1 for run in runs)
    standing = [index for row in packing.rows[first : first + count] for index in row]
    assert [len(run) for run in runs if run[0]] == [given_lengths[index] for index in standing]
