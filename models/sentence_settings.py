"""What a sentence-transformers folder says beside its encoder: pooling, layers, length, prompts.

The files are modules.json, the folders that it names, sentence_bert_config.json and
config_sentence_transformers.json. Every module is read, or refused by name. Not here: the pooling
itself, which is `pbjax.inference.pooling`.

Source: sentence-transformers 6.2, `base/model.py` and the files of its modules.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from safetensors.numpy import save_file

from models.errors import ConfigError, KeyMismatchError
from models.hf_folder import SAFETENSORS, find_folder, read_headers, read_json, read_json_list
from models.orbax_folder import CONFIG
from models.stored_tensors import NUMPY_DTYPES, map_tensor

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
ENCODER, TOKENIZER_CONFIG = "sentence_bert_config.json", "tokenizer_config.json"
# The names of modes in older files, in the order in which their vectors are joined.
LEGACY_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
POOLING_KEYS = (
    *LEGACY_POOLING,
    "pooling_mode",
    "include_prompt",
    "embedding_dimension",
    "word_embedding_dimension",
)
DENSE_KEYS = (
    "in_features",
    "out_features",
    "bias",
    "activation_function",
    "module_input_name",
    "module_output_name",
    "use_residual",
)
VECTORS = "sentence_embedding"  # what a module reads and writes
# What transformers writes for a tokenizer without a limit is some 1e30.
NO_LIMIT = 10**9
NORM_EPS, LENGTH_EPS = 1e-5, 1e-12  # torch's defaults

type Vectors = Float[np.ndarray, "texts D"]

ACTIVATIONS: dict[str, Callable] = {
    "activation.GELU": partial(jax.nn.gelu, approximate=False),
    "activation.ReLU": jax.nn.relu,
    "activation.SiLU": jax.nn.silu,
    "activation.Sigmoid": jax.nn.sigmoid,
    "activation.Tanh": jnp.tanh,
    "linear.Identity": lambda values: values,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A module after the pooling.

    Attributes:
      name: Its class in sentence-transformers.
      apply: Computes it, in f32.
      width: Values of the vectors that it takes; None = any.
    """

    name: str
    apply: Callable[[Vectors], Vectors]
    width: int | None = None


def unit(vectors: Vectors) -> Vectors:
    """Scales vectors to length one; zeros stay."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.maximum(lengths, LENGTH_EPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceSettings:
    """How texts become vectors; the defaults are those of a folder that says nothing.

    Attributes:
      pooling: Names of sentence-transformers' modes, whose vectors are joined.
      include_prompt: Whether the tokens of a prompt are pooled too.
      layers: What follows the pooling, in order.
      max_tokens: Longer texts are cut; None = at the model's longest sequence.
      lower_case: Whether texts are lower-cased before the tokenizer.
      prompts: Texts to put before each text, by name.
      default_prompt: The name of the one that is used unless another is chosen; None = none.
    """

    pooling: tuple[str, ...] = ("mean",)
    include_prompt: bool = True
    layers: tuple[Layer, ...] = (Layer(name="Normalize", apply=unit),)
    max_tokens: int | None = None
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


def load_sentence_settings(folder: str | Path, *, allow_pickle: bool = False) -> SentenceSettings:
    """Reads how a folder's texts become vectors.

    Args:
      folder: A Hugging Face folder or one of `convert`. Without modules.json the mean of the token
        vectors is taken and scaled to length one.
      allow_pickle: Whether pytorch_model.bin of a module is read in the absence of safetensors.

    Returns:
      The settings, for `pbjax.inference.embedding.embed(settings=)`.

    Raises:
      CheckpointError: A file is corrupt.
      ConfigError: A module, or one of its settings, is not supported; the message names it.
      KeyMismatchError: The tensors of a module are not those that it needs.
    """
    path = find_folder(folder)
    max_tokens, lower_case = _tokenization(path)
    if not (path / MODULES).is_file():
        return SentenceSettings(max_tokens=max_tokens, lower_case=lower_case)
    modules = list(_modules(path))
    pooling, include_prompt = _pooling(_encoder_and_pooling(path, modules))
    layers = (_layer(kind, place, allow_pickle) for kind, place in modules[2:])
    prompts, default_prompt = _prompts(path)
    return SentenceSettings(
        pooling=pooling,
        include_prompt=include_prompt,
        layers=tuple(layer for layer in layers if layer is not None),
        max_tokens=max_tokens,
        lower_case=lower_case,
        prompts=prompts,
        default_prompt=default_prompt,
    )


def copy_sentence_files(source: Path, target: Path, *, allow_pickle: bool = False) -> None:
    """Copies the files that `load_sentence_settings` reads; pickled tensors become safetensors."""
    for name in (MODULES, PROMPTS, ENCODER):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    modules = _modules(source) if (source / MODULES).is_file() else ()
    for _, place in modules:
        if place == source or not place.is_dir():
            continue
        copy = target / place.relative_to(source)
        copy.mkdir(parents=True)
        for name in (CONFIG, SAFETENSORS.single):
            if (place / name).is_file():
                shutil.copyfile(place / name, copy / name)
        pickled = any(file.suffix == ".bin" for file in place.iterdir())
        if allow_pickle and pickled and not (copy / SAFETENSORS.single).is_file():
            save_file(_tensors(place, allow_pickle), copy / SAFETENSORS.single)


def _modules(path: Path) -> Iterator[tuple[str, Path]]:
    """Yields the class and the folder of every module; a class of others has its whole name."""
    file = path / MODULES
    for entry in read_json_list(file):
        kind, place = (entry.get("type"), entry.get("path")) if isinstance(entry, dict) else (0, 0)
        if not isinstance(kind, str) or not isinstance(place, str):
            raise ConfigError(
                f"{file}: an entry is {entry!r}; type and path are needed, both texts; correct it"
            )
        if Path(place).is_absolute() or ".." in Path(place).parts:
            raise ConfigError(
                f"{file}: a module lies in {place!r}; a folder in that of the model is allowed;"
                " move it there"
            )
        ours = kind.startswith("sentence_transformers.")
        yield (kind.rsplit(".", 1)[-1] if ours else kind), path / place


def _encoder_and_pooling(path: Path, modules: list[tuple[str, Path]]) -> Path:
    """Returns the folder of the pooling, if the first two modules are those that are supported."""
    kinds = [kind for kind, _ in modules]
    if kinds[:2] != ["Transformer", "Pooling"]:
        found = ", ".join(kinds[:2]) or "none"
        raise ConfigError(
            f"{path / MODULES}: the first modules are {found}; Transformer and Pooling are"
            " supported; use sentence-transformers for this model"
        )
    if modules[0][1] != path:
        raise ConfigError(
            f"{path / MODULES}: the Transformer lies in {modules[0][1].name}; one in the folder"
            f" itself is read; move its files to {path} and make its path empty"
        )
    return modules[1][1]


def _tokenization(path: Path) -> tuple[int | None, bool]:
    """Returns the most tokens of a text, and whether texts are lower-cased."""
    file = path / ENCODER
    fields = read_json(file) if file.is_file() else {}
    text_only = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
    allowed = {
        "max_seq_length": None,
        "do_lower_case": None,
        "unpad_inputs": None,
        "transformer_task": "feature-extraction",
        "modality_config": text_only,
        "module_output_name": "token_embeddings",
    }
    for key, value in fields.items():
        if value in (None, {}) or (key in allowed and allowed[key] in (None, value)):
            continue
        raise ConfigError(
            f"{file}: {key} is {value!r}; {' and '.join(allowed)} of a text encoder are supported;"
            " use sentence-transformers for this model"
        )
    longest = fields.get("max_seq_length")
    if longest is None and (path / TOKENIZER_CONFIG).is_file():
        longest = read_json(path / TOKENIZER_CONFIG).get("model_max_length")
        longest = None if isinstance(longest, int | float) and longest > NO_LIMIT else longest
    if longest is not None and (type(longest) is not int or longest < 1):
        raise ConfigError(
            f"{path}: the longest text has {longest!r} tokens; a number from 1 on is needed;"
            f" correct max_seq_length of {ENCODER}, or model_max_length of {TOKENIZER_CONFIG}"
        )
    return longest, bool(fields.get("do_lower_case"))


def _pooling(place: Path) -> tuple[tuple[str, ...], bool]:
    """Returns the modes of a Pooling, and whether a prompt's tokens are pooled."""
    file = place / CONFIG
    fields = read_json(file)
    _check_keys(file, fields, POOLING_KEYS)
    modes = fields.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in LEGACY_POOLING.items() if fields.get(key)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    known = tuple(LEGACY_POOLING.values())
    if not isinstance(modes, list) or not modes or not all(mode in known for mode in modes):
        raise ConfigError(
            f"{file}: pooling_mode is {modes!r}; {', '.join(known)} are supported; use"
            " sentence-transformers for this model"
        )
    return tuple(map(str, modes)), fields.get("include_prompt") is not False


def _prompts(path: Path) -> tuple[dict[str, str], str | None]:
    """Returns the prompts by name, and the name of the default one."""
    file = path / PROMPTS
    fields = read_json(file) if file.is_file() else {}
    if (kind := fields.get("model_type", "SentenceTransformer")) != "SentenceTransformer":
        raise ConfigError(
            f"{file}: a {kind}; a SentenceTransformer is supported; use sentence-transformers for"
            " this model"
        )
    prompts = fields.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(
        isinstance(text, str | None) for text in prompts.values()
    ):
        raise ConfigError(
            f"{file}: prompts is {prompts!r}; a text for each name is needed; correct it"
        )
    # sentence-transformers knows these two names in every model.
    texts = {"query": "", "document": ""} | {name: text or "" for name, text in prompts.items()}
    default = fields.get("default_prompt_name")
    if default is not None and (not isinstance(default, str) or default not in texts):
        raise ConfigError(
            f"{file}: default_prompt_name is {default!r}; prompts are {', '.join(texts)}; name one"
            " of them"
        )
    return texts, default


def _layer(kind: str, place: Path, allow_pickle: bool) -> Layer | None:
    """Returns a module after the pooling; None for one that changes nothing when used."""
    file = place / CONFIG
    fields = read_json(file) if file.is_file() else {}
    if kind == "Dropout":
        return None
    if kind == "Normalize":
        _check_keys(file, fields, ("module_input_name", "module_output_name"))
        _check_names(file, fields)
        return Layer(name=kind, apply=unit)
    if kind == "LayerNorm":
        _check_keys(file, fields, ("dimension",))
        return _norm(place, _size(file, fields, "dimension"), allow_pickle)
    if kind == "Dense":
        _check_keys(file, fields, DENSE_KEYS)
        _check_names(file, fields)
        return _dense(place, fields, allow_pickle)
    raise ConfigError(
        f"{place.parent / MODULES}: module {kind} is not supported; after Transformer and Pooling"
        " these are: Dense, Dropout, LayerNorm, Normalize; use sentence-transformers for this model"
    )


def _dense(place: Path, fields: Mapping[str, object], allow_pickle: bool) -> Layer:
    file = place / CONFIG
    inputs, outputs = (_size(file, fields, f"{side}_features") for side in ("in", "out"))
    name = fields.get("activation_function", "torch.nn.modules.activation.Tanh")
    activation = ACTIVATIONS.get(str(name).removeprefix("torch.nn.modules."))
    if activation is None:
        known = ", ".join(key.rsplit(".", 1)[-1] for key in ACTIVATIONS)
        raise ConfigError(
            f"{file}: activation_function is {name}; {known} of torch.nn are supported; use"
            " sentence-transformers for this model"
        )
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (outputs, inputs)}
    if fields.get("bias", True):
        shapes["linear.bias"] = (outputs,)
    residual = fields.get("use_residual") is True
    if residual and inputs != outputs:
        shapes["residual.weight"] = (outputs, inputs)
    tensors = _tensors(place, allow_pickle, shapes)
    weight, bias = tensors["linear.weight"].T, tensors.get("linear.bias", np.float32(0))
    shortcut = tensors.get("residual.weight", np.eye(inputs, dtype=np.float32)).T

    def apply(vectors: Vectors) -> Float[np.ndarray, "texts F"]:
        found = np.asarray(activation(vectors @ weight + bias))
        return found + vectors @ shortcut if residual else found

    return Layer(name="Dense", apply=apply, width=inputs)


def _norm(place: Path, width: int, allow_pickle: bool) -> Layer:
    shapes = {"norm.weight": (width,), "norm.bias": (width,)}
    tensors = _tensors(place, allow_pickle, shapes)

    def apply(vectors: Vectors) -> Vectors:
        centred = vectors - vectors.mean(axis=-1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + NORM_EPS)
        return centred / deviation * tensors["norm.weight"] + tensors["norm.bias"]

    return Layer(name="LayerNorm", apply=apply, width=width)


def _tensors(
    place: Path, allow_pickle: bool, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, np.ndarray]:
    """Returns a module's tensors in f32, which must have exactly the given shapes, if any."""
    headers = read_headers(place, allow_pickle=allow_pickle)
    found = {key: header.shape for key, header in headers.items()}
    if shapes is not None and found != shapes:
        raise KeyMismatchError(
            f"{place}: the tensors are {found}; {dict(shapes)} are needed; fetch the folder again"
        )
    if other := [header for header in headers.values() if header.dtype not in NUMPY_DTYPES]:
        raise ConfigError(
            f"{place}: {other[0].key} is {other[0].dtype}; {', '.join(NUMPY_DTYPES)} are supported;"
            " convert it"
        )
    return {key: map_tensor(header).astype(np.float32) for key, header in headers.items()}


def _size(file: Path, fields: Mapping[str, object], key: str) -> int:
    value = fields.get(key)
    if type(value) is not int or value < 1:
        raise ConfigError(f"{file}: {key} is {value!r}; a number from 1 on is needed; correct it")
    return value


def _check_names(file: Path, fields: Mapping[str, object]) -> None:
    """Refuses a module that works on the vectors of tokens, or writes beside the text's vector."""
    for key in ("module_input_name", "module_output_name"):
        if (value := fields.get(key)) not in (None, VECTORS):
            raise ConfigError(
                f"{file}: {key} is {value!r}; {VECTORS} is supported; use sentence-transformers for"
                " this model"
            )


def _check_keys(file: Path, fields: Mapping[str, object], known: tuple[str, ...]) -> None:
    if unknown := sorted(set(fields) - set(known)):
        raise ConfigError(
            f"{file}: {', '.join(unknown)} is not known; {', '.join(known)} are supported; use"
            " sentence-transformers for this model"
        )
