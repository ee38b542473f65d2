"""Reads an image file as the input of a Vision Transformer, by its preprocessor_config.json.

Pillow decodes and resizes; it is an extra: pbjax[images].
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from pbjax.errors import FileError, InputError
from pbjax.inference.preprocessor import positive_integer, positive_number

# Defaults of Hugging Face's ViTImageProcessor, where the file leaves a field out.
MEAN = STD = (0.5, 0.5, 0.5)
BILINEAR = 2
MODES = {1: "L", 3: "RGB"}


def read_image(
    path: Path, settings: Mapping[str, object], *, num_channels: int, name: str
) -> Float[np.ndarray, "1 C height width"]:
    """Reads, resizes, scales and shifts an image.

    Args:
      path: A PNG, a JPEG or any other file that Pillow reads.
      settings: The content of preprocessor_config.json.
      num_channels: 3 for colour, 1 for grey.
      name: Name of the checkpoint, for messages.

    Returns:
      The image as a batch of one.

    Raises:
      FileError: The file cannot be read as an image.
      InputError: Pillow is not installed, or the settings are not supported.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise InputError(
            f"{path}: Pillow is not installed; it decodes images; install it by pip install "
            "'pbjax[images]'"
        ) from error
    if num_channels not in MODES:
        raise InputError(
            f"{name}: the model takes {num_channels} channels; images have 1 or 3; call it from "
            "Python"
        )
    if settings.get("do_center_crop"):
        raise InputError(
            f"{name}: do_center_crop is set; only resizing is supported; cut the image and call "
            "the model from Python"
        )
    resample = settings.get("resample", BILINEAR)
    if not isinstance(resample, int) or resample not in list(Image.Resampling):
        raise InputError(
            f"{name}: resample of preprocessor_config.json is {resample!r}; 0 to 5 are Pillow's "
            "filters; fetch the file again"
        )
    try:
        with Image.open(path) as file:
            image = file.convert(MODES[num_channels])
            if settings.get("do_resize", True):
                height, width = _size(settings, name)
                image = image.resize((width, height), Image.Resampling(resample))
    except (OSError, Image.DecompressionBombError) as error:
        raise FileError(
            f"{path}: not readable as an image ({error}); PNG, JPEG and the like are allowed; give "
            "another file"
        ) from error
    pixels = np.asarray(image, np.float64).reshape(image.height, image.width, num_channels)
    if settings.get("do_rescale", True):
        pixels = pixels * positive_number(settings, "rescale_factor", 1 / 255, name)
    if settings.get("do_normalize", True):
        mean, std = (
            _channels(settings, field, default, num_channels, name)
            for field, default in (("image_mean", MEAN), ("image_std", STD))
        )
        pixels = (pixels - mean) / std
    return pixels.transpose(2, 0, 1)[None].astype(np.float32)


def _size(settings: Mapping[str, object], name: str) -> tuple[int, int]:
    """Height and width; old files have one number for both."""
    size = settings.get("size", 224)
    if isinstance(size, int):
        side = positive_integer({"size": size}, "size", 224, name)
        return side, side
    if isinstance(size, Mapping) and {"height", "width"} <= set(size):
        return positive_integer(size, "height", 224, name), positive_integer(
            size, "width", 224, name
        )
    raise InputError(
        f"{name}: size of preprocessor_config.json is {size!r}; a number or height and width are "
        "supported; resize the image and call the model from Python"
    )


def _channels(
    settings: Mapping[str, object],
    field: str,
    default: Sequence[float],
    num_channels: int,
    name: str,
) -> Float[np.ndarray, "1 1 C"]:
    given = settings.get(field) or default[:num_channels]
    try:
        value = np.asarray(given, np.float64).reshape(-1)
    except (TypeError, ValueError):
        value = np.array([np.nan])
    if not np.isfinite(value).all() or (field == "image_std" and not value.all()):
        raise InputError(
            f"{name}: {field} of preprocessor_config.json is {given!r}; numbers are needed, and no "
            "0 to divide by; fetch the file again"
        )
    if len(value) not in (1, num_channels):
        raise InputError(
            f"{name}: {field} of preprocessor_config.json has {len(value)} values; the model takes "
            f"{num_channels} channels; correct the file"
        )
    return np.broadcast_to(value, num_channels)[None, None]
