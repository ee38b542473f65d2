"""Phases and the lines that a long job prints about itself."""

import io
import re
import sys
import time

import pytest
from jax import monitoring

from pbjax import progress
from pbjax.progress import PLAIN_INTERVAL_S, ProgressPrinter
from pbjax.runtime.phases import Phases


class Terminal(io.StringIO):
    def isatty(self):
        return True


def lines_of(monkeypatch, job, wait_s=0.2):
    """What a job leaves on stderr; pytest sets stderr between fixtures and test, so here."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "PLAIN_INTERVAL_S", 0.02)
    with ProgressPrinter() as printer:
        job(printer)
        time.sleep(wait_s)
    before = stream.getvalue()
    time.sleep(0.06)
    assert stream.getvalue() == before  # nothing comes after the end
    return before.splitlines()


def test_a_plain_line_comes_at_least_every_five_seconds():
    assert PLAIN_INTERVAL_S <= 5.0


def test_plain_line_says_where_the_job_is(monkeypatch):
    lines = lines_of(monkeypatch, lambda say: say("profile", 3, 12, "attention at batch size 8"))
    assert len(lines) >= 3
    pattern = r"profile: 3 of 12 attention at batch size 8, \d+ s, about \d+ s left"
    assert re.fullmatch(pattern, lines[-1])


def test_lines_keep_coming_without_news_and_while_the_job_is_busy(monkeypatch):
    def busy(say):
        say("compile", 0, 1, "")
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            pass

    assert len(lines_of(monkeypatch, busy, wait_s=0)) >= 2


def test_time_left_is_not_guessed_before_the_first_item(monkeypatch):
    lines = lines_of(monkeypatch, lambda say: say("profile", 0, 12, ""))
    assert re.fullmatch(r"profile: 0 of 12, \d+ s", lines[-1])


def test_job_that_has_said_nothing_has_a_line_too(monkeypatch):
    lines = lines_of(monkeypatch, lambda say: None)
    assert re.fullmatch(r"start: 0 of 1, \d+ s", lines[0])


def test_short_job_prints_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with ProgressPrinter() as printer:
        printer("search", 0, 1, "")
    assert sys.stderr.getvalue() == ""


def test_error_of_the_job_passes_through():
    with pytest.raises(KeyboardInterrupt), ProgressPrinter():
        raise KeyboardInterrupt


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 100 columns as stderr, and the clock of what is shown on it."""
    stream, clock = Terminal(), [1000.0]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("rich.console.monotonic", lambda: clock[0])
    return stream, clock


def shown_on(terminal, monkeypatch, job):
    """What a job leaves on a terminal, without colours and what moves the cursor."""
    stream, clock = terminal
    monkeypatch.setattr(sys, "stderr", stream)  # here: pytest sets it between fixtures and test
    with ProgressPrinter() as printer:
        job(printer, clock)
        time.sleep(0.3)  # the bar redraws itself ten times a second
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())


def test_terminal_gets_a_bar_with_phase_and_item(terminal, monkeypatch):
    def job(say, clock):
        say("profile", 1, 4, "attention")
        say("profile", 2, 4, "feed-forward")

    text = shown_on(terminal, monkeypatch, job)
    assert re.search(r"profile feed-forward [━╺╸]+ +2/4", text)


def test_bar_clocks_a_job_that_says_nothing(terminal, monkeypatch):
    def job(say, clock):
        say("compile", 0, 4, "")
        clock[0] += 61

    text = shown_on(terminal, monkeypatch, job)
    assert re.search(r"compile [━╺╸]+ +0/4 0:01:01 left -:--:--", text)


def test_bar_estimates_the_time_left_from_items_that_take_minutes(terminal, monkeypatch):
    def job(say, clock):
        for done in range(4):
            say("compile", done, 10, f"program {done}")
            clock[0] += 100

    text = shown_on(terminal, monkeypatch, job)
    assert re.search(r"compile program 3 [━╺╸]+ +3/10 0:06:40 left 0:11:40", text)


def test_bar_starts_its_clock_anew_in_each_phase(terminal, monkeypatch):
    def job(say, clock):
        say("compile", 1, 2, "")
        clock[0] += 100
        say("compile", 2, 2, "done")
        say("measure", 0, 3, "")
        clock[0] += 5

    text = shown_on(terminal, monkeypatch, job)
    assert re.search(r"measure [━╺╸]+ +0/3 0:00:05 left -:--:--", text)


def test_brackets_of_an_item_are_shown(terminal, monkeypatch):
    text = shown_on(terminal, monkeypatch, lambda say, clock: say("profile", 0, 2, "mask [bold]"))
    assert "profile mask [bold]" in text


def test_output_into_a_file_does_not_go_to_the_terminal(terminal, monkeypatch):
    output = io.StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    text = shown_on(terminal, monkeypatch, lambda say, clock: print("the report"))
    assert output.getvalue() == "the report\n"
    assert "the report" not in text


def test_phases_are_clocked_in_order_and_summed_by_name(monkeypatch):
    now = iter([0.0, 1.0, 10.0, 12.0, 20.0, 23.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    phases = Phases()
    for name in ("compile", "measure", "compile"):
        with phases.phase(name):
            pass
    assert [(p.name, p.seconds) for p in phases.finished()] == [("compile", 4.0), ("measure", 2.0)]


def test_making_programs_counts_apart_and_once(monkeypatch):
    step, read = "/jax/core/compile/{}_duration", "/jax/compilation_cache/cache_retrieval_time_sec"
    now = iter([0.0, 3.0, 4.0, 6.0, 7.0, 8.0, 20.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    phases = Phases()
    with phases.phase("measure"):
        for event, seconds in (
            (step.format("jaxpr_trace"), 1.0),  # from 2 to 3, inside the next
            (step.format("jaxpr_trace"), 3.0),  # from 1 to 4
            (step.format("backend_compile"), 2.0),  # from 4 to 6
            (read, 0.5),  # from 6.5 to 7, inside the next
            (step.format("backend_compile"), 1.5),  # from 6.5 to 8
            ("/jax/other", 100.0),
        ):
            monitoring.record_event_duration_secs(event, seconds)
    monitoring.record_event_duration_secs(read, 50.0)
    found = {phase.name: phase.seconds for phase in phases.finished()}
    assert found == {"measure": 13.5, "trace": 3.0, "compile": 2.0, "load programs": 1.5}


def test_programs_that_compile_at_the_same_time_take_the_time_that_passed(monkeypatch):
    now = iter([0.0, 5.0, 6.0, 8.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    phases = Phases()
    with phases.phase("build"):
        for seconds in (4.0, 3.0):  # from 1 to 5, and from 3 to 6
            event = "/jax/core/compile/backend_compile_duration"
            monitoring.record_event_duration_secs(event, seconds)
    found = {phase.name: phase.seconds for phase in phases.finished()}
    assert found == {"build": 3.0, "compile": 5.0}


def test_phase_that_fails_is_clocked_and_not_done():
    seen = []
    phases = Phases(lambda *state: seen.append(state))
    with pytest.raises(ZeroDivisionError), phases.phase("compile", 3):
        raise ZeroDivisionError
    assert [phase.name for phase in phases.finished()] == ["compile"]
    assert seen == [("compile", 0, 3, "")]


def test_items_of_a_phase_are_passed_on():
    seen = []
    with Phases(lambda *state: seen.append(state)).phase("profile", 2) as report:
        report(1, 2, "attention")
    assert seen == [
        ("profile", 0, 2, ""),
        ("profile", 1, 2, "attention"),
        ("profile", 2, 2, "done"),
    ]
