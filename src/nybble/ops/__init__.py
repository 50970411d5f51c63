"""What the machine runs: numeric contracts and the implementations that fulfil them here."""

from nybble.ops._choose import Candidate, explain
from nybble.ops.linear import QuantLinear, linear

__all__ = ["Candidate", "QuantLinear", "explain", "linear"]
