"""What we do to a model: one file a method, each a Config and an apply; compose.py says how they are found."""

from nybble.methods.api import Record, quantize_, record
from nybble.methods.compose import Settings, methods
from nybble.methods.select import Skipped

__all__ = ["Record", "Settings", "Skipped", "methods", "quantize_", "record"]
