"""Typed configuration from YAML: `base` inheritance, dotted overrides, and every mistake reported with its line.

    nodes.read    files, bases and overrides -> one tree, whose every value knows where it was written
    load          the tree -> frozen dataclasses, by their type hints
    render        back to text, with the origin of each value

A value is read as the type it is for, not as YAML would guess: `3e-4` is a number, `2024-01-01` a text.
Nothing here knows a knob; `config.py` says what may be written.
"""

import contextlib
import dataclasses
import difflib
import math
import os
import re
import typing
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import yaml
from etils import epath

from maxds import nodes
from maxds.nodes import ConfigError, Node, did_you_mean

MAX_MISSING_LINES = 5  # a section that lacks more keys than this says so in one line

T = TypeVar("T")


def load(cls: type[T], path: str | os.PathLike, overrides: Iterable[str] = ()) -> tuple[T, Node]:
    """Reads the YAML file `path` (or gs://…) and its bases into a `cls`, after `overrides` such as `optimizer.lr=3e-4`.

    Returns the config, and the tree it was built from, which `render` needs. Raises ConfigError with every mistake.
    """
    mistakes: list[str] = []
    tree = nodes.read(epath.Path(path), overrides, mistakes)
    config = _Builder(cls, mistakes).section(cls, tree, "")
    if mistakes:
        raise ConfigError(*mistakes)
    return config, tree


class _Builder:
    """Nodes -> dataclasses. What a method returns is of use only where it reported no mistake."""

    def __init__(self, cls: Any, mistakes: list[str]):
        self.known = list(_dotted_names(cls))
        self.mistakes = mistakes

    def section(self, cls: Any, node: Node, path: str) -> Any:
        before, hints, values, missing = len(self.mistakes), typing.get_type_hints(cls), {}, []
        self._report_unknown(hints, node, path)
        for name, hint in hints.items():
            if name in node.value:
                values[name] = self.value(hint, node.value[name], _dot(path, name))
            elif not _is_required(cls, name):
                continue
            elif dataclasses.is_dataclass(hint):
                values[name] = self.section(hint, dataclasses.replace(node, value={}), _dot(path, name))
            else:
                missing.append(name)
        self._report_missing(missing, node, path)
        if len(self.mistakes) > before:
            return None
        try:
            return cls(**values)
        except ValueError as error:  # from a check between keys, which knows the meaning but not the place
            prefix = f"{path}: " if path else ""
            self.mistakes += [f"{_culprit(line, node).origin}: {prefix}{line}" for line in str(error).splitlines()]

    def value(self, hint: Any, node: Node, path: str) -> Any:
        kind = _without_none(hint)
        item = typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else None
        match node.value:
            case None if kind is not hint:
                return None
            case dict() if dataclasses.is_dataclass(kind):
                return self.section(kind, node, path)
            case list(items) if item:
                return tuple(self.value(item, n, f"{path}[{i}]") for i, n in enumerate(items))
            case str() if item and not dataclasses.is_dataclass(item):
                return (self.value(item, node, path),)  # one scalar where a list of them may stand
            case str(text):
                with contextlib.suppress(ValueError):
                    return _scalar(kind, text, node.quoted)
        meant = did_you_mean(difflib.get_close_matches(str(node), _choices(kind), n=1))
        self.mistakes.append(f"{node.origin}: {path} must be {_describe(hint)}, not {node}{meant}")

    def _report_unknown(self, names: Iterable[str], node: Node, path: str) -> None:
        for key in node.value:
            if key not in names:
                elsewhere = [known for known in self.known if f".{known}".endswith(f".{key}")]
                near = [_dot(path, name) for name in difflib.get_close_matches(key, names, n=1)]
                meant = did_you_mean(elsewhere or near)
                self.mistakes.append(f"{node.value[key].origin}: unknown key {_dot(path, key)}{meant}")

    def _report_missing(self, names: list[str], node: Node, path: str) -> None:
        if len(names) > MAX_MISSING_LINES:
            self.mistakes.append(f"{node.origin}: {path or 'config'} lacks {len(names)} keys: {', '.join(names)}")
        else:
            self.mistakes += [f"{node.origin}: missing {_dot(path, name)}" for name in names]


def _culprit(message: str, section: Node) -> Node:
    """Of the values that a failed check names as `key=`, the one written nearest the user; or else the section."""
    named = [node for key in re.findall(r"([\w.]+)=", message) if (node := section.find(key))]
    return min(named, key=lambda node: node.distance, default=section)


def _scalar(kind: Any, text: str, quoted: bool) -> Any:
    """Raises ValueError where `text` is not a `kind`."""
    if kind is str or text in _choices(kind):
        return text
    if quoted or kind not in _PARSERS:
        raise ValueError
    return _PARSERS[kind](text)


def _integer(text: str) -> int:
    """`12`, `1_000`, or an integer in a float's spelling, `1e6`."""
    try:
        return int(text)
    except ValueError:
        number = _number(text)
        if not number.is_integer() or abs(number) > 2**53:  # beyond, a float is not exact
            raise
        return int(number)


def _number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError
    return number


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


_PARSERS = {int: _integer, float: _number, bool: _boolean}
_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def _describe(hint: Any) -> str:
    kind = _without_none(hint)
    if choices := _choices(kind):
        words = ("one of " if len(choices) > 1 else "") + ", ".join(choices)
    else:
        words = _WORDS.get(kind, "a section" if dataclasses.is_dataclass(kind) else "a list")
    return words if kind is hint else f"{words} or null"


def _without_none(hint: Any) -> Any:
    """`X` of `X | None`; any other hint as it is."""
    args = typing.get_args(hint)
    return next(arg for arg in args if arg is not type(None)) if type(None) in args else hint


def _choices(kind: Any) -> tuple[str, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()


def _is_required(cls: Any, name: str) -> bool:
    field = cls.__dataclass_fields__[name]
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _dotted_names(cls: Any, path: str = "") -> Iterator[str]:
    for name, hint in typing.get_type_hints(cls).items():
        yield _dot(path, name)
        if dataclasses.is_dataclass(kind := _without_none(hint)):
            yield from _dotted_names(kind, _dot(path, name))


def _dot(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def render(config: Any, tree: Node) -> str:
    """The whole config as YAML, each value with its origin: `file.yaml:12`, `override` or `default`.

    Loading the text gives an equal config.
    """
    lines = [f"{text:<56}  # {origin}" if origin else text for text, origin in _lines(config, tree, "")]
    return "\n".join(lines) + "\n"


def _lines(section: Any, tree: Node | None, indent: str) -> Iterator[tuple[str, str]]:
    for field in dataclasses.fields(section):
        value, node = getattr(section, field.name), tree and tree.find(field.name)
        start = f"{indent}{field.name}:"
        if dataclasses.is_dataclass(value):
            yield start, ""
            yield from _lines(value, node, f"{indent}  ")
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            yield start, ""
            for item, item_node in zip(value, node.value if node else [None] * len(value), strict=True):
                (first, origin), *rest = _lines(item, item_node, f"{indent}    ")
                yield f"{indent}  - {first.lstrip()}", origin
                yield from rest
        else:
            origin = "default" if node is None else "override" if node.distance < 0 else node.origin
            yield f"{start} {_one_line(plain(value))}", origin


def plain(config: Any) -> Any:
    """The config as dicts, lists, numbers and texts, as JSON and YAML have them."""
    if dataclasses.is_dataclass(config):
        return {field.name: plain(getattr(config, field.name)) for field in dataclasses.fields(config)}
    return [plain(item) for item in config] if isinstance(config, tuple) else config


def diff(old: Any, new: Any, path: str = "") -> list[str]:
    """What differs between two plain configs, such as `optimizer.lr: 0.001 -> 0.002`."""
    match old, new:
        case dict(), dict():
            keys = old | new  # in order, which a set is not
            return [line for k in keys for line in diff(old.get(k, _ABSENT), new.get(k, _ABSENT), _dot(path, k))]
        case [dict(), *_], [dict(), *_] if len(old) == len(new):
            return [line for i in range(len(old)) for line in diff(old[i], new[i], f"{path}[{i}]")]
    return [] if old == new else [f"{path}: {_one_line(old)} -> {_one_line(new)}"]


_ABSENT = object()


class _Dumper(yaml.SafeDumper):
    """Keeps every text on one line."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _represent_text)


def _one_line(value: Any) -> str:
    if value is _ABSENT:
        return "(absent)"
    # Inside a list, a text that holds a comma or a bracket is quoted, and no end of document follows.
    options = {"default_flow_style": True, "width": math.inf, "allow_unicode": True, "sort_keys": False}
    return yaml.dump([value], Dumper=_Dumper, **options).strip()[1:-1]
