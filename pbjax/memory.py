"""Device memory that a split is predicted to need, from what its stages hold.

Weights, inputs and outputs are there all the time; what sub-batches hold beside them depends on the
slot. A sub-batch at a stage holds that stage's values and those that wait for a later one; one that
is done holds its part of the outputs, until the parts are joined; one that has not begun holds
nothing but its inputs. Which candidates fit a device is decided in `candidates`.
"""

import math
from collections.abc import Callable, Iterable, Sequence

from pbjax.outline import Outline
from pbjax.schedule import PROLOGUE, Slot, Split, timetable

# Bytes that each sub-batch holds for one of its rows.
type Held = tuple[float, ...]


class MemoryPredictor:
    """Predicts the memory of many splits of one program; remembers what they share.

    What a sub-batch holds is linear in its rows, and so is what a slot holds in the sizes. Of all
    slots under some staggers only those matter in which no other slot holds as much of every
    sub-batch: a few, found once, whatever the sizes are.
    """

    def __init__(self, outline: Outline):
        """Takes the program; it needs no table."""
        self._outline = outline
        first, last = (
            stage.held_bytes_per_row if stage else 0.0
            for stage in (outline.prologue, outline.epilogue)
        )
        waiting = outline.waiting_bytes_per_row
        self._held = [first, *(s.held_bytes_per_row + waiting for s in outline.block), last]
        self._fullest: dict[tuple[int, ...], tuple[Held, ...]] = {}

    def bytes(self, sizes: Sequence[int], staggers: tuple[int, ...]) -> int:
        """Bytes of the fullest slot.

        Args:
          sizes: Rows of each sub-batch.
          staggers: How many stages each runs ahead.
        """
        fullest = max(math.sumprod(sizes, held) for held in self._fullest_slots(staggers))
        return math.ceil(self._fixed_bytes(sizes) + fullest)

    def within(self, sizes: Sequence[int], limit_bytes: int) -> Callable[[tuple[int, ...]], bool]:
        """Says of staggers whether `bytes` of these sizes is within a limit under them."""
        fixed = self._fixed_bytes(sizes)
        most = max(*self._held, self._held[-1] + self._done(len(sizes)))
        if fixed + sum(sizes) * most <= limit_bytes:
            return lambda staggers: True

        def fits(staggers: tuple[int, ...]) -> bool:
            # Most that do not fit are found out by their first slot.
            for held in self._fullest_slots(staggers):
                if fixed + math.sumprod(sizes, held) > limit_bytes:
                    return False
            return True

        return fits

    def _fixed_bytes(self, sizes: Sequence[int]) -> float:
        """Weights, inputs and outputs; a split's layers read copies of their weights, stacked."""
        outline = self._outline
        copied = outline.stacked_weight_bytes if len(sizes) > 1 else 0
        per_row = outline.input_bytes_per_row + outline.output_bytes_per_row
        return outline.weight_bytes + copied + sum(sizes) * per_row

    def _done(self, count: int) -> float:
        """Of a row that is done: its outputs, where they are to be joined to others."""
        return self._outline.output_bytes_per_row if count > 1 else 0.0

    def _fullest_slots(self, staggers: tuple[int, ...]) -> tuple[Held, ...]:
        found = self._fullest.get(staggers)
        if found is None:
            table, done = timetable(self._outline, staggers), self._done(len(staggers))
            begun = (*(table.steady if table.num_blocks > 1 else ()), *table.drain, ())
            slots = {self._slot(slot, staggers, 0.0) for slot in table.fill}
            slots |= {self._slot(slot, staggers, done) for slot in begun}
            found = self._fullest[staggers] = _undominated(slots)
        return found

    def _slot(self, slot: Slot, staggers: tuple[int, ...], idle: float) -> Held:
        held = [idle] * len(staggers)
        for task in slot:
            # The epilogue writes what the sub-batch then is done with.
            written = self._done(len(staggers)) if task.stage == len(self._outline.block) else 0.0
            held[task.sub_batch] = self._held[task.stage - PROLOGUE] + written
        return tuple(held)


def predicted_bytes(outline: Outline, split: Split, staggers: tuple[int, ...]) -> int:
    """Device memory of one split; for many, keep a `MemoryPredictor`."""
    return MemoryPredictor(outline).bytes(split.sizes, staggers)


def _undominated(slots: Iterable[Held]) -> tuple[Held, ...]:
    """Those of which no other holds as much or more of every sub-batch, the fullest first."""
    kept: list[Held] = []
    for held in sorted(slots, key=lambda held: (-sum(held), held)):
        if not any(all(map(float.__ge__, other, held)) for other in kept):
            kept.append(held)
    return tuple(kept)
