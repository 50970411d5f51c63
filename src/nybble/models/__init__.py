"""A whole model running: loading and saving, evaluation, decoding."""

from nybble.models.load import Source, load, load_tokenizer, resolve
from nybble.models.save import check_saveable, save

__all__ = ["Source", "check_saveable", "load", "load_tokenizer", "resolve", "save"]
