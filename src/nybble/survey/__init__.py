"""The main job: every scheme measured on this machine, for quality, bytes and speed, and one recommended."""

from nybble.survey.recommend import recommend
from nybble.survey.rows import DEFAULT_SCHEMES, Original, Recommendation, Result, Row
from nybble.survey.run import Request, survey

__all__ = ["DEFAULT_SCHEMES", "Original", "Recommendation", "Request", "Result", "Row", "recommend", "survey"]
