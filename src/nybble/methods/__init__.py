"""What we do to a model: one file a method, each a Config and an apply."""

from nybble.methods.api import Record, methods, quantize_, record
from nybble.methods.select import Skipped

__all__ = ["Record", "Skipped", "methods", "quantize_", "record"]
