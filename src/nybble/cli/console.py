"""Where commands write: rich's console, with lines as long as they need to be wherever no terminal limits them."""

from __future__ import annotations

import sys
from typing import NoReturn

from rich.console import Console

_WIDE = 400


class Plain(Console):
    """A console that prints text as it is."""

    def __init__(self, stderr: bool = False) -> None:
        terminal = (sys.stderr if stderr else sys.stdout).isatty()
        super().__init__(stderr=stderr, width=None if terminal else _WIDE, highlight=False, markup=False)

    def on_broken_pipe(self) -> NoReturn:
        """Leave the case of a reader that went away to the one place that ends every command."""
        raise BrokenPipeError
