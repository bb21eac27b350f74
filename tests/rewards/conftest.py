"""No hypothesis deadline: on a busy machine it fails tests for their timing, not their outcome."""

from hypothesis import settings

settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
