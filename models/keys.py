"""Matches the tensors of a folder with a model's parameters, strictly in both directions."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from flax import nnx

from models.errors import KeyMismatchError
from models.hf_config import Schema
from models.keymap import Family, Leaf, abstract_parameters, count_parameters
from models.stored_tensors import DTYPES, TensorHeader, map_tensor

LEGACY_ENDINGS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyReport:
    """The correspondence of the tensors of a file and the parameters of a model.

    Attributes:
      description: Model type, class and sizes.
      source_class: The class that saved the file.
      num_read: The number of tensors that fill a parameter.
      missing: Keys that the model needs and the file lacks.
      unexpected: Keys of the file that the model does not know.
      dropped: The number of known tensors without use, by label.
      tied: Keys of tensors that are dropped as they equal another one.
      num_parameters: The number of values read.
      num_expected: The number of values in the model.
      faults: Further faults of shapes and dtypes, one sentence each.
      absent: Sizes that config.json leaves out, with the default of each.
    """

    description: str
    source_class: str
    num_read: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    dropped: Mapping[str, int]
    tied: tuple[str, ...]
    num_parameters: int
    num_expected: int
    faults: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether every parameter has its tensor and every tensor its place."""
        return not (self.missing or self.unexpected or self.faults)

    def lines(self) -> list[str]:
        """Returns the report's first three lines, and one line for each fault."""
        names = ", ".join(f"{label} {count}" for label, count in self.dropped.items())
        dropped = f"{sum(self.dropped.values())} dropped" + (f" ({names})" if names else "")
        return [
            f"config   {self.description}",
            f"keys     {self.num_read} read, {len(self.missing)} missing,"
            f" {len(self.unexpected)} unexpected, {dropped}, {len(self.tied)} tied",
            f"params   {self.num_parameters:,}, expected {self.num_expected:,}",
            *(f"missing     {key}" for key in self.missing),
            *(f"unexpected  {key}" for key in self.unexpected),
            *(f"fault       {fault}" for fault in self.faults),
            *(f"absent      {size}" for size in self.absent if not self.is_exact),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A tensor to be read and the parameter that it fills."""

    header: TensorHeader
    leaf: Leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class Match[C]:
    """A checked folder: its configuration, the tensors to read, and the report."""

    config: C
    sources: tuple[Source, ...]
    report: KeyReport = field(repr=False)


def match[C, M: nnx.Module](
    family: Family[C, M],
    fields: Mapping[str, object],
    headers: Mapping[str, TensorHeader],
    origin: str,
) -> Match[C]:
    """Finds the tensor of every parameter; reads only tied ones.

    Args:
      family: The declarations.
      fields: The fields of config.json.
      headers: The headers of the folder, by their keys in the file.
      origin: The folder, for messages.

    Returns:
      The complete configuration and the tensors to read.

    Raises:
      ConfigError: The configuration is not supported.
      KeyMismatchError: Keys, shapes or dtypes are not exactly those expected; the message is the
        whole report.
    """
    config = family.parse(fields, f"{origin}/config.json")
    current = _current_keys(family, headers, origin)
    config = family.complete(config, fields, frozenset(current))
    sizes = _Sizes(family.schema, fields)
    if (num_layers := family.num_layers(config)) > len(current):
        # Building so many layers only to list their tensors could take hours.
        raise KeyMismatchError(
            f"{origin}: {len(current)} tensors for {num_layers} layers; every layer has"
            " several; config.json and the weights belong to different models, fetch both again"
            + "".join(f"\nabsent      {size}" for size in sizes.absent())
        )
    shapes = abstract_parameters(nnx.eval_shape(lambda: family.build(config, "float32")))
    leaves = {leaf.key: leaf for leaf in family.leaves(config)}
    _check_total(leaves.values(), shapes)
    spare = {key: header for key, header in current.items() if key not in leaves}
    tied, tie_faults = _check_ties(family, fields, spare, current)
    labels = {key: _label(family, key) for key in sorted(set(spare) - set(tied))}
    sources = [Source(header=current[k], leaf=leaf) for k, leaf in leaves.items() if k in current]
    faults = [fault for source in sources for fault in _shape_faults(source, shapes, sizes)]
    faults += [
        fault for key, header in current.items() for fault in _dtype_faults(header, key in leaves)
    ]
    report = KeyReport(
        description=f"{family.model_type}, {_class_name(fields)}: {family.describe(config)}",
        source_class=_class_name(fields),
        num_read=len(sources),
        missing=tuple(sorted(set(leaves) - set(current))),
        unexpected=tuple(spare[key].key for key, label in labels.items() if label is None),
        dropped=dict(Counter(label for label in labels.values() if label is not None)),
        tied=tuple(tied),
        num_parameters=sum(
            math.prod(source.header.shape) for source in sources if not source.leaf.statistic
        ),
        num_expected=count_parameters(
            {leaf.path: shapes[leaf.path] for leaf in leaves.values() if not leaf.statistic}
        ),
        faults=tuple(sorted(faults) + tie_faults),
        absent=sizes.absent(),
    )
    if not report.is_exact:
        raise KeyMismatchError(
            f"{origin}: tensors do not fit the model; every tensor must have its place; report:\n"
            + "\n".join([*report.lines(), "numeric  not run"])
        )
    return Match(config=config, sources=tuple(sources), report=report)


def _current_keys(
    family: Family, headers: Mapping[str, TensorHeader], origin: str
) -> dict[str, TensorHeader]:
    """Returns the headers by key, without the prefix and in the current spelling."""
    prefixed = [key for key in headers if key.startswith(family.prefix)]
    bare = [key for key in headers if _first_part(key) in family.base]
    if prefixed and bare:
        raise KeyMismatchError(
            f"{origin}: {len(prefixed)} tensors have the prefix {family.prefix!r}, {len(bare)} of"
            f" the model lack it; all or none may have it; lacking: {', '.join(sorted(bare))}"
        )
    current: dict[str, TensorHeader] = {}
    for key, header in headers.items():
        inner = key.removeprefix(family.prefix)
        name = _modern(inner if _first_part(inner) in family.base else key)
        if name in current:
            both = " and ".join(sorted((key, current[name].key)))
            raise KeyMismatchError(
                f"{origin}: {both} are two spellings of one tensor; one is allowed; remove one"
            )
        current[name] = header
    return current


def _first_part(key: str) -> str:
    return key.partition(".")[0]


def _modern(key: str) -> str:
    for old, new in LEGACY_ENDINGS.items():
        if key == old or key.endswith(f".{old}"):
            return key.removesuffix(old) + new
    return key


def _check_total(leaves, shapes: Mapping[str, tuple[int, ...]]) -> None:
    paths = [leaf.path for leaf in leaves]
    assert len(set(paths)) == len(paths), "a parameter is filled twice"
    assert set(paths) == set(shapes), f"key map is not total: {set(paths) ^ set(shapes)}"


def _check_ties(
    family: Family,
    fields: Mapping[str, object],
    spare: Mapping[str, TensorHeader],
    current: Mapping[str, TensorHeader],
) -> tuple[list[str], list[str]]:
    """Returns the tied keys, and the faults of those that differ from their counterpart."""
    if not family.schema.value(fields, "tie_word_embeddings"):
        return [], []
    present = [tie for tie in family.ties if tie.key in spare and tie.equals in current]
    faults = [
        f"{current[tie.key].key} differs from {current[tie.equals].key}, to which it is tied"
        for tie in present
        if not _equal(current[tie.key], current[tie.equals])
    ]
    return sorted(tie.key for tie in present), faults


def _equal(first: TensorHeader, second: TensorHeader) -> bool:
    alike = (first.shape, first.dtype) == (second.shape, second.dtype)
    if not alike or first.dtype not in DTYPES:
        return False
    # Bits are compared: a NaN equals itself, and -0.0 is not 0.0.
    one, other = (map_tensor(header) for header in (first, second))
    bits = f"u{one.itemsize}"
    return np.array_equal(one.view(bits), other.view(bits))


def _label(family: Family, key: str) -> str | None:
    return next((d.label for d in family.dropped if re.fullmatch(d.pattern, key)), None)


def _shape_faults(
    source: Source, shapes: Mapping[str, tuple[int, ...]], sizes: "_Sizes"
) -> list[str]:
    header, leaf = source.header, source.leaf
    wanted = leaf.stored_shape(shapes[leaf.path])
    if header.shape == wanted:
        return []
    pairs = zip(leaf.axes, header.shape, wanted, strict=False)
    names = dict.fromkeys(name for name, got, want in pairs if got != want) or leaf.axes
    blamed = ", ".join(f"{name} {sizes.of(name)}" for name in names)
    return [f"{header.key} has shape {list(header.shape)}, wanted {list(wanted)} by {blamed}"]


class _Sizes:
    """The sizes that a config.json gives or leaves out, in the words of messages."""

    def __init__(self, schema: Schema, fields: Mapping[str, object]) -> None:
        self._schema = schema
        # The fields of a section, such as encoder_config, have names of their own.
        inner = fields.get("encoder_config")
        self._fields = {**fields, **inner} if isinstance(inner, dict) else fields

    def of(self, name: str) -> str:
        """Returns the value of a field, which may be in a section, or the number of its entries."""
        inner = name.rpartition(".")[2]
        value = self._schema.value(self._fields, inner)
        if not self._schema.given(self._fields, inner):
            return "(absent)" if value is None else f"{value} (absent, Hugging Face's default)"
        return f"{len(value) if isinstance(value, dict) else value}"

    def absent(self) -> tuple[str, ...]:
        """Returns every size that is left out, with its default."""
        defaults = {
            name: value
            for name, value in self._schema.defaults.items()
            if self._schema.is_absent(self._fields, name)
        }
        return tuple(
            f"{name} is not in config.json and {value} by Hugging Face's default; add what fits"
            for name, value in defaults.items()
            if isinstance(value, int | list) and not isinstance(value, bool)
        )


def _dtype_faults(header: TensorHeader, is_needed: bool) -> list[str]:
    # Old files hold position ids as integers and masks as bytes; both are dropped.
    supported = tuple(DTYPES) if is_needed else (*DTYPES, "I64", "U8", "BOOL")
    if header.dtype in supported:
        return []
    return [f"{header.key} has dtype {header.dtype}; supported are {', '.join(supported)}"]


def _class_name(fields: Mapping[str, object]) -> str:
    names = fields.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "no class named"
