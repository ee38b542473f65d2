"""Two sub-batches interleaved: every part once, in order, as much beside products as has room."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbjax.decode.interleave import Item, Launch, Piece, Role, interleave

items = st.builds(
    lambda role, seconds, parts: Item(
        role=role, seconds=seconds, paired_s=seconds, parts=parts if role == Role.MEMORY else 1
    ),
    st.sampled_from(Role),
    st.sampled_from([0.0, 0.25, 1.0, 3.0]),
    st.integers(1, 7),
)
programs = st.lists(items, max_size=12)
capacities = st.sampled_from([0.0, 0.5, 1.4, 100.0])


def pieces(launches):
    return [piece for launch in launches for piece in (launch.main, launch.memory) if piece]


@given(programs, programs, capacities)
def test_every_part_runs_once_and_in_the_order_of_its_sub_batch(first, second, capacity):
    launches = interleave(first, second, capacity)
    for sub_batch, program in enumerate((first, second)):
        ran = [
            (p.item, part)
            for p in pieces(launches)
            if p.sub_batch == sub_batch
            for part in range(p.first, p.first + p.count)
        ]
        assert ran == [(i, part) for i, item in enumerate(program) for part in range(item.parts)]


@given(programs, programs, capacities)
def test_only_guests_ride_and_only_in_hosts_of_the_other_sub_batch(first, second, capacity):
    sub_batches = first, second
    for launch in interleave(first, second, capacity):
        if launch.memory:
            compute, memory = (
                sub_batches[launch.main.sub_batch][launch.main.item],
                sub_batches[launch.memory.sub_batch][launch.memory.item],
            )
            assert (compute.role, memory.role) == (Role.COMPUTE, Role.MEMORY)
            assert launch.main.sub_batch != launch.memory.sub_batch
            assert launch.memory.count >= 1
            carried = memory.seconds * launch.memory.count / memory.parts
            assert carried <= capacity * compute.paired_s + 1e-9


@given(programs, capacities)
def test_a_sub_batch_by_itself_runs_straight_through(program, capacity):
    launches = interleave(program, [], capacity)
    assert launches == interleave([], program, capacity) or program
    assert [launch.main.item for launch in launches] == list(range(len(program)))
    assert not any(launch.memory for launch in launches)


def decoder(num_layers, attention_s, products_s):
    """A norm, products, attention cut into 64 sequences, products."""
    qkv, *rest = (Item(role=Role.COMPUTE, seconds=s, paired_s=s) for s in products_s)
    attention = Item(role=Role.MEMORY, seconds=attention_s, parts=64)
    return [Item(role=Role.ALONE, seconds=0.0), qkv, attention, *rest] * num_layers


@pytest.mark.parametrize("attention_s", [0.5, 1.0, 1.3])
def test_halves_of_a_decoder_take_turns_until_all_but_the_first_and_last_attention_rides(
    attention_s,
):
    program = decoder(6, attention_s, (0.1, 0.1, 0.5, 0.3))
    launches = interleave(program, program)
    whole = 6 * 2 * 64
    ridden = sum(launch.memory.count for launch in launches if launch.memory)
    assert ridden >= whole - 2 * 64


def test_what_exceeds_the_capacity_of_the_hosts_runs_alone():
    program = decoder(4, 10.0, (0.25, 0.25, 0.25, 0.25))
    launches = interleave(program, program, capacity=2.0)
    carried = sum(launch.memory.count for launch in launches if launch.memory)
    assert 6 * 64 * 0.15 < carried <= 2 * 4 * 64 * 0.2


def test_a_guest_that_cannot_be_divided_rides_whole_in_the_next_host():
    norm, product = (
        Item(role=Role.MEMORY, seconds=0.5),
        Item(role=Role.COMPUTE, seconds=1.0, paired_s=1.0),
    )
    launches = interleave([product, norm], [product, product])
    assert launches == (
        Launch(main=Piece(sub_batch=0, item=0)),
        Launch(main=Piece(sub_batch=1, item=0), memory=None),
        Launch(main=Piece(sub_batch=1, item=1), memory=Piece(sub_batch=0, item=1)),
    )


def test_more_layers_need_no_more_kinds_of_launches():
    # Each kind is a kernel to compile: so many parts of a memory kernel beside a compute kernel.
    def kinds(num_layers):
        program = decoder(num_layers, 1.0, (0.1, 0.1, 0.5, 0.3))
        launches = interleave(program, program)
        return {
            (launch.main.item % 6, launch.memory.first, launch.memory.count)
            for launch in launches
            if launch.memory
        }

    assert kinds(32) == kinds(4)
    assert len(kinds(32)) < 12
