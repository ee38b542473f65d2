"""Files of audio as the samples of a model: exact, converted, damaged, and without the extra."""

import sys

import numpy as np
import pytest
import soundfile

from pbjax.errors import FileError
from pbjax.inference.audio_files import read_audio
from tests.wav_files import write_wav

TONE_HZ = 440.0


def tone(rate, seconds=0.5):
    return 0.5 * np.sin(2 * np.pi * TONE_HZ * np.arange(int(rate * seconds)) / rate)


def test_wav_of_the_models_form_is_read_exactly(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    values = np.random.default_rng(0).integers(-(2**15), 2**15, 500).astype(np.int16)
    found = read_audio(write_wav(tmp_path / "a.wav", values), 16000)
    np.testing.assert_array_equal(found * 32768, values)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_another_rate_is_resampled(tmp_path, rate):
    values = (tone(rate) * 32767).astype(np.int16)
    found = read_audio(write_wav(tmp_path / "a.wav", values, rate=rate), 16000)
    assert found.dtype == np.float32
    # The ends, where a filter meets silence, are left out.
    np.testing.assert_allclose(found[500:-500], tone(16000)[500 : len(found) - 500], atol=2e-3)


def test_channels_are_averaged(tmp_path):
    left, right = np.arange(100), 3 * np.arange(100)
    both = np.stack([left, right], axis=1).astype(np.int16)
    found = read_audio(write_wav(tmp_path / "a.wav", both, channels=2), 16000)
    np.testing.assert_allclose(found * 32768, 2 * np.arange(100), atol=1e-3)


@pytest.mark.parametrize(
    ("name", "subtype"), [("a.flac", "PCM_16"), ("a.wav", "FLOAT"), ("a.wav", "PCM_24")]
)
def test_other_files_are_read(tmp_path, name, subtype):
    soundfile.write(tmp_path / name, tone(16000), 16000, subtype=subtype)
    np.testing.assert_allclose(read_audio(tmp_path / name, 16000), tone(16000), atol=1e-4)


@pytest.mark.parametrize("missing", ["soundfile", "soxr"])
@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"rate": 8000}, "1 channels of 16 bits at 8000 Hz"),
        ({"channels": 2}, "2 channels of 16 bits at 16000 Hz"),
        ({"width": 1}, "1 channels of 8 bits at 16000 Hz"),
    ],
)
def test_extra_that_is_missing_is_named(tmp_path, monkeypatch, options, found, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    path = write_wav(tmp_path / "a.wav", np.zeros(400, np.int16), **options)
    with pytest.raises(FileError) as caught:
        read_audio(path, 16000)
    assert str(caught.value) == (
        f"{path}: {found}; without soundfile and soxr only WAV of 1 channel of 16 bits at 16000 Hz"
        " is read; install them by pip install 'pbjax[audio]'"
    )


@pytest.mark.parametrize("options", [{}, {"rate": 8000}, {"channels": 2}])
def test_wav_without_samples_or_with_too_few_is_refused(tmp_path, options):
    empty = write_wav(tmp_path / "a.wav", np.zeros(0, np.int16), **options)
    with pytest.raises(FileError, match=r"a\.wav: no samples"):
        read_audio(empty, 16000)
    cut = write_wav(tmp_path / "b.wav", np.zeros(400, np.int16), **options)
    cut.write_bytes(cut.read_bytes()[:-100])
    with pytest.raises(FileError, match="700 bytes of samples where the header says 800"):
        read_audio(cut, 16000)


def test_samples_that_are_no_numbers_are_refused(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.full(400, np.nan), 16000, subtype="FLOAT")
    with pytest.raises(FileError, match="some samples are not finite"):
        read_audio(tmp_path / "a.wav", 16000)


def test_file_that_is_no_audio_is_refused(tmp_path):
    (tmp_path / "a.wav").write_bytes(b"RIFF....junk")
    (tmp_path / "e.wav").write_bytes(b"")
    (tmp_path / "d.wav").mkdir()
    for name in ("a.wav", "e.wav"):
        with pytest.raises(FileError, match=f"{name}: not readable as audio"):
            read_audio(tmp_path / name, 16000)
    for name, found in (("d.wav", "Is a directory"), ("missing.wav", "No such file")):
        with pytest.raises(FileError, match=rf"{name}: not readable \({found}"):
            read_audio(tmp_path / name, 16000)
