"""A short list of sizes that arrays may have, so that few programs are compiled.

Pure: no jax. An array is padded up to the least size that holds it; the sizes bound the cost of
padding, and their number bounds how many programs there can be.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass

from pbjax.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """Sizes in rising order.

    Attributes:
      sizes: Every size that an array may have.
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raises InputError unless the sizes are positive and rise."""
        rising = all(a < b for a, b in zip(self.sizes, self.sizes[1:], strict=False))
        if not self.sizes or self.sizes[0] < 1 or not rising:
            raise InputError(
                f"Buckets(sizes={self.sizes}): empty, not positive or not rising; positive sizes in"
                " rising order, such as (16, 32, 64), are allowed; correct them"
            )

    @classmethod
    def growing(
        cls, smallest: int, largest: int, *, waste: float = 0.5, multiple: int = 1
    ) -> "Buckets":
        """Returns the fewest sizes that bound the padding of every count.

        The least size that holds a count n >= smallest is at most (1 + waste) * n + multiple - 1.

        Args:
          smallest: The first size; smaller counts get it too.
          largest: The last size.
          waste: Padding over count, at most.
          multiple: Every size but the largest is a multiple of it.

        Raises:
          InputError: An argument is out of range.
        """
        if not (1 <= smallest <= largest and waste > 0 and multiple >= 1):
            raise InputError(
                f"Buckets.growing({smallest}, {largest}, waste={waste}, multiple={multiple}): out"
                " of range; 1 <= smallest <= largest, waste > 0 and multiple >= 1 are allowed;"
                " correct them"
            )
        sizes = [min(_ceil(smallest, multiple), largest)]
        while sizes[-1] < largest:
            # The least count above the last size may be padded to this one, and no further.
            following = math.floor((sizes[-1] + 1) * (1 + waste))
            following = max(_ceil(following, multiple), sizes[-1] + 1)
            sizes.append(min(following, largest))
        return cls(sizes=tuple(sizes))

    def least(self, count: int) -> int:
        """Returns the least size that holds a count.

        Raises:
          InputError: The count is negative or above the largest size.
        """
        index = bisect_left(self.sizes, count)
        if index == len(self.sizes) or count < 0:
            raise InputError(
                f"Buckets.least({count}): sizes are 1 to {self.sizes[-1]}; 0 to {self.sizes[-1]} "
                "fit; cut the input, or make the buckets larger"
            )
        return self.sizes[index]


def _ceil(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
