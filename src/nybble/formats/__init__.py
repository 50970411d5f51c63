"""What a number is: the table of formats, their exact definition, and the same on arrays. Imports no torch."""

from nybble.formats.spec import BlockFormat, ElementFormat, FloatFormat, IntFormat, TableFormat
from nybble.formats.table import block, get, names, rows

__all__ = ["BlockFormat", "ElementFormat", "FloatFormat", "IntFormat", "TableFormat", "block", "get", "names", "rows"]
