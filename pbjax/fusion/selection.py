"""The argument `fuse`: patterns to look for, and matches to leave out."""

from collections.abc import Collection
from dataclasses import dataclass

from pbjax.errors import InputError, InputTypeError

PATTERNS = ("attention", "gated_gemm", "gemm", "qkv", "layer_norm", "rms_norm", "add_norm")
_WHOLE = ("auto", "all", "none")

type Patterns = str | Collection[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The patterns and matches that a caller wants.

    Attributes:
      patterns: Names from `PATTERNS`.
      without: Names of matches to leave out, such as "gemm.2".
      auto: Whether to fuse only where kernels can run, and only models that call none.
      reason: The reason why no pattern is looked for, unless the caller asked for that.
    """

    patterns: frozenset[str]
    without: frozenset[str] = frozenset()
    auto: bool = False
    reason: str = ""


def selection_of(wanted: object) -> Selection:
    """Reads the argument `fuse`.

    Args:
      wanted: A selection; or "auto", "all", "none", or names of patterns, as a collection or joined
        by commas. A name after a minus leaves out a pattern or, with its number, a match:
        "all,-gemm.2".

    Returns:
      The selection; "auto" if the names only leave out.

    Raises:
      InputError: A pattern is unknown, or names contradict each other.
      InputTypeError: The argument is neither a text nor a collection of texts.
    """
    if isinstance(wanted, Selection):
        return wanted
    names = _names(wanted)
    added = {name for name in names if not name.startswith("-")}
    if not added and names:
        added = {"auto"}
    removed = {name.removeprefix("-") for name in names if name.startswith("-")}
    known = {*PATTERNS, *_WHOLE}
    unknown = sorted(added - known) + sorted(removed - {n for n in removed if _is_known(n)})
    if unknown:
        raise InputError(
            f"fuse={wanted!r}: no pattern {', '.join(map(repr, unknown))}; patterns are "
            f"{', '.join(PATTERNS)}; name some of these, or pass 'auto', 'all' or 'none'"
        )
    if len(added) > 1 and added.intersection(_WHOLE):
        raise InputError(
            f"fuse={wanted!r}: {', '.join(sorted(added.intersection(_WHOLE)))} beside other names; "
            "only names after a minus are allowed beside it; leave out one of them"
        )
    every = bool(added & {"auto", "all"})
    patterns = frozenset(PATTERNS) if every else frozenset(added - {"none"})
    return Selection(
        patterns=patterns - removed,
        without=frozenset(removed.difference(PATTERNS)),
        auto="auto" in added,
    )


def _names(wanted: object) -> tuple[str, ...]:
    parts = wanted.split(",") if isinstance(wanted, str) else wanted
    if not isinstance(parts, Collection) or not all(isinstance(part, str) for part in parts):
        raise InputTypeError(
            f"fuse={wanted!r}: a {type(wanted).__name__}; a text or a collection of texts is "
            "allowed; pass 'auto', 'all', 'none' or names of patterns"
        )
    return tuple(str(part).strip() for part in parts)


def _is_known(name: str) -> bool:
    """Whether a name is that of a pattern, or of a match of one."""
    pattern, dot, number = name.partition(".")
    return pattern in PATTERNS and (not dot or number.isdecimal())
