"""YAML files, their bases and overrides as one tree, whose every value remembers where it was written.

    base of the base <- base <- file <- overrides, in their order

Scalars keep their text: what it means depends on the type that is wanted, which `loader` knows.
"""

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any

import yaml
from etils import epath

CONFIGS = epath.Path(__file__).parents[1] / "configs"  # where a `base` is looked up that is not beside its heir
MAX_VALUES = 100_000  # of a file, each time that an alias repeats them counted


class ConfigError(ValueError):
    """Every mistake found in a config, one line each: `file.yaml:12: message` or `override a.b=c: message`."""

    def __init__(self, *mistakes: str):
        super().__init__(*mistakes)
        self.mistakes = mistakes

    def __str__(self):
        return "\n".join(self.mistakes)


@dataclasses.dataclass(frozen=True)
class Node:
    """What one place says."""

    value: Any  # a section: dict[str, Node]; a list: list[Node]; a scalar: its text; null: None
    origin: str  # `file.yaml:12`, or `override a.b=c`
    distance: int  # 0 in the file that is loaded, 1 in its base, 2 in the base of that; -1 in an override
    quoted: bool = False

    def __str__(self):
        words = {dict: "a section", list: "a list", type(None): "null"}
        return words.get(type(self.value)) or (repr(self.value) if self.quoted else self.value)

    def find(self, key: str) -> "Node | None":
        """The node at a dotted key, or None."""
        node = self
        for part in key.split("."):
            if not isinstance(node.value, dict) or part not in node.value:
                return None
            node = node.value[part]
        return node


def read(path: epath.Path, overrides: Iterable[str], mistakes: list[str]) -> Node:
    """The tree of a file over its bases, under `overrides` such as `a.b=c`.

    Raises ConfigError where a file cannot be read; appends to `mistakes` what does not keep the rest from being read.
    """
    tree = _read_file(path, mistakes)
    for override in overrides:
        try:
            tree = _merge(tree, _parse_override(override, mistakes))
        except ConfigError as error:
            mistakes += error.mistakes
    return tree


def _read_file(path: epath.Path, mistakes: list[str], heirs: tuple[epath.Path, ...] = ()) -> Node:
    """The tree of a file over that of its base; `heirs` are the files that led here."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', error)}") from error
    tree = _parse(text, _Source(path.name, len(heirs), mistakes))
    if not isinstance(tree.value, dict):
        content = "nothing" if tree.value is None else tree
        raise ConfigError(f"{path.name}: a config is made of `key: value` lines, but this file holds {content}")
    if (base := tree.value.pop("base", None)) is None:
        return tree
    heirs, found = (*heirs, path.resolve()), _find(base, path)
    if found in heirs:
        raise ConfigError(f"{base.origin}: base cycle: {' -> '.join(p.stem for p in (*heirs, found))}")
    return _merge(_read_file(found, mistakes, heirs), tree)


def _find(base: Node, heir: epath.Path) -> epath.Path:
    if not isinstance(base.value, str):
        raise ConfigError(f"{base.origin}: base must be the name of a config, not {base}")
    name = base.value.removesuffix(".yaml")
    for folder in (heir.parent, CONFIGS):
        if (found := folder / f"{name}.yaml").is_file():
            return found.resolve()
    names = [p.stem for folder in (heir.parent, CONFIGS) for p in folder.glob("*.yaml")]
    meant = did_you_mean(difflib.get_close_matches(name, names, n=1))
    raise ConfigError(f"{base.origin}: there is no base {name}.yaml beside {heir.name} or in configs/{meant}")


def did_you_mean(candidates: list[str]) -> str:
    """The end of a message, empty without candidates."""
    return f"; did you mean {' or '.join(candidates)}?" if candidates else ""


@dataclasses.dataclass(frozen=True)
class _Source:
    """A text to parse: a file, or the value of an override."""

    name: str  # `file.yaml`, or `override a.b=c`
    distance: int  # as in Node
    mistakes: list[str]  # those that do not keep the rest from being read

    def origin(self, mark: yaml.Mark | None) -> str:
        """The place of a mark; an override has no lines."""
        return self.name if self.distance < 0 or mark is None else f"{self.name}:{mark.line + 1}"


def _parse(text: str, source: _Source) -> Node:
    """The text's root. Raises ConfigError where it is not YAML."""
    try:
        root = yaml.compose(text, yaml.SafeLoader)
        if root is None:
            return Node(None, source.name, source.distance)
        if (count := _count(root, {})) > MAX_VALUES:
            raise ConfigError(
                f"{source.name}: its aliases make it {count:.3g} values; write out what is needed of them"
            )
        return _locate(root, source, source.name)
    except yaml.YAMLError as error:
        origin = source.origin(getattr(error, "problem_mark", None))
        reason = getattr(error, "problem", None) or getattr(error, "reason", error)
        raise ConfigError(f"{origin}: not valid YAML: {reason}") from error
    except RecursionError as error:
        raise ConfigError(f"{source.name}: it is nested too deeply, or an alias holds itself; write it flat") from error


def _count(node: yaml.Node, counts: dict[int, int]) -> int:
    """The values of a node, with those that aliases repeat, which can be exponentially many; `counts` knows by id."""
    if id(node) not in counts:
        items = node.value if isinstance(node, yaml.CollectionNode) else []
        inner = [n for item in items for n in (item if isinstance(item, tuple) else (item,))]
        counts[id(node)] = 1 + sum(_count(n, counts) for n in inner)
    return counts[id(node)]


def _parse_override(text: str, mistakes: list[str]) -> Node:
    """The tree of `a.b=c`, whose value is YAML. Raises ConfigError where it is not."""
    source = _Source(f"override {text}", -1, mistakes)
    key, equals, value = text.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise ConfigError(f"{source.name}: expected key=value, such as optimizer.lr=3e-4")
    node = _parse(value, source)
    for part in reversed(parts):
        node = Node({part: node}, source.name, source.distance)
    return node


def _merge(old: Node, new: Node) -> Node:
    """`new` over `old`: sections key by key; a list, a scalar or null replaces what was there."""
    if not (isinstance(old.value, dict) and isinstance(new.value, dict)):
        return new
    merged = old.value | {k: _merge(old.value[k], v) if k in old.value else v for k, v in new.value.items()}
    # A section belongs to the file nearest the user; an override of one key does not make it its own.
    return dataclasses.replace(old if new.distance < 0 else new, value=merged)


def _locate(node: yaml.Node, source: _Source, origin: str) -> Node:
    """A value's line is that of its key: where a section begins, not where its first key stands."""
    if isinstance(node, yaml.ScalarNode):
        null = node.tag == "tag:yaml.org,2002:null"
        return Node(None if null else node.value, origin, source.distance, quoted=bool(node.style))
    if isinstance(node, yaml.SequenceNode):
        items = [_locate(item, source, source.origin(item.start_mark)) for item in node.value]
        return Node(items, origin, source.distance)
    return Node(_locate_section(node, source), origin, source.distance)


def _locate_section(node: yaml.Node, source: _Source) -> dict[str, Node]:
    section: dict[str, Node] = {}
    for key, value in node.value:
        origin = source.origin(key.start_mark)
        if not isinstance(key, yaml.ScalarNode):
            source.mistakes.append(f"{origin}: a key must be a word; quote a text that begins with {{ or [")
        elif key.value in section:
            source.mistakes.append(f"{origin}: duplicate key {key.value}, set before at {section[key.value].origin}")
        else:
            section[key.value] = _locate(value, source, origin)
    return section
