"""Programs and measured tables, made up or drawn at random, for tests of the search."""

from itertools import combinations_with_replacement

from pbjax.device import ResourceClass
from pbjax.planning.profiling import CorunRow, Profile, Row, grid
from scripts.benchmarks import random_tables
from scripts.benchmarks.random_tables import SHAPES, random_pairs, random_rows, unlike

from .fakes import provenance

PROVENANCE = provenance()
TILES = (8, 16, 32, 64)


row = Row.of
stage = random_tables.stage


def corun(a, b, *figures):
    return CorunRow.of((a, b), *figures)


def program(num_stages, num_blocks=3, has_ends=True):
    ends = (ResourceClass.CUDA,) * 2 if has_ends else ()
    return random_tables.program(num_stages, num_blocks, ends, held_bytes_per_row=0.0)


def random_table(chance, summary, batch_size, num_extra=0):
    """A table of random shape, in which a random part of the pairs saves a random part."""
    extra = chance.sample(range(3, batch_size), num_extra)
    sizes = sorted({*grid(batch_size), *extra})
    shape, share = chance.choice(SHAPES), chance.choice((0, 0.4, 1))
    rows = random_rows(chance, summary, shape, sizes, TILES)
    measured = sorted(chance.sample(sizes, min(3, len(sizes))))
    every = combinations_with_replacement(summary.stages, 2)
    pairs = random_pairs(chance, (pair for pair in every if chance.random() < share), measured)
    return Profile(provenance=PROVENANCE, rows=tuple(rows), corun=tuple(pairs))


def with_budgets(chance, summary, profile):
    """The table with rows of stages and pairs of the block at two choices of budgets."""
    sizes = sorted({each.batch_size for each in profile.rows})
    sizes = sizes[chance.randint(0, 1) * (len(sizes) > 3) :]
    rows, pairs = list(profile.rows), list(profile.corun)
    for share in (0.3, 0.7):
        sms = round(132 * share), round(10 * share), 110 - round(110 * share)
        budgets = dict(zip(ResourceClass, sms, strict=True))
        pairs_there = unlike(summary.block)
        for each in {s.name: s for pair in pairs_there for s in pair}.values():
            slower = chance.uniform(1, 1.6)
            rows += [
                row(each, b, slower * profile.seconds(each, b), budgets[each.resource])
                for b in sizes
            ]
        pairs += [
            corun(
                a,
                b,
                (chance.choice(sizes),) * 2,
                (chance.uniform(1, 1.3), chance.uniform(1, 1.3)),
                (budgets[a.resource], budgets[b.resource]),
            )
            for a, b in pairs_there
            if chance.random() < 0.8
        ]
    return Profile(provenance=PROVENANCE, rows=tuple(rows), corun=tuple(pairs))


def table(summary, seconds, *pairs):
    """A table of one curve for all stages, given as {batch size: seconds}."""
    rows = [row(each, b, s) for each in summary.stages for b, s in seconds.items()]
    return Profile(provenance=PROVENANCE, rows=tuple(rows), corun=pairs)


ONE = program(1, num_blocks=1, has_ends=False)
TWO = program(2, num_blocks=4, has_ends=False)
