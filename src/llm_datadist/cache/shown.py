"""A readable ``repr`` for small value classes."""

from __future__ import annotations

from typing import ClassVar


class Shown:
    """``repr`` from the public properties named in ``_shown``."""

    _shown: ClassVar[tuple[str, ...]] = ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self._shown)})"
