"""Programs kept between processes: where, when not, and what becomes of damaged ones."""

import json
import os
import subprocess
import sys
import zlib

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from pbjax.errors import FileError, PbjaxWarning
from pbjax.runtime import program_cache
from pbjax.runtime.program_cache import (
    keep_programs,
    note_verified,
    program_key,
    verified_difference,
)

START = """
import json, jax, jax.numpy as jnp
from pbjax.runtime.compile_clock import CompileClock
from pbjax.runtime.program_cache import keep_programs
folder = keep_programs()
with CompileClock() as clock:
    value = jax.jit(lambda x: (x @ x).sum())(jnp.ones((8, 8)))
print(json.dumps({"folder": str(folder), "value": float(value), **clock.programs}))
"""


def start(folder, **variables):
    """What a process prints that keeps its programs in a folder, and its warnings."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")}
    env |= {"JAX_PLATFORMS": "cpu", program_cache.VARIABLE: str(folder), **variables}
    command = [sys.executable, "-c", START]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.fixture
def settings(monkeypatch):
    """Of JAX's cache, as they are before anything is set, and again after the test."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.delenv(program_cache.VARIABLE, raising=False)
    yield jax.config
    compilation_cache.reset_cache()
    for name, value in before.items():
        jax.config.update(name, value)


def test_a_second_start_compiles_nothing_and_a_damaged_program_is_compiled_again(tmp_path):
    folder = tmp_path / "kept"
    first, _ = start(folder)
    assert (first["folder"], first["load programs"]) == (str(folder), 0)
    assert folder.stat().st_mode & 0o777 == 0o700
    second, _ = start(folder)
    assert (second["compile"], second["load programs"]) == (0, first["compile"])
    for path in folder.glob("jit__lambda*"):
        path.write_bytes(path.read_bytes()[:100])
    third, warned = start(folder)
    assert (third["compile"], third["value"]) == (1, first["value"])
    assert "Error reading" not in warned
    fourth, _ = start(folder)
    assert (fourth["compile"], fourth["load programs"]) == (0, first["compile"])


def test_damaged_programs_are_removed_and_whole_ones_read_once(tmp_path, monkeypatch):
    whole, damaged, other = (tmp_path / name for name in ("a-cache", "b-cache", "c-atime"))
    whole.write_bytes(zlib.compress(b"program" * 99))
    damaged.write_bytes(whole.read_bytes()[:-1])
    other.write_bytes(b"")
    program_cache.remove_damaged(tmp_path)
    assert (whole.exists(), damaged.exists(), other.exists()) == (True, False, True)
    monkeypatch.setattr(program_cache, "_is_readable", lambda _: pytest.fail("read again"))
    program_cache.remove_damaged(tmp_path)
    monkeypatch.undo()
    whole.write_bytes(b"")
    program_cache.remove_damaged(tmp_path)
    assert not whole.exists()


def test_nothing_is_kept_when_turned_off_or_by_default_on_a_cpu(settings, monkeypatch):
    assert keep_programs() is None
    monkeypatch.setenv(program_cache.VARIABLE, "OFF")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert keep_programs() is None
    assert settings.jax_compilation_cache_dir is None


def test_on_a_gpu_programs_lie_in_the_users_cache_folder(settings, monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert keep_programs() == str(tmp_path / "pbjax")
    assert settings.jax_compilation_cache_dir == str(tmp_path / "pbjax")
    assert settings.jax_persistent_cache_min_compile_time_secs == 0.0


def test_an_address_is_no_folder(settings, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(program_cache.VARIABLE, "gs://bucket/programs")
    message = r"PBJAX_CACHE_DIR=gs://bucket/programs: an address; .*by JAX_COMPILATION_CACHE_DIR"
    with pytest.raises(FileError, match=message):
        keep_programs()
    assert list(tmp_path.iterdir()) == []


def test_what_jax_was_told_is_kept(settings, monkeypatch, tmp_path):
    monkeypatch.setenv(program_cache.VARIABLE, str(tmp_path / "ours"))
    settings.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    assert keep_programs() == str(tmp_path / "theirs")
    assert settings.jax_persistent_cache_min_compile_time_secs == 1.0
    assert not (tmp_path / "ours").exists()


def test_a_folder_that_cannot_be_made_is_refused_if_named_and_else_a_warning(
    settings, monkeypatch, tmp_path
):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.warns(PbjaxWarning, match="programs are not kept; set PBJAX_CACHE_DIR"):
        assert keep_programs() is None
    monkeypatch.setenv(program_cache.VARIABLE, str(file / "below"))
    with pytest.raises(FileError, match=r"PBJAX_CACHE_DIR=.*cannot be made \(Not a directory"):
        keep_programs()


def test_a_program_is_verified_once_and_for_what_it_is(settings, tmp_path):
    def lowered(factor):
        return jax.jit(lambda x: factor * x).lower(jnp.ones(3))

    assert program_key(lowered(2.0)) == ""  # Nothing is kept yet.
    settings.update("jax_compilation_cache_dir", "gs://bucket")
    assert program_key(lowered(2.0)) == ""  # Not on this machine.
    note_verified("", 0.25)
    assert verified_difference("") is None
    settings.update("jax_compilation_cache_dir", str(tmp_path))
    key = program_key(lowered(2.0), "options")
    assert key == program_key(lowered(2.0), "options")
    assert len({key, program_key(lowered(3.0), "options"), program_key(lowered(2.0))}) == 3
    assert verified_difference(key) is None
    note_verified(key, 0.25)
    assert verified_difference(key) == 0.25
    (record,) = tmp_path.glob("*/*.json")
    not_known = [f'{{"difference": {value}}}' for value in ("null", "NaN", "Infinity", "-1")]
    for damaged in ("", "{", "[]", *not_known):
        record.write_text(damaged)
        assert verified_difference(key) is None
