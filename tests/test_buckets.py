from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbjax.buckets import Buckets
from pbjax.errors import InputError


@st.composite
def bounds(draw):
    smallest = draw(st.integers(1, 300))
    largest = draw(st.integers(smallest, 20_000))
    return {
        "smallest": smallest,
        "largest": largest,
        "waste": draw(st.floats(0.01, 3)),
        "multiple": draw(st.integers(1, 64)),
    }


def growing(smallest, largest, **options):
    return Buckets.growing(smallest, largest, **options)


@given(bounds(), st.data())
def test_every_count_gets_the_least_size_that_holds_it(given_bounds, data):
    buckets = growing(**given_bounds)
    count = data.draw(st.integers(0, given_bounds["largest"]))
    least = buckets.least(count)
    assert least in buckets.sizes
    assert least >= count
    assert not [size for size in buckets.sizes if count <= size < least]


@given(bounds(), st.data())
def test_waste_is_bounded(given_bounds, data):
    buckets = growing(**given_bounds)
    count = data.draw(st.integers(given_bounds["smallest"], given_bounds["largest"]))
    multiple = given_bounds["multiple"]
    assert buckets.least(count) <= (1 + given_bounds["waste"]) * count + multiple - 1


@given(bounds())
def test_sizes_are_multiples_up_to_the_largest(given_bounds):
    sizes = growing(**given_bounds).sizes
    assert sizes[-1] == given_bounds["largest"]
    assert all(size % given_bounds["multiple"] == 0 for size in sizes[:-1])
    assert list(sizes) == sorted(set(sizes))


@given(st.integers(1, 100), st.integers(0, 10_000), st.floats(0.1, 3))
def test_no_fewer_sizes_could_bound_the_waste(smallest, more, waste):
    sizes = growing(smallest, smallest + more, waste=waste).sizes
    for low, high in pairwise(sizes):
        # The count after one size needs a next one no larger than this.
        assert high <= max((low + 1) * (1 + waste), low + 1)
    for low, high in pairwise(sizes[:-1]):
        assert high + 1 > (low + 1) * (1 + waste)


def test_doubling_and_three_halves():
    assert growing(1, 32, waste=1.0).sizes == (1, 4, 10, 22, 32)
    assert growing(128, 512, waste=0.25, multiple=64).sizes == (128, 192, 256, 384, 512)


@pytest.mark.parametrize("count", [-1, 513])
def test_count_outside_is_refused(count):
    with pytest.raises(InputError, match=rf"least\({count}\): sizes are 1 to 512"):
        growing(128, 512).least(count)


@pytest.mark.parametrize("sizes", [(), (0, 1), (2, 2), (3, 1)])
def test_sizes_that_do_not_rise_are_refused(sizes):
    with pytest.raises(InputError, match="positive sizes"):
        Buckets(sizes=sizes)


@pytest.mark.parametrize(
    "change", [{"smallest": 0}, {"largest": 1}, {"waste": 0.0}, {"multiple": 0}]
)
def test_bounds_that_are_none_are_refused(change):
    with pytest.raises(InputError, match="1 <= smallest <= largest"):
        growing(**({"smallest": 2, "largest": 4} | change))
