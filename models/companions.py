"""The small files beside the weights: stop tokens, labels, preprocessing, the vocabulary of CTC.

A folder of `convert` holds copies of them, and of its source's config.json under another name.
Not here: `models.checkpoint.load_tokenizer`, and the preprocessing itself.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from models.chat import SPECIAL_TOKENS, TEMPLATE
from models.checkpoint import load_tokenizer
from models.errors import CheckpointError, ConfigError
from models.hf_folder import find_folder, read_json
from models.orbax_folder import CONFIG, TOKENIZER, is_ours
from models.sentence_settings import copy_sentence_files, load_sentence_settings

SOURCE_CONFIG = "source_config.json"
GENERATION, VOCABULARY, TOKENIZER_CONFIG = (
    "generation_config.json",
    "vocab.json",
    "tokenizer_config.json",
)
# The names of the file in transformers 4 and 5, and the sections of it that we read.
PREPROCESSORS = (
    ("preprocessor_config.json", ()),
    ("processor_config.json", ("feature_extractor", "image_processor")),
)
# What Hugging Face's configuration classes say of a config.json without eos_token_id.
DEFAULT_STOP_TOKENS = {"bloom": 2, "gpt2": 50256, "llama": 2}
COPIED = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    TEMPLATE,
    SPECIAL_TOKENS,
    GENERATION,
    VOCABULARY,
    *(name for name, _ in PREPROCESSORS),
)


# What needs which files of a folder, by the family.
TEXT = {"bert": "embed", "bloom": "generate", "gpt2": "generate", "llama": "generate"}
SPEECH = ("lasr_ctc", "parakeet_ctc", "wav2vec2-conformer")


def check_companions(
    folder: Path, model_type: str, *, allow_pickle: bool = False
) -> tuple[str, ...]:
    """Reads the files that `copy_companions` copies, so that a broken one is known in time.

    Args:
      folder: A Hugging Face folder.
      model_type: The name of its family.
      allow_pickle: Whether tensors of modules are read from pickles.

    Returns:
      A sentence for each thing that will not work with the folder: what is absent, what needs it,
      and the remedy.

    Raises:
      CheckpointError: A file is broken.
    """
    for name in COPIED:
        if name.endswith(".json") and name != TOKENIZER and (folder / name).is_file():
            read_json(folder / name)
    found = []
    if (folder / TOKENIZER).is_file():
        load_tokenizer(folder)
    elif model_type in TEXT:
        found.append(
            f"{folder / TOKENIZER}: no such file; pbjax {TEXT[model_type]} and --texts need it;"
            " where transformers is installed,"
            " AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) makes it"
        )
    elif model_type in SPEECH and not (folder / VOCABULARY).is_file():
        found.append(
            f"{folder}: no {TOKENIZER} and no {VOCABULARY}; pbjax transcribe needs one of them;"
            " fetch it with the checkpoint"
        )
    if model_type == "bert":
        try:
            load_sentence_settings(folder, allow_pickle=allow_pickle)
        except ConfigError as error:
            found.append(f"pbjax embed will refuse the folder: {error}")
    return tuple(found)


def copy_companions(source: Path, target: Path, *, allow_pickle: bool = False) -> None:
    """Copies those of the files that a Hugging Face folder has into one of our folders."""
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    copy_sentence_files(source, target, allow_pickle=allow_pickle)
    shutil.copyfile(source / CONFIG, target / SOURCE_CONFIG)


def load_stop_tokens(folder: str | Path) -> tuple[int, ...]:
    """Returns the tokens that end a text: eos_token_id of generation_config.json or config.json.

    Args:
      folder: A Hugging Face folder or one of `convert`.

    Returns:
      The tokens, for `pbjax.generate(stop_tokens=)`; the default of Hugging Face's configuration
      class if config.json leaves the field out, and none if it is null.

    Raises:
      CheckpointError: A file is corrupt or the field is no token.
    """
    path = find_folder(folder)
    file = path / GENERATION
    fields = read_json(file) if file.is_file() else {}
    if fields.get("eos_token_id") is None:
        file, fields = _config(path)
    value = fields.get("eos_token_id", DEFAULT_STOP_TOKENS.get(str(fields.get("model_type"))))
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        raise CheckpointError(
            f"{file}: eos_token_id is {value!r}; a token or a list of tokens is needed; correct it"
        )
    return tuple(tokens)


def load_labels(folder: str | Path) -> tuple[str, ...]:
    """Returns the names of a classifier's classes: id2label of config.json.

    Args:
      folder: A Hugging Face folder or one of `convert`.

    Returns:
      The names by number; empty if the file has none.

    Raises:
      CheckpointError: The file is corrupt, or the numbers are not 0, 1, 2 and so on.
    """
    file, fields = _config(find_folder(folder))
    names = fields.get("id2label")
    if names is None:
        return ()
    if not isinstance(names, Mapping) or set(names) != {str(i) for i in range(len(names))}:
        raise CheckpointError(
            f"{file}: id2label does not name each of 0, 1, 2 and so on; every number needs a name;"
            " correct it or remove it"
        )
    return tuple(str(names[str(index)]) for index in range(len(names)))


def load_preprocessor(folder: str | Path) -> dict[str, object]:
    """Returns the settings of images or audio: preprocessor_config.json, or processor_config.json.

    Args:
      folder: A Hugging Face folder or one of `convert`.

    Raises:
      CheckpointError: There is no such file, or it is corrupt.
    """
    path = find_folder(folder)
    for name, parts in PREPROCESSORS:
        if (path / name).is_file():
            fields = read_json(path / name)
            for part in parts:
                if isinstance(section := fields.get(part), dict):
                    return section
            return fields
    raise CheckpointError(
        f"{path}/{PREPROCESSORS[0][0]}: no such file; the preparation of inputs is described there;"
        " fetch it with the checkpoint"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CharacterVocabulary:
    """The contents of wav2vec2's vocab.json: a text for each entry; one separates words."""

    entries: Mapping[int, str]
    word_delimiter: str
    lower_case: bool

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of entries; CTC has already removed repetitions and blanks."""
        joined = "".join(self.entries.get(index, "") for index in ids)
        text = joined.replace(self.word_delimiter, " ").strip()
        return text.lower() if self.lower_case else text


def load_vocabulary(folder: str | Path) -> CharacterVocabulary | tokenizers.Tokenizer:
    """Returns the vocabulary of a CTC model; its method decode(ids) turns entries into text.

    Args:
      folder: A folder with tokenizer.json, or with vocab.json in wav2vec2's form.

    Raises:
      CheckpointError: There is neither, or a file is corrupt.
    """
    path = find_folder(folder)
    if (path / TOKENIZER).is_file():
        return load_tokenizer(path)
    if not (path / VOCABULARY).is_file():
        raise CheckpointError(
            f"{path}: has no {TOKENIZER} and no {VOCABULARY}; one of them is needed to write text;"
            " fetch it with the checkpoint"
        )
    entries = read_json(path / VOCABULARY)
    if not all(isinstance(index, int) for index in entries.values()):
        raise CheckpointError(
            f"{path / VOCABULARY}: some texts have no number; every text needs one; fetch it again"
        )
    file = path / TOKENIZER_CONFIG
    options = read_json(file) if file.is_file() else {}
    return CharacterVocabulary(
        entries={index: text for text, index in entries.items() if isinstance(index, int)},
        word_delimiter=str(options.get("word_delimiter_token", "|")),
        lower_case=options.get("do_lower_case") is True,
    )


def _config(path: Path) -> tuple[Path, Mapping[str, object]]:
    """Returns the path and the fields of the config.json in Hugging Face's form."""
    file = path / CONFIG
    fields = read_json(file)
    if not is_ours(fields):
        return file, fields
    file = path / SOURCE_CONFIG
    return file, read_json(file) if file.is_file() else {}
