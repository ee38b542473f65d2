"""Example inputs of `pbjax optimize`: files of the model's own kind, or random values."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from pbjax.arguments import dtype_name
from pbjax.cli.model_folder import Shape, encodes_text
from pbjax.cli.source import Source
from pbjax.errors import FileError, InputError, warn
from pbjax.files import read_bytes

# Tokens of a text where --seq is absent.
TEXT_TOKENS = 64
SHAPE = re.compile(r"([1-9]\d*(?:x[1-9]\d*)*)(?:x([a-z]\w*))?", re.ASCII)
DTYPES = ("float32", "bfloat16", "float16", "int32", "int8", "uint8", "bool")
# What files a model of a kind takes, and what makes them its inputs.
FILES = {"texts": ("--texts", "--ids"), "images": ("--images",), "audio": ("--audio",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomArray:
    """A shape and dtype, to be filled with random values."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command line says of inputs; at most one option gives them.

    Attributes:
      option: The option that gives them, such as "--texts"; empty for random ones.
      paths: The files that it names.
      arrays: The shapes that it names.
      seq: Tokens, samples or frames of a row.
    """

    option: str = ""
    paths: tuple[Path, ...] = ()
    arrays: tuple[RandomArray, ...] = ()
    seq: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Example inputs of a call.

    Attributes:
      rows: How many rows there are; None where any number can be made.
      take: Gives the inputs of a call with so many rows.
      shapes: Gives the same, or their shapes and dtypes where nothing is made yet.
    """

    rows: int | None
    take: Callable[[int], tuple[object, ...]]
    shapes: Callable[[int], tuple[object, ...]]


def fixed(inputs: Sequence[Any]) -> Examples:
    """Inputs that are there, of which the first rows can be taken.

    Raises:
      InputError: They have no rows, or not the same number.
    """
    import jax

    leaves = jax.tree.leaves(inputs)
    found = {leaf.shape[0] if getattr(leaf, "shape", ()) else None for leaf in leaves}
    rows = found.pop() if len(found) == 1 else None
    if rows is None or any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise InputError(
            "optimize(inputs): not arrays of one number of rows; arrays and trees of them with the "
            "batch first are allowed; call pbjax.optimize with batch_axes= from Python"
        )

    def take(count: int) -> tuple[object, ...]:
        return tuple(jax.tree.map(lambda leaf: leaf[:count], tuple(inputs)))

    return Examples(rows=rows, take=take, shapes=take)


def asked_inputs(
    *,
    texts: Path | None,
    images: Sequence[Path],
    audio: Sequence[Path],
    ids: Path | None,
    shapes: Sequence[str],
    seq: int | None,
) -> Asked:
    """Reads the options that give inputs.

    Raises:
      InputError: Several are given, a shape is none, or --seq does not apply.
    """
    paths = {
        "--texts": () if texts is None else (texts,),
        "--images": tuple(images),
        "--audio": tuple(audio),
        "--ids": () if ids is None else (ids,),
    }
    given = [option for option, found in paths.items() if found] + ["--shape"] * bool(shapes)
    if len(given) > 1:
        raise InputError(
            f"{' '.join(given)}: inputs of several kinds; one of them is allowed; leave out the "
            "others"
        )
    option = given[0] if given else ""
    if seq is not None and option in ("--images", "--audio", "--shape"):
        raise InputError(
            f"--seq {seq} {option}: the inputs have lengths of their own; --seq is allowed with "
            "--texts, with --ids and for random inputs; leave it out"
        )
    arrays = tuple(map(_random_array, shapes))
    if len({array.shape[0] for array in arrays}) > 1:
        raise InputError(
            f"--shape {' --shape '.join(shapes)}: their first sizes differ; these are the rows of "
            "the batch and must be equal; write the batch first in each"
        )
    return Asked(option=option, paths=paths.get(option, ()), arrays=arrays, seq=seq)


def _random_array(text: str) -> RandomArray:
    match = SHAPE.fullmatch(text)
    dtype = match and dtype_name(match[2] or "float32")
    if match is None or dtype not in DTYPES:
        raise InputError(
            f"--shape {text or "''"}: not sizes and a dtype; sizes from 1 joined by x, and one of "
            f"{', '.join(DTYPES)}, are allowed; write for instance --shape 96x128xint32"
        )
    return RandomArray(shape=tuple(map(int, match[1].split("x"))), dtype=dtype)


def check_kind(asked: Asked, source: Source) -> None:
    """Refuses inputs of another kind than the model takes.

    Raises:
      InputError: The message says which options the model takes; or the length is too long.
    """
    takes = _options(source)
    if asked.option and asked.option not in takes:
        raise InputError(
            f"optimize({source.name}) {asked.option}: {_described(source)}; "
            f"{' and '.join(takes)} are allowed, and none of them for random inputs; give one of "
            "these"
        )
    longest = getattr(source.shape and source.shape.config, "max_seq_len", None)
    if asked.seq is not None and longest is not None and asked.seq > longest:
        raise InputError(
            f"--seq {asked.seq}: the model has {longest} positions; 1 to {longest} are allowed; "
            "lower it"
        )


def find_examples(asked: Asked, source: Source, limit: int | None) -> Examples | None:
    """Reads files, or prepares random values.

    Args:
      asked: What the command line says.
      source: The model, of which no weights are needed.
      limit: Rows to read of files; None for all.

    Returns:
      The inputs; None where they are random and the model, of a factory, tells no shapes.

    Raises:
      FileError: A file cannot be read.
      InputError: There are fewer rows, or a package is missing.
    """
    if asked.arrays:
        return _random_arrays(asked.arrays, _vocabulary(source))
    if not asked.option:
        return _random_inputs(source.shape, asked.seq)
    read = {"--texts": _texts, "--images": _images, "--audio": _audio, "--ids": _ids}
    arrays = read[asked.option](asked, source, limit)
    return fixed(arrays)


def _random_inputs(shape: Shape | None, seq: int | None) -> Examples | None:
    if shape is None:
        return None
    known, call = shape, partial(shape.call, "forward")
    return Examples(
        rows=None,
        take=lambda rows: tuple(known.values(call(rows, seq))),
        shapes=lambda rows: call(rows, seq).inputs,
    )


def _random_arrays(arrays: Sequence[RandomArray], vocabulary: int | None) -> Examples:
    """Normal numbers; integers are tokens of a known vocabulary, and else 0 or 1, like bools."""
    numbers = np.random.default_rng(0)

    def values(array: RandomArray) -> np.ndarray:
        if "float" in array.dtype:
            drawn = numbers.standard_normal(array.shape, np.float32)
        else:
            largest = vocabulary if array.dtype == "int32" and vocabulary else 2
            drawn = numbers.integers(0, largest, array.shape)
        return drawn.astype(ml_dtypes.bfloat16 if array.dtype == "bfloat16" else array.dtype)

    made = [values(array) for array in arrays]
    return fixed(made)


def _texts(asked: Asked, source: Source, limit: int | None) -> tuple[np.ndarray, ...]:
    from pbjax.inference.texts import encode, read_sentences

    folder, shape = _with_files(source)
    sentences = _first(read_sentences(asked.paths[0], None), limit, asked.option)
    tokenizer = import_module("models").load_tokenizer(folder)
    longest = getattr(shape.config, "max_seq_len", None) or TEXT_TOKENS
    encoded = encode(tokenizer, sentences, asked.seq or min(TEXT_TOKENS, longest))
    return (
        (encoded.input_ids, encoded.attention_mask) if encodes_text(shape) else (encoded.input_ids,)
    )


def _images(asked: Asked, source: Source, limit: int | None) -> tuple[np.ndarray, ...]:
    from pbjax.inference.images import read_image

    folder, shape = _with_files(source)
    settings = import_module("models").load_preprocessor(folder)
    files = _first(_files(asked.paths, asked.option), limit, asked.option)
    read = partial(read_image, num_channels=shape.config.num_channels, name=source.name)
    return (np.concatenate([read(path, settings) for path in files]),)


def _audio(asked: Asked, source: Source, limit: int | None) -> tuple[np.ndarray, ...]:
    from pbjax.inference.audio import feature_extractor
    from pbjax.inference.audio_files import read_audio
    from pbjax.inference.preprocessor import positive_integer

    settings = import_module("models").load_preprocessor(_with_files(source)[0])
    rate = positive_integer(settings, "sampling_rate", 16000, source.name)
    files = _first(_files(asked.paths, asked.option), limit, asked.option)
    samples = [read_audio(path, rate) for path in files]
    longest = max(map(len, samples))  # The others are silent at their ends.
    padded = [np.pad(each, (0, longest - len(each))) for each in samples]
    extract = feature_extractor(settings, source.name)
    return (np.concatenate([extract(each) for each in padded]),)


def _ids(asked: Asked, source: Source, limit: int | None) -> tuple[np.ndarray, ...]:
    rows = _first(_read_ids(asked.paths[0], _vocabulary(source)), limit, asked.option)
    length = asked.seq or max(map(len, rows))
    if cut := sum(len(row) > length for row in rows):
        warn(
            f"optimize(--ids): {cut} of {len(rows)} rows have more than {length} tokens, of which "
            f"the first {length} count; raise --seq for all of them"
        )
    ids, mask = (np.zeros((len(rows), length), np.int32) for _ in range(2))
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = row[:length], 1
    return (ids, mask) if source.shape is not None and encodes_text(source.shape) else (ids,)


def _read_ids(path: Path, vocabulary: int | None) -> list[list[int]]:
    """Rows of token ids: a JSON list of lists, or an array of NumPy's."""
    rows: Any = None
    try:
        if path.suffix == ".npy":
            rows = np.load(path, allow_pickle=False).tolist()
        else:
            rows = json.loads(read_bytes(path).decode("utf-8-sig"))
        fault = _fault(rows, vocabulary)
    except (OSError, ValueError) as error:
        fault = str(error)
    if fault:
        raise FileError(
            f"--ids {path}: {fault}; JSON such as [[1, 2], [3]], or whole numbers of two axes in a "
            ".npy file, are allowed; write rows of token ids"
        )
    return rows


def _fault(rows: Any, vocabulary: int | None) -> str:
    """Why rows are none of token ids; empty if they are."""
    if not (isinstance(rows, list) and rows and all(isinstance(r, list) and r for r in rows)):
        return "not a list of rows with a token in each"
    known = "" if vocabulary is None else f" of {vocabulary:,}"
    for number, row in enumerate(rows):
        for token in row:
            if type(token) is not int or not 0 <= token < (vocabulary or 1 << 31):
                return f"row {number} has {token!r}, which is no token{known}"
    return ""


def _files(paths: Sequence[Path], option: str) -> list[Path]:
    """The files that are named, and those in folders that are named, by name."""
    found = [
        file
        for path in paths
        for file in (sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path])
    ]
    if not found:
        raise FileError(
            f"{option} {paths[0]}: the folder has no files; files, or folders of them, are "
            "allowed; give another"
        )
    return found


def _first[Item](items: Sequence[Item], limit: int | None, option: str) -> Sequence[Item]:
    if limit is not None and len(items) < limit:
        raise InputError(
            f"--batch {limit}: {option} gives {len(items)} rows; 1 to {len(items)} are allowed; "
            "lower it, or give more"
        )
    return items[:limit]


def _with_files(source: Source) -> tuple[Path, Shape]:
    assert source.folder is not None
    assert source.shape is not None  # `check_kind` has refused the others.
    return source.folder, source.shape


def _vocabulary(source: Source) -> int | None:
    known = source.shape is not None and _kind(source.shape) == "texts"
    return source.shape.config.vocab_size if known and source.shape else None


def _kind(shape: Shape) -> str:
    if encodes_text(shape) or hasattr(shape.module, "decode"):
        return "texts"
    return "images" if hasattr(shape.config, "image_size") else "audio"


def _options(source: Source) -> tuple[str, ...]:
    if source.shape is None:
        return ("--ids", "--shape")
    files = FILES[_kind(source.shape)]
    # A preset has neither tokenizer nor settings of images or audio.
    return (*(f for f in files if source.folder is not None or f == "--ids"), "--shape")


def _described(source: Source) -> str:
    if source.shape is None:
        return "what a factory's model takes is known to the factory alone"
    name, kind = type(source.shape.module).__name__, _kind(source.shape)
    if source.folder is None:
        return f"{name} takes {kind}, and a preset has no files to prepare them"
    return f"{name} takes {kind}"
