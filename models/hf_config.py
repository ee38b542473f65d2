"""Reads the fields of a Hugging Face config.json, each by a rule.

A file may leave out what equals the default of Hugging Face's configuration class, so an absent
field means that default. A field without one is required. Fields that never change inference are on
a list; one warning names all others.
"""

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

from models.errors import CheckpointWarning, ConfigError

# Fields of training, generation and bookkeeping: no forward pass in evaluation mode uses them.
IGNORED = frozenset(
    {
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attention_probs_dropout_prob",
        "attn_pdrop",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "directionality",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "embd_pdrop",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "gradient_checkpointing",
        "hidden_dropout",
        "hidden_dropout_prob",
        "id2label",
        "initializer_range",
        "label2id",
        "language",
        "length_penalty",
        "max_length",
        "min_length",
        "model_type",
        "name",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_labels",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "output_scores",
        "pad_token_id",
        "pooler_fc_size",
        "pooler_num_attention_heads",
        "pooler_num_fc_layers",
        "pooler_size_per_head",
        "pooler_type",
        "prefix",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "resid_pdrop",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tie_word_embeddings",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "typical_p",
        "unk_token_id",
        "use_bfloat16",
        "use_cache",
    }
)


# There is one for each family, which is hashed as itself.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schema:
    """What Hugging Face's configuration class of a family says of its fields.

    Attributes:
      defaults: The value of each field that a file may leave out. The fields of a section, such as
        encoder_config, are among them.
      aliases: Further names under which files may give a field.
    """

    defaults: Mapping[str, object] = field(default_factory=dict)
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def given(self, fields: Mapping[str, object], name: str) -> list[str]:
        """Returns the names under which a file gives a field; none if it leaves it out."""
        return [n for n in (name, *self.aliases.get(name, ())) if n in fields]

    def is_absent(self, fields: Mapping[str, object], name: str) -> bool:
        """Whether a file leaves out a field that has a default."""
        return name in self.defaults and not self.given(fields, name)

    def value(self, fields: Mapping[str, object], name: str) -> object:
        """Returns the value of a field, or its default; None without one."""
        return next((fields[n] for n in self.given(fields, name)), self.defaults.get(name))


class ConfigFields:
    """The fields of one config.json, with a record of those that were read."""

    def __init__(
        self,
        fields: Mapping[str, object],
        origin: str = "config.json",
        schema: Schema | None = None,
    ) -> None:
        """Takes the fields; raises ConfigError for quantised checkpoints.

        Args:
          fields: The parsed JSON object.
          origin: The name of the file, for messages.
          schema: Defaults and further names; None has neither.
        """
        self._fields = fields
        self._origin = origin
        self._schema = schema or Schema()
        self._read: set[str] = set()
        self._sections: list[ConfigFields] = []
        self.exactly("quantization_config", (None,), default=None)

    def error(self, name: str, found: str, allowed: str, action: str) -> ConfigError:
        """Returns the error for one field."""
        if self._schema.is_absent(self._fields, name):
            found = f"absent, which is {found} by Hugging Face's default"
        return ConfigError(f"{self._origin}: {name} is {found}; {allowed}; {action}")

    def count(self, name: str) -> int:
        """Returns a positive whole number, which a file may give by several names."""
        given = self._schema.given(self._fields, name) or [name]
        values = [self._whole(other, self._required(other)) for other in given]
        for other, value in zip(given, values, strict=True):
            if value != values[0]:
                allowed = f"{given[0]} is {values[0]} and means the same"
                raise self.error(other, str(value), allowed, "make both equal")
        return values[0]

    def divisor(self, name: str, *, of: str, size: int) -> int:
        """Returns a positive whole number that divides the size of another field."""
        value = self.count(name)
        if size % value:
            raise self.error(name, str(value), f"it must divide {of} {size}", "correct it")
        return value

    def count_or(self, name: str, default: int) -> int:
        """Returns a positive whole number; an absent or null field has the default."""
        value = self._optional(name, None)
        return default if value is None else self._whole(name, value)

    def counts(self, name: str) -> tuple[int, ...]:
        """Returns a list of positive whole numbers."""
        values = self._required(name)
        if not isinstance(values, list | tuple) or not values:
            allowed = "a list of positive whole numbers is needed"
            raise self.error(name, repr(values), allowed, "correct it")
        return tuple(self._whole(name, value) for value in values)

    def index_or(self, name: str, default: int) -> int:
        """Returns a whole number that is not negative; an absent or null field has the default."""
        value = self._optional(name, None)
        value = default if value is None else value
        return 0 if value == 0 and not isinstance(value, bool) else self._whole(name, value)

    def section(self, name: str) -> "ConfigFields | None":
        """Returns the fields of an inner object, of the same schema; None if absent or null."""
        value = self._optional(name, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, repr(value), "an object is needed", "correct it")
        section = ConfigFields(value, f"{self._origin}: {name}", self._schema)
        self._sections.append(section)
        return section

    def empty(self, name: str) -> "ConfigFields":
        """Returns an inner object that the file leaves out, every field of which is a default."""
        return ConfigFields({}, f"{self._origin}: {name}", self._schema)

    @property
    def model_type(self) -> object:
        """The name of the family; None if it is absent."""
        return self._fields.get("model_type")

    def has(self, name: str) -> bool:
        """Whether a field is present and not null."""
        return self._fields.get(name) is not None

    def positive(self, name: str) -> float:
        """Returns a positive finite number."""
        value = self._required(name)
        if not _is_finite(value) or value <= 0:
            raise self.error(name, repr(value), "a positive number is needed", "correct it")
        return float(value)

    def pair(self, name: str) -> tuple[float, float]:
        """Returns a list of two finite numbers."""
        values = self._required(name)
        numeric = isinstance(values, list | tuple) and all(map(_is_finite, values))
        if not numeric or len(values) != 2:
            raise self.error(name, repr(values), "a list of two numbers is needed", "correct it")
        return float(values[0]), float(values[1])

    def one_of[T](self, name: str, allowed: Mapping[str, T], default: str | None = None) -> T:
        """Returns the mapped value of a string field; `default` None takes that of the schema."""
        value = self._required(name) if default is None else self._optional(name, default)
        if not isinstance(value, str) or value not in allowed:
            names = ", ".join(map(repr, sorted(allowed)))
            raise self.error(name, repr(value), f"supported are {names}", "use another checkpoint")
        return allowed[value]

    def exactly(self, name: str, allowed: Iterable[object], default: object) -> None:
        """Raises ConfigError unless a field, or its default, has an allowed value."""
        value = self._optional(name, default)
        # 0 and False are different values in a configuration, though equal in Python.
        if not any(value == other and type(value) is type(other) for other in allowed):
            names = " or ".join(map(repr, allowed))
            action = "this kind of model is not supported, use another checkpoint"
            raise self.error(name, repr(value), f"only {names} is supported", action)

    def refuse(self, *names: str) -> None:
        """Raises ConfigError if a field is true; an absent field is false."""
        for name in names:
            self.exactly(name, (False,), default=False)

    def flag(self, name: str) -> bool:
        """Returns a boolean field."""
        value = self._required(name)
        if not isinstance(value, bool):
            raise self.error(name, repr(value), "true or false is needed", "correct it")
        return value

    def num_labels(self) -> int:
        """Returns the number of classes of a head: the entries of id2label, or num_labels, or 2."""
        value = self._optional("id2label", None)
        if value is None:
            return self.count_or("num_labels", 2)
        if not isinstance(value, dict) or not value:
            allowed = "an object with one entry for each label is needed"
            raise self.error("id2label", repr(value), allowed, "correct it")
        return len(value)

    def ignore(self, *names: str) -> None:
        """Marks fields of one family as known and without effect on a forward pass."""
        self._read.update(names)

    def architecture(self, allowed: Iterable[str], default: str) -> str:
        """Returns the class that saved the checkpoint."""
        value = self._optional("architectures", None)
        if value is None:
            return default
        for name in allowed:
            if value == [name]:
                return name
        supported = f"supported are {', '.join(sorted(allowed))}, one alone"
        raise self.error("architectures", repr(value), supported, "use another checkpoint")

    def warn_unknown(self) -> None:
        """Warns once about all fields that were neither read nor known to be harmless.

        Each section that was read gives a warning of its own.
        """
        for section in self._sections:
            section.warn_unknown()
        unknown = sorted(set(self._fields) - self._read - IGNORED)
        if unknown:
            message = f"{self._origin}: unknown fields are ignored: {', '.join(unknown)}"
            warnings.warn(message, CheckpointWarning, stacklevel=2)

    def _whole(self, name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
            allowed = "a positive whole number below 2**31 is needed"
            raise self.error(name, repr(value), allowed, "correct it")
        return value

    def _required(self, name: str) -> object:
        self._read.add(name)
        if name in self._fields:
            return self._fields[name]
        if name not in self._schema.defaults:
            raise self.error(name, "missing", "it has no default", "add it to the file")
        return self._schema.defaults[name]

    def _optional(self, name: str, default: object) -> object:
        self._read.add(name)
        return self._fields.get(name, default)


def _is_finite(value: object) -> TypeGuard[int | float]:
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return numeric and math.isfinite(value)
