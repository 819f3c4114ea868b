"""What sections of a config are: frozen dataclasses that check themselves."""

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def section(cls: type[T]) -> type[T]:
    """A frozen dataclass; type checkers see its keys."""
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


def require(*checks: tuple[bool, str]) -> None:
    """Raises one ValueError that lists the message of every check that does not hold."""
    if failed := [message for holds, message in checks if not holds]:
        raise ValueError("\n".join(failed))


def positive(section: Any, names: str) -> Iterator[tuple[bool, str]]:
    """For `require`: that values of a section are positive. What has a `?` after its name may be null, too."""
    for name in names.split():
        value = getattr(section, key := name.rstrip("?"))
        nullable = key != name
        yield (nullable and value is None) or value > 0, f"{key}={value} must be positive" + ", or null" * nullable
