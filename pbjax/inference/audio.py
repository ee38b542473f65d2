"""Features of audio for a speech model, and entries of its vocabulary from its scores.

The features of wav2vec2 (normalised samples), of Parakeet (normalised log mel spectrogram) and of
LASR (log mel spectrogram); greedy CTC. Not here: files, which `pbjax.inference.audio_files` reads.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from pbjax.errors import InputError
from pbjax.inference.preprocessor import positive_integer, positive_number

# Parakeet's features add these before the logarithm and to the deviation.
LOG_GUARD, STD_GUARD = 2.0**-24, 1e-5
# LASR's bins lie between these frequencies, and each gives at least this power.
LASR_HERTZ, LASR_FLOOR = (125.0, 7500.0), 1e-5
WAV2VEC2, PARAKEET = "Wav2Vec2FeatureExtractor", "ParakeetFeatureExtractor"
LASR = "LasrFeatureExtractor"


def feature_extractor(
    settings: Mapping[str, object], name: str
) -> Callable[[Float[np.ndarray, " T"]], Float[np.ndarray, "1 ..."]]:
    """Returns the function from samples, numbers from -1 to 1, to features, a batch of one.

    Args:
      settings: The content of preprocessor_config.json.
      name: Name of the checkpoint, for messages.

    Raises:
      InputError: The settings are not supported. The function raises it if the audio is too short.
    """
    kind = settings.get("feature_extractor_type")
    if kind == WAV2VEC2:
        if settings.get("do_normalize", True):
            return lambda samples: normalise(samples)[None]
        return lambda samples: samples[None]
    if kind == PARAKEET:
        parakeet = MelSettings.read(settings, name)
        return lambda samples: log_mels(samples, parakeet)[None]
    if kind == LASR:
        lasr = MelSettings.read({"feature_size": 128, **settings}, name)
        return lambda samples: lasr_log_mels(samples, lasr)[None]
    raise InputError(
        f"{name}: feature_extractor_type is {kind!r}; {WAV2VEC2}, {PARAKEET} and {LASR} are "
        "supported; use such a checkpoint, or compute the features and call the model from Python"
    )


def normalise(samples: Float[np.ndarray, " T"]) -> Float[np.ndarray, " T"]:
    """Shifts and scales samples to mean 0 and variance 1."""
    return ((samples - samples.mean()) / np.sqrt(samples.var() + 1e-7)).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class MelSettings:
    """Settings of a log mel spectrogram.

    Attributes:
      num_mels: Number of bins.
      sampling_rate: Samples per second.
      hop: Samples between the starts of frames.
      fft_size: Samples of a transform.
      window: Samples of a frame, in the middle of the transform.
      preemphasis: Factor on the sample before, which is subtracted from each.
    """

    num_mels: int
    sampling_rate: int
    hop: int
    fft_size: int
    window: int
    preemphasis: float

    @classmethod
    def read(cls, settings: Mapping[str, object], name: str) -> "MelSettings":
        """Reads the fields of a preprocessor_config.json; see `extract_features`."""
        how = cls(
            num_mels=positive_integer(settings, "feature_size", 80, name),
            sampling_rate=positive_integer(settings, "sampling_rate", 16000, name),
            hop=positive_integer(settings, "hop_length", 160, name),
            fft_size=positive_integer(settings, "n_fft", 512, name),
            window=positive_integer(settings, "win_length", 400, name),
            preemphasis=positive_number(settings, "preemphasis", 0.97, name),
        )
        if how.window > how.fft_size:
            raise InputError(
                f"{name}: win_length of preprocessor_config.json is {how.window} and n_fft "
                f"{how.fft_size}; a frame must fit its transform; fetch the file again"
            )
        return how


def log_mels(samples: Float[np.ndarray, " T"], how: MelSettings) -> Float[np.ndarray, "frames _"]:
    """Returns the log mel spectrogram, each bin with mean 0 and variance 1 over the frames.

    A last frame with less than a hop of audio is left out. Hugging Face keeps it as zeros that a
    mask hides, which is the same to the model.

    Raises:
      InputError: There are fewer than two frames.

    Source: Hugging Face's feature_extraction_parakeet.py.
    """
    count = len(samples) // how.hop
    if count < 2:
        raise InputError(
            f"transcribe(): {len(samples)} samples make {count} frames; 2 or more are needed; give "
            "longer audio"
        )
    before = samples[:-1] * np.float32(how.preemphasis)
    samples = np.concatenate([samples[:1], samples[1:] - before])
    padded = np.pad(samples.astype(np.float64), how.fft_size // 2)
    starts = how.hop * np.arange(count)
    frames = padded[starts[:, None] + np.arange(how.fft_size)[None]]
    window, side = np.hanning(how.window), (how.fft_size - how.window) // 2
    window = np.pad(window, (side, how.fft_size - how.window - side))
    power = np.abs(np.fft.rfft(frames * window[None], axis=1)) ** 2
    mels = np.log(power @ mel_filters(how).T + LOG_GUARD)
    mean, std = mels.mean(axis=0, keepdims=True), mels.std(axis=0, ddof=1, keepdims=True)
    return ((mels - mean) / (std + STD_GUARD)).astype(np.float32)


def mel_filters(how: MelSettings) -> Float[np.ndarray, "mels bins"]:
    """Returns triangles over the frequencies of a transform, evenly spaced in mel, of area one.

    Source: Slaney 1998 (Auditory Toolbox), as in librosa: linear below 1 kHz, then logarithmic.
    """
    highest = how.sampling_rate / 2
    edges = _hertz(np.linspace(0.0, float(_mels(highest)), how.num_mels + 2))
    bins = np.linspace(0.0, highest, how.fft_size // 2 + 1)
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rise, fall = (bins[None] - low) / (middle - low), (high - bins[None]) / (high - middle)
    return np.maximum(0.0, np.minimum(rise, fall)) * 2 / (high - low)


def lasr_log_mels(
    samples: Float[np.ndarray, " T"], how: MelSettings
) -> Float[np.ndarray, "frames _"]:
    """Returns the log mel spectrogram of LASR, from frames without padding.

    Raises:
      InputError: The audio is shorter than a frame.

    Source: Hugging Face's feature_extraction_lasr.py.
    """
    count = (len(samples) - how.window) // how.hop + 1
    if count < 1:
        raise InputError(
            f"transcribe(): {len(samples)} samples; a frame is {how.window}, one or more are "
            "needed; give longer audio"
        )
    places = how.hop * np.arange(count)[:, None] + np.arange(how.window)[None]
    frames = samples.astype(np.float64)[places] * np.hanning(how.window)[None]
    power = np.abs(np.fft.rfft(frames, n=how.fft_size, axis=1)) ** 2
    return np.log(np.maximum(power @ lasr_filters(how).T, LASR_FLOOR)).astype(np.float32)


def lasr_filters(how: MelSettings) -> Float[np.ndarray, "mels bins"]:
    """Returns triangles over mels, evenly spaced, of height one, without the mean of a frame.

    Source: HTK's mels, 1127 ln(1 + f / 700), as in Hugging Face's feature_extraction_lasr.py.
    """
    low, high = (1127 * math.log1p(hertz / 700) for hertz in LASR_HERTZ)
    edges = np.linspace(low, high, how.num_mels + 2)[:, None]
    bins = np.linspace(0.0, how.sampling_rate / 2, how.fft_size // 2 + 1)
    mels = 1127 * np.log1p(bins / 700)[None]
    rise = (mels - edges[:-2]) / (edges[1:-1] - edges[:-2])
    fall = (edges[2:] - mels) / (edges[2:] - edges[1:-1])
    filters = np.maximum(0.0, np.minimum(rise, fall))
    filters[:, 0] = 0
    return filters


# Linear up to 1000 Hz, which is 15 mels; then a factor of 6.4 is 27 mels.
KNEE_HZ, KNEE_MELS, STEP = 1000.0, 15.0, math.log(6.4) / 27


def _mels(hertz: float) -> float:
    if hertz < KNEE_HZ:
        return hertz * KNEE_MELS / KNEE_HZ
    return KNEE_MELS + math.log(hertz / KNEE_HZ) / STEP


def _hertz(mels: np.ndarray) -> np.ndarray:
    above = KNEE_HZ * np.exp(STEP * (np.maximum(mels, KNEE_MELS) - KNEE_MELS))
    return np.where(mels < KNEE_MELS, mels * KNEE_HZ / KNEE_MELS, above)


def ctc_greedy(scores: Float[np.ndarray, "T V"], blank: int) -> list[int]:
    """Returns the best entry of every frame, first without repetitions, then without blanks.

    Source: Graves et al. 2006, section 3.2, best path decoding.
    """
    best = scores.argmax(axis=1)
    changes = np.concatenate([[True], best[1:] != best[:-1]])
    return [int(entry) for entry in best[changes] if entry != blank]
