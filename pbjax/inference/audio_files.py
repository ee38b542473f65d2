"""Reads a file of audio as the samples that a model of speech takes.

WAV of one channel of 16 bits at the model's rate is read by the standard library, bit for bit.
soundfile decodes every other file and soxr resamples it; both are an extra: pbjax[audio].
"""

import wave
from pathlib import Path

import numpy as np
from jaxtyping import Float

from pbjax.errors import FileError


def read_audio(path: Path, sampling_rate: int) -> Float[np.ndarray, " T"]:
    """Reads a file as one channel of numbers from -1 to 1 at the rate of the model.

    Args:
      path: A WAV, FLAC, OGG or MP3, or any other file that soundfile reads.
      sampling_rate: Sampling rate of the model in samples per second.

    Returns:
      The samples: the mean of the channels, resampled if the file has another rate.

    Raises:
      FileError: The file cannot be read or is incomplete, or needs what is not installed.
    """
    form, samples = _read_wav(path)
    if form != (1, 16, sampling_rate):
        samples = _converted(path, form, sampling_rate)
    if not len(samples):
        raise FileError(f"{path}: no samples; complete audio is needed; record or fetch it again")
    return samples


def _read_wav(path: Path) -> tuple[tuple[int, int, int], Float[np.ndarray, " T"]]:
    """Returns channels, bits and rate, and the 16-bit samples as numbers; zeros if it is no WAV."""
    try:
        with wave.open(str(path), "rb") as file:
            form = (file.getnchannels(), 8 * file.getsampwidth(), file.getframerate())
            needed = file.getnframes() * file.getnchannels() * file.getsampwidth()
            data = file.readframes(file.getnframes())
    except OSError as error:
        raise FileError(
            f"{path}: not readable ({error.strerror}); audio is needed; give its path"
        ) from error
    except (EOFError, wave.Error):
        return (0, 0, 0), np.zeros(0, np.float32)
    if len(data) != needed:
        raise FileError(
            f"{path}: {len(data)} bytes of samples where the header says {needed}; complete audio "
            "is needed; record or fetch it again"
        )
    values = np.frombuffer(data, "<i2" if form[1] == 16 else "u1")
    return form, values.astype(np.float32) / 32768


def _converted(
    path: Path, form: tuple[int, int, int], sampling_rate: int
) -> Float[np.ndarray, " T"]:
    try:
        import soundfile
        import soxr
    except (ImportError, OSError) as error:
        channels, bits, rate = form
        found = (
            f"{channels} channels of {bits} bits at {rate} Hz" if bits else "not readable as WAV"
        )
        raise FileError(
            f"{path}: {found}; without soundfile and soxr only WAV of 1 channel of 16 bits at "
            f"{sampling_rate} Hz is read; install them by pip install 'pbjax[audio]'"
        ) from error
    try:
        values, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except soundfile.SoundFileError as error:
        raise FileError(
            f"{path}: not readable as audio ({error}); WAV, FLAC, OGG and MP3 are allowed; convert "
            f"it, for instance by ffmpeg -i IN -ac 1 -ar {sampling_rate} -c:a pcm_s16le OUT.wav"
        ) from error
    if not np.isfinite(values).all():
        raise FileError(
            f"{path}: some samples are not finite; numbers are needed; record or fetch it again"
        )
    return soxr.resample(values.mean(axis=1), rate, sampling_rate)
