"""Images and audio as Hugging Face's extractors make them, CTC, and files that are refused."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import models
from pbjax.errors import FileError, InputError
from pbjax.inference import audio, images
from tests.decoders import DATA, call

VIT = {"size": {"height": 20, "width": 20}}
WAV = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "do_normalize": True}
MELS = {"feature_extractor_type": "ParakeetFeatureExtractor", "feature_size": 24}


@pytest.fixture(scope="module")
def expected():
    with np.load(DATA / "preprocessing.npz") as file:
        return dict(file)


@pytest.fixture
def picture(expected, tmp_path):
    path = tmp_path / "image.png"
    Image.fromarray(expected["pixels"]).save(path)
    return path


@pytest.mark.parametrize(("name", "resample"), [("bilinear", 2), ("bicubic", 3)])
def test_image_is_that_of_hugging_face(expected, picture, name, resample):
    settings = VIT | {"resample": resample, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    found = images.read_image(picture, settings, num_channels=3, name="m")
    np.testing.assert_allclose(found[0], expected[f"image.{name}"], atol=1e-6)


def test_old_settings_have_one_size_and_defaults(expected, picture):
    found = images.read_image(picture, {"size": 20}, num_channels=3, name="m")
    np.testing.assert_allclose(found[0], expected["image.bilinear"], atol=1e-6)


def test_image_with_transparency_and_palette_is_read(picture, tmp_path):
    colours = images.read_image(picture, VIT, num_channels=3, name="m")
    Image.open(picture).convert("RGBA").save(tmp_path / "a.png")
    found = images.read_image(tmp_path / "a.png", VIT, num_channels=3, name="m")
    np.testing.assert_array_equal(found, colours)
    Image.open(picture).convert("P").save(tmp_path / "p.png")
    assert images.read_image(tmp_path / "p.png", VIT, num_channels=3, name="m").shape == (
        1, 3, 20, 20,
    )  # fmt: skip


def test_grey_model_takes_a_grey_image(picture):
    found = images.read_image(picture, VIT, num_channels=1, name="m")
    grey = Image.open(picture).convert("L").resize((20, 20), Image.Resampling.BILINEAR)
    np.testing.assert_allclose(found[0, 0], np.asarray(grey) / 127.5 - 1, atol=1e-6)


def test_settings_can_turn_everything_off(expected, picture):
    off = {"do_resize": False, "do_rescale": False, "do_normalize": False}
    found = images.read_image(picture, off, num_channels=3, name="m")
    np.testing.assert_array_equal(found[0], expected["pixels"].transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": {"shortest_edge": 20}}, "m: size .* height and width are supported"),
        ({"do_center_crop": True}, "m: do_center_crop is set"),
        (VIT | {"resample": 9}, "m: resample .* is 9; 0 to 5"),
        (VIT | {"rescale_factor": "x"}, "m: rescale_factor .* is 'x'; a positive number"),
        (VIT | {"rescale_factor": float("nan")}, "m: rescale_factor .* is nan"),
        (VIT | {"size": 0}, "m: size .* is 0; a positive number"),
        (VIT | {"size": {"height": "a", "width": 8}}, "m: height .* is 'a'"),
        (VIT | {"size": {"height": 8, "width": 8.5}}, "m: width .* is 8.5; a whole number"),
        (VIT | {"image_std": [0, 1, 1]}, "m: image_std .* no 0 to divide by"),
        (VIT | {"image_mean": ["a", 1, 1]}, "m: image_mean .* numbers are needed"),
        (VIT | {"image_mean": [0.5, 0.5]}, "image_mean .* has 2 values; the model takes 3"),
    ],
)
def test_settings_that_are_not_supported_are_refused(picture, settings, message):
    with pytest.raises(InputError, match=message):
        images.read_image(picture, settings, num_channels=3, name="m")


def test_file_that_is_no_image_is_refused(tmp_path):
    (tmp_path / "a.png").write_bytes(b"not an image")
    for name in ("a.png", "missing.png"):
        with pytest.raises(FileError, match=f"{name}: not readable as an image"):
            images.read_image(tmp_path / name, VIT, num_channels=3, name="m")


def test_truncated_image_is_refused(picture):
    picture.write_bytes(picture.read_bytes()[:400])
    with pytest.raises(FileError, match="not readable as an image"):
        images.read_image(picture, VIT, num_channels=3, name="m")


def test_missing_pillow_is_named(picture, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(
        InputError, match=r"Pillow is not installed; .* pip install 'pbjax\[images\]'"
    ):
        images.read_image(picture, VIT, num_channels=3, name="m")


def test_samples_are_normalised_as_hugging_face_does_it(expected):
    samples = (expected["samples"] / 32768).astype(np.float32)
    found = audio.feature_extractor(WAV, "m")(samples)
    np.testing.assert_allclose(found[0], expected["audio.normalised"], atol=1e-5)
    plain = audio.feature_extractor(WAV | {"do_normalize": False}, "m")(samples)
    np.testing.assert_array_equal(plain[0], samples)


def test_log_mels_are_those_of_hugging_face(expected):
    samples = (expected["samples"] / 32768).astype(np.float32)
    found = audio.feature_extractor(MELS, "m")(samples)
    # Theirs has one frame more, which it masks.
    assert not expected["audio.mels"][-1].any()
    np.testing.assert_allclose(found[0], expected["audio.mels"][:-1], atol=2e-5)


def test_spectrogram_of_lasr_is_that_of_hugging_face():
    with np.load(DATA / "lasr" / "mels.npz") as file:
        samples, expected = file["samples"].astype(np.float32) / 32768, file["mels"]
    settings = {"feature_extractor_type": "LasrFeatureExtractor", "feature_size": 16}
    found = audio.feature_extractor(settings, "m")(samples)
    np.testing.assert_allclose(found[0], expected, rtol=1e-6, atol=1e-6)


def test_lasr_has_128_bins_unless_told():
    settings = {"feature_extractor_type": "LasrFeatureExtractor"}
    assert audio.feature_extractor(settings, "m")(np.zeros(560, np.float32)).shape == (1, 2, 128)


def test_audio_without_a_frame_of_lasr_is_refused():
    settings = {"feature_extractor_type": "LasrFeatureExtractor"}
    with pytest.raises(InputError, match="399 samples; a frame is 400"):
        audio.feature_extractor(settings, "m")(np.zeros(399, np.float32))


# Eight frames make one of the model's: after 16 the masked one begins another.
@pytest.mark.parametrize(
    "frames", [15, 16, *(pytest.param(n, marks=pytest.mark.long) for n in (17, 24))]
)
def test_masked_last_frame_is_the_same_as_none_to_the_model(frames):
    model = models.load(DATA / "parakeet")
    values = np.random.default_rng(0).normal(size=(1, frames, 24)).astype(np.float32)
    mask = np.array([[1] * frames + [0]], np.int32)
    more = np.concatenate([values, np.zeros((1, 1, 24), np.float32)], axis=1)
    expected = call(model, input_features=more, attention_mask=mask).logits
    found = call(model, input_features=values).logits
    np.testing.assert_allclose(found, expected[:, : found.shape[1]], atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hop_length": 0.5}, "m: hop_length .* is 0.5; a whole number"),
        ({"sampling_rate": float("inf")}, "m: sampling_rate .* is inf; a positive number"),
        ({"win_length": 1024}, "m: win_length .* is 1024 and n_fft 512"),
    ],
)
def test_frames_that_cannot_be_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        audio.MelSettings.read(change, "m")


def test_features_that_are_not_here_are_refused():
    samples = np.zeros(1000, np.float32)
    with pytest.raises(InputError, match="feature_extractor_type is 'WhisperFeatureExtractor'"):
        audio.feature_extractor({"feature_extractor_type": "WhisperFeatureExtractor"}, "m")(samples)
    with pytest.raises(InputError, match=r"hop_length .* is 0"):
        audio.feature_extractor(MELS | {"hop_length": 0}, "m")(samples)
    with pytest.raises(InputError, match="100 samples make 0 frames"):
        audio.feature_extractor(MELS, "m")(samples[:100])


def collapse(entries, blank):
    """Greedy CTC entry by entry, as it is defined."""
    found, before = [], None
    for entry in entries:
        if entry not in (before, blank):
            found.append(entry)
        before = entry
    return found


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_ctc_drops_repetitions_and_then_blanks(entries):
    scores = np.eye(4, dtype=np.float32)[entries]
    assert audio.ctc_greedy(scores, 2) == collapse(entries, 2)
