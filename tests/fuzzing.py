"""How much and how tests try inputs that nobody chose."""

from collections.abc import Sequence

from hypothesis import HealthCheck, Phase, settings


def fuzzing(
    num_examples: int, *, repeats: bool, phases: Sequence[Phase] = (Phase.generate, Phase.shrink)
) -> settings:
    """repeats: the same inputs in each run, for tests that must not fail by chance."""
    return settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=repeats,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
