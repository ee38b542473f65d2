"""Markdown tables, numbers of few digits, and the conditions that a file was measured under."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NOTICE = "<!-- Written by scripts/write_results.py from profiles/: do not edit. -->"
SOFTWARE = ("jax", "flax", "torch", "transformers", "triton", "tokamax")

Tables = Mapping[str, Any]  # name of a file without its ending -> its JSON


def page(title: str, introduction: str, *sections: str) -> str:
    """A whole page: title, notice, introduction, sections."""
    parts = [f"# {title}", NOTICE, *map(_prose, introduction.split("\n\n"))]
    return "\n\n".join([*parts, *(s for s in sections if s)]) + "\n"


def section(title: str, *parts: str) -> str:
    """A heading and what stands under it."""
    return "\n\n".join([f"## {title}", *(_prose(part) for part in parts if part)])


def _prose(text: str) -> str:
    """A paragraph in lines of moderate length; tables, lists and figures as they are."""
    if text.startswith(("|", "- ", "!", "```")):
        return text
    return "\n".join(textwrap.wrap(text, 110, break_long_words=False, break_on_hyphens=False))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; columns of numbers are aligned to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    rule = [
        "---:" if i and _numeric(row[i] for row in cells) else "---" for i in range(len(columns))
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, rule, *cells))


def _numeric(cells: Iterable[str]) -> bool:
    return not any(cell[:1].isalpha() for cell in cells)


def number(value: float | None) -> str:
    """Two digits behind the point, fewer of large numbers: 14,884, 363.7, 12.70, 0.095."""
    if value is None:
        return "-"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{1 if size >= 100 else 2 if size >= 1 else 3}f}"


def ms(seconds: float) -> str:
    """Seconds as milliseconds, without the unit."""
    return number(seconds * 1e3)


def us(seconds: float) -> str:
    """Seconds as microseconds, without the unit."""
    return f"{seconds * 1e6:,.{0 if seconds >= 1e-3 else 1}f}"


def given(value: float) -> str:
    """A number with as many digits as its file has, four at most: 89.3, 1,979."""
    return f"{value:,.4g}" if value < 10_000 else f"{value:,.0f}"


def ratio(value: float | None) -> str:
    """How many times as fast, bold where the other side is faster by 1 % or more."""
    if value is None:
        return "-"
    text = f"{value:.2f}"
    return f"**{text}**" if value < 0.99 else text


def percent(share: float, digits: int = 0) -> str:
    """A share as per cent."""
    return f"{100 * share:.{digits}f} %"


def error(predicted: float, measured: float) -> str:
    """How far a prediction is from what was measured, signed."""
    return f"{100 * (predicted / measured - 1):+.1f} %"


def conditions(tables: Tables, *names: str) -> str:
    """A section with device, versions, commit, date and command of each file."""
    lines = []
    for name in names:
        document = tables[name].get("table") or tables[name].get("ceilings") or tables[name]
        for key in sorted(key for key in document if key.endswith("provenance")):
            of = key.removesuffix("provenance").strip("_")
            lines.append(_condition(f"{name}.json", of, document[key]))
    return section("Conditions", "\n".join(lines))


def _condition(file: str, of: str, found: Mapping[str, Any]) -> str:
    versions = {**found, **found.get("versions", {})}
    software = ", ".join(f"{name} {versions[name]}" for name in SOFTWARE if name in versions)
    parts = [_device(found), software, f"commit {found['commit'][:7]}", found["date"][:10]]
    text = f"- `{file}`{f' ({of})' if of else ''}: {', '.join(parts)}."
    for key in ("precision", "seconds", "note"):
        text += f" {key.capitalize()}: {found[key]}." if key in found else ""
    return f"{text} Command at that commit: `{found['command']}`."


def _device(found: Mapping[str, Any]) -> str:
    if "device_driver_power_limit" in found:
        kind, driver, watts = found["device_driver_power_limit"].split(", ")
        return f"{kind} ({watts.replace('.00', '')}), driver {driver}"
    kind = found["device_kind"]
    if "driver_and_power_limit" in found:
        driver, watts = found["driver_and_power_limit"].split(", ")
        return f"{kind} ({watts.replace('.00', '')}), driver {driver}"
    watts = f" ({found['power_limit_w']:.0f} W)" if found.get("power_limit_w") else ""
    driver = found.get("driver") or found.get("platform_version")
    return f"{kind}{watts}" + (f", driver {driver}" if driver else "")
