"""Streams that fail: results end the command by a line and a code, messages do not."""

import os
import subprocess
import sys

import pytest

from pbjax.cli import streams

RUN = "from pbjax.cli.app import app; app()"
SHOWN = "with command_streams():\n print({text!r}, flush={flush}); print('told', file=sys.stderr)"


def printed(text="a" * 9, *, flush=False, **pipes):
    """What a process that prints does: its exit code, output and messages."""
    code = "import sys\nfrom pbjax.cli.streams import command_streams\n"
    command = [sys.executable, "-S", "-c", code + SHOWN.format(text=text, flush=flush)]
    if closed := pipes.pop("shell", ""):
        command = ["sh", "-c", f'exec "$0" "$@" {closed}', *command]
    path = os.pathsep.join(sys.path)
    environment = os.environ | {"PYTHONPATH": path} | pipes.pop("env", {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | pipes
    return subprocess.run(command, env=environment, check=False, **pipes)


def closed_pipe():
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize("flush", [False, True])
def test_full_disk_is_a_line_and_exit_code_2(flush):
    with open("/dev/full", "w") as full:
        found = printed(flush=flush, stdout=full)
    assert found.returncode == 2
    told = "" if flush else "told\n"
    assert found.stderr.decode() == (
        f"{told}error: standard output: No space left on device; a place with room is needed; free"
        " the disk or redirect it elsewhere\n"
    )


@pytest.mark.parametrize("text", ["a", "a" * 100_000])
def test_pipe_that_nobody_reads_is_exit_code_141_without_a_word(text):
    writing = closed_pipe()
    found = printed(text, stdout=writing)
    os.close(writing)
    assert found.returncode == streams.PIPE_CLOSED == 141
    assert found.stderr.decode() in ("", "told\n")


def test_letters_that_the_encoding_lacks_are_escaped():
    found = printed("é☃ \udcff", env={"PYTHONIOENCODING": "ascii"})
    assert (found.returncode, found.stdout) == (0, b"\\xe9\\u2603 \\udcff\n")
    found = printed("é", env={"PYTHONIOENCODING": "ascii:replace"})
    assert found.stdout == b"?\n"


def test_messages_that_cannot_be_written_do_not_end_a_command():
    with open("/dev/full", "w") as full:
        found = printed("result", stderr=full)
    assert (found.returncode, found.stdout) == (0, b"result\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_take_what_is_printed(closed):
    assert printed(shell=closed).returncode == 0


@pytest.mark.parametrize("arguments", [["--version"], ["roofline", "--help"]])
def test_help_is_a_result_too(arguments):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", RUN, *arguments]
        found = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert (found.returncode, found.stderr.count(b"\n")) == (2, 1)
    assert found.stderr.startswith(b"error: standard output: No space left on device;")
