"""The base of all configurations: reading a config.json, and checks of the sizes."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from models.errors import ConfigError
from models.hf_config import ConfigFields, Schema


class FamilyConfig:
    """The base of the configurations that are read from a Hugging Face config.json.

    Attributes:
      schema: The defaults and further names of the file's fields.
    """

    __slots__ = ()
    schema: ClassVar[Schema]

    @classmethod
    def from_hugging_face[C: "FamilyConfig"](
        cls: type[C], fields: Mapping[str, object], origin: str = "config.json"
    ) -> C:
        """Reads the fields of a config.json and warns about unknown ones.

        A field that the file leaves out has the default of Hugging Face's configuration class.

        Args:
          fields: The parsed JSON object.
          origin: The name of the file, for messages.

        Returns:
          The configuration.

        Raises:
          ConfigError: A field is malformed, asks for something unsupported, or is missing and has
            no default.
        """
        reader = ConfigFields(fields, origin, cls.schema)
        config = cls.read(reader)
        reader.warn_unknown()
        return config

    @classmethod
    def read[C: "FamilyConfig"](cls: type[C], reader: ConfigFields) -> C:
        """Returns the configuration of the fields; each family has its own."""
        raise NotImplementedError


def check_positive(config: Any, *, or_zero: Iterable[str] = ()) -> None:
    """Raises ConfigError unless every number of a configuration is positive.

    Args:
      config: A dataclass; its texts, flags and tuples are not looked at.
      or_zero: Names of the fields that may also be 0.
    """
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    sizes = {name: value for name, value in values.items() if _is_number(value)}
    zeros = {name for name in or_zero if sizes.get(name) == 0}
    if bad := [f"{k} is {v}" for k, v in sizes.items() if not v > 0 and k not in zeros]:
        kind = type(config).__name__
        raise ConfigError(f"{kind}: {', '.join(bad)}; sizes are positive; correct them")


def check_heads(config: Any) -> None:
    """Raises ConfigError unless the heads of a configuration divide its width."""
    if config.embed_dim % config.num_heads:
        raise ConfigError(
            f"{type(config).__name__}: embed_dim is {config.embed_dim} with {config.num_heads}"
            " heads; the heads must divide it; change one of them"
        )


def check_choice(config: object, name: str, allowed: Iterable[str]) -> None:
    """Raises ConfigError unless a field of a configuration has one of the allowed values."""
    value, names = getattr(config, name), list(allowed)
    if value not in names:
        kind = type(config).__name__
        supported = f"supported are {', '.join(names)}"
        raise ConfigError(f"{kind}: {name} is {value!r}; {supported}; choose one")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
