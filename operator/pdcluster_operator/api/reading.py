"""From a YAML file to a `PDCluster`, or to one clear `ConfigError`.

YAML hides three faults that are told here by name: a key that stands twice (the last would win), a
word such as `Off` that YAML reads as a boolean, and a field that nobody knows.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pdcluster_operator.api.v1alpha1 import API_VERSION, KIND, Fields, PDCluster
from pdcluster_protocol.errors import ConfigError

FILE_BYTES_MAX = 1 << 20
ERRORS_SHOWN_MAX = 3
DETAIL_CHARACTERS_MAX = 300
NAME_CHARACTERS_MAX = 64
"""A field's name is shown, and compared with the known ones, up to this length."""
_shown = reprlib.Repr()
"""Looks only so deep into a value: aliases of aliases make a short file astronomically long."""
_shown.maxlevel, _shown.maxstring, _shown.maxother, _shown.maxlong = 3, 80, 80, 80


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader that refuses a key standing twice."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> Iterator[dict[Hashable, Any]]:
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                problem = f"the key {_short(key.value)} stands twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
    yield from loader.construct_yaml_map(node)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def load_pdcluster(path: Path) -> PDCluster:
    """Read one object.

    Raises:
        ConfigError: naming the file and, where there is one, the line or the field with its value.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: is larger than {FILE_BYTES_MAX} bytes; this is no PDCluster")
    return parse_pdcluster(raw, source=str(path))


def parse_pdcluster(raw: bytes, *, source: str) -> PDCluster:
    """The object in `raw`; `source` is named in errors.

    Raises:
        ConfigError: as `load_pdcluster`.
    """
    document = _document(raw, source)
    for field, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
        if document.get(field) != expected:
            raise ConfigError(
                f"{source}: {field} is {_short(document.get(field))}; it must be {expected!r}"
            )
    try:
        return PDCluster.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_told(error)}") from error


def _document(raw: bytes, source: str) -> dict[str, object]:
    try:
        documents = list(yaml.load_all(raw, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = str(error.problem)[:DETAIL_CHARACTERS_MAX]
        raise ConfigError(f"{source}: {place}not YAML: {problem}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        problem = str(error).partition("\n")[0][:DETAIL_CHARACTERS_MAX]
        raise ConfigError(f"{source}: not YAML: {problem}") from error
    documents = [document for document in documents if document is not None]
    if len(documents) != 1:
        raise ConfigError(f"{source}: holds {len(documents)} objects; it must hold one {KIND}")
    document = documents[0]
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: is a {type(document).__name__}; it must be a mapping")
    return document


def _told(error: ValidationError) -> str:
    errors = error.errors(include_url=False)
    told = [_one(details) for details in errors[:ERRORS_SHOWN_MAX]]
    if len(errors) > ERRORS_SHOWN_MAX:
        told.append(f"and {len(errors) - ERRORS_SHOWN_MAX} more")
    return "; ".join(told)


def _one(details: ErrorDetails) -> str:
    path = _path(details["loc"])
    value = details["input"]
    match details["type"]:
        case "rule":
            return details["msg"]
        case "missing":
            return f"{path} is missing; it has no default"
        case "extra_forbidden":
            return f"{path} is an unknown field{_suggestion(details['loc'])}"
        case _:
            reason = details["msg"][0].lower() + details["msg"][1:]
            return f"{path} is {_short(value)}: {reason}{_boolean_hint(value, reason)}"


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part[:NAME_CHARACTERS_MAX]}"
    return path.lstrip(".")


def _short(value: object) -> str:
    text = _shown.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _boolean_hint(value: object, reason: str) -> str:
    if isinstance(value, bool) and "'Off'" in reason:
        return ' (YAML reads off as a boolean: write "Off" in quotes)'
    return ""


def _suggestion(location: tuple[int | str, ...]) -> str:
    """The known field that the unknown one looks like, else all known fields."""
    fields: type[Fields] = PDCluster
    for part in location[:-1]:
        inner = _inner(fields, part)
        if inner is None:
            return ""
        fields = inner
    known = sorted(field.alias or name for name, field in fields.model_fields.items())
    close = difflib.get_close_matches(str(location[-1])[:NAME_CHARACTERS_MAX], known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(known)}"


def _inner(fields: type[Fields], part: int | str) -> type[Fields] | None:
    for name, field in fields.model_fields.items():
        if (field.alias or name) == part:
            kind = field.annotation
            return kind if isinstance(kind, type) and issubclass(kind, Fields) else None
    return None
