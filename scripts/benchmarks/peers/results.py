"""Rates, ratios, agreement and tables from the lines of bench_peers.py's processes.

Pure: numpy and plain data. A line is a dict; its `side` is "jax" for ours, anything else is a peer.
"""

from pathlib import Path

import numpy as np

from pbjax.text_tables import table_text

from .rows import Row

# A rounding to bfloat16 is off by 2^-9 at most; about eight of them a layer reach the hidden state,
# and add up as their root.
ROUNDING, ROUNDINGS_PER_LAYER = 2.0**-8, 8
OURS = "jax"
LEFT = ("case", "program", "ours is", "tokamax's is", "errors")


def finish(row: Row, lines: list[dict], folder: Path) -> list[dict]:
    """Adds rates, ratios and differences of outputs to what the processes of a row printed.

    Args:
      row: The model and its batch.
      lines: With `side`, `mode`, and either `seconds` of a batch or `error`.
      folder: The folder of the outputs, and of PyTorch's in f32; without that one, all are compared
        with the first of ours.

    Returns:
      The same lines.
    """
    peers = [line["seconds"] for line in lines if line["side"] != OURS and "seconds" in line]
    truths = [folder / f"torch {row.name} float32.npy"]
    truths += [folder / f"{OURS} {row.name} {line['mode']}.npy" for line in lines]
    truth = next((path for path in truths if path.exists()), None)
    for line in lines:
        line |= {"row": row.name, "batch_size": row.batch_size, "length": row.length}
        if "seconds" not in line:
            continue
        line["items_per_s"] = round(row.batch_size / line["seconds"], 1)
        line["share_of_bound"] = round(row.bound_s / line["seconds"], 3)
        if peers:
            line["over_best_peer"] = round(min(peers) / line["seconds"], 3)
        if truth is not None:
            line |= difference(row, folder / f"{line['side']} {row.name} {line['mode']}.npy", truth)
    return lines


def difference(row: Row, path: Path, truth: Path) -> dict:
    """Root mean square of the difference over that of the values, and whether it is rounding."""
    actual, expected = np.load(path), np.load(truth)
    relative = float(np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2)))
    allowed = ROUNDING * (ROUNDINGS_PER_LAYER * row.num_layers) ** 0.5
    return {
        "relative_rms": float(f"{relative:.2g}"),
        "compared_with": truth.stem,
        "agrees": bool(relative <= allowed),
    }


def describe(row: Row, line: dict) -> str:
    """The line as text for the screen."""
    label = f"{row.title:12s} {line['side']:5s} {line['mode']:22s}"
    if "error" in line:
        return f"{label} DID NOT RUN {line['error']}"
    text = f"{label} {1e3 * line['seconds']:8.3f} ms {line['items_per_s']:9.1f} {row.unit}/s"
    text += f" {line['share_of_bound']:5.0%} of bound"
    if "over_best_peer" in line:
        text += f" {line['over_best_peer']:.2f}x best peer"
    if "agrees" in line:
        text += f" rms {line['relative_rms']:.1e} {'ok' if line['agrees'] else 'DIFFERS'}"
    text += f" (compile {line['compile_s']} s)"
    if "clock_mhz" in line:
        text += f" {line['clock_mhz']:.0f} MHz {line['power_w']:.0f} W"
    if "server" in line:
        text += f"\n    server: {_describe_server(line['server'])}"
    for kernel in line.get("kernels", [])[:14]:
        us = 1e6 * kernel["seconds"]
        text += f"\n    {us:9.1f} us {kernel['launches']:4d} x {kernel['kernel']}"
    return text


def _describe_server(server: dict) -> str:
    text = f"{server['rate_per_s']:.1f}/s, limit {1e3 * server['latency_limit_s']:.1f} ms"
    text += f", batch {1e3 * server['service_s']:.2f} ms"
    if "tail_s" in server:
        text += f", median {1e3 * server['median_s']:.1f}, tail {1e3 * server['tail_s']:.1f} ms"
        return f"{text}, {'met' if server['met'] else 'MISSED'}"
    tails = ", ".join(
        f"{1e3 * p['tail_s']:.1f} ms at {p['rate_per_s']:.0f}" for p in server["probes"]
    )
    return f"{text}, simulated {server['simulated_rate_per_s']:.1f}/s; tails {tails or 'none run'}"


def ratio(ours: dict | None, theirs: dict | None) -> float | None:
    """Our items per second over theirs; None if one of them did not run."""
    if ours is None or theirs is None or "seconds" not in ours or "seconds" not in theirs:
        return None
    return theirs["seconds"] / ours["seconds"]


def rate_ratio(ours: dict | None, theirs: dict | None) -> float | None:
    """The same for the rates of the server scenario; None too if a limit was not met."""
    rates = [line["server"]["rate_per_s"] for line in (ours, theirs) if line and "server" in line]
    met = [line["server"]["met"] for line in (ours, theirs) if line and "server" in line]
    return rates[0] / rates[1] if len(rates) == 2 and all(met) else None


def best_of_ours(lines: list[dict]) -> dict | None:
    """Our fastest line; None if none ran."""
    timed = [line for line in lines if line["side"] == OURS and "seconds" in line]
    return min(timed, key=lambda line: line["seconds"], default=None)


def table(rows: dict[str, Row], lines: list[dict]) -> str:
    """Our best over each peer, a row each; below it what did not run, and why.

    Args:
      rows: By name, in the order of the table.
      lines: The lines of all rows, as `finish` returns them.

    Returns:
      Lines of text. A dash stands for a peer that did not run.
    """
    peers = list(dict.fromkeys(line["mode"] for line in lines if line["side"] != OURS))
    head = ["row", *(f"over {peer}" for peer in peers), "ours, items/s", "of bound", "ours is"]
    body = []
    for name, row in rows.items():
        of_row = [line for line in lines if line["row"] == name]
        ours = best_of_ours(of_row)
        theirs = {line["mode"]: line for line in of_row if line["side"] != OURS}
        cells = [_cell(ratio(ours, theirs.get(peer)), ".2f") for peer in peers]
        cells += [_cell(ours and ours["items_per_s"], ",.1f")]
        cells += [_cell(ours and ours["share_of_bound"], ".0%"), ours["mode"] if ours else "-"]
        body.append([row.title, *cells])
    text = table_text("", head, body, left=LEFT)
    if served := server_table(rows, lines):
        text += "\n\n" + served
    failed = [line for line in lines if "error" in line]
    for line in failed:
        text += f"\n{rows[line['row']].title}, {line['mode']} did not run: {line['error']}"
    return text


def server_table(rows: dict[str, Row], lines: list[dict]) -> str:
    """The server scenario, a line for each program; empty if it was not run."""
    body = []
    for name, row in rows.items():
        served = [line for line in lines if line["row"] == name and "server" in line]
        ours = best_of_ours(served)
        for line in served:
            server = line["server"]
            theirs = line if line["side"] != OURS else None
            body.append(
                [
                    row.title,
                    line["mode"],
                    _cell(rate_ratio(ours, theirs), ".2f"),
                    f"{server['rate_per_s']:,.0f}" if server["met"] else "not met",
                    f"{1e3 * server['latency_limit_s']:g}",
                    f"{server['rate_per_s'] / line['items_per_s']:.0%}",
                ]
            )
    head = ["row", "program", "ours over it", "queries/s", "limit, ms", "of offline"]
    return table_text("", head, body, left=LEFT) if body else ""


def kernel_table(kernels: list[dict]) -> str:
    """Ours and tokamax's kernels, the fastest of theirs; below it what did not run."""
    head = ["kernel", "case", "over tokamax", "ours, us", "tokamax, us", "tokamax's is", "errors"]
    body, failed = [], []
    for found in kernels:
        if "error" in found:
            failed.append(f"{found['mode']} did not run: {found['error']}")
            continue
        timed = {k: v for k, v in found["tokamax_s"].items() if isinstance(v, float)}
        refused = {k: v for k, v in found["tokamax_s"].items() if isinstance(v, str)}
        failed += [f"{found['case']}, {k} did not run: {v}" for k, v in refused.items()]
        best = min(timed, key=timed.get, default=None)
        theirs = timed.get(best)
        body.append(
            [
                found["kernel"],
                found["case"],
                _cell(theirs and theirs / found["ours_s"], ".2f"),
                f"{1e6 * found['ours_s']:.1f}",
                _cell(theirs and 1e6 * theirs, ".1f"),
                best or "-",
                "rounding" if found["agree"] else "TOO LARGE",
            ]
        )
    return "\n".join([table_text("", head, body, left=LEFT)] * bool(body) + failed)


def _cell(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
