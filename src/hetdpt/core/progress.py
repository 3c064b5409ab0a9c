"""How long work reports its progress: the functions it calls. No torch here."""

from collections.abc import Callable

StepProgress = Callable[[int, int], None]
"""Called with (steps done, steps in all); in all is 0 if unknown."""
StageProgress = Callable[[str, int, int], None]
"""Called with what is being done, then as ``StepProgress``."""
