"""Whose turn it is on a device that sampling and training share: whoever had less time of late."""


class Turns:
    """Each step is some time of one of the two; steps differ in length and cannot be cut.

    Only time while both had work counts: nobody saves up turns by having been alone.
    """

    def __init__(self) -> None:
        self._ahead_s = 0.0  # of samples

    def is_for_samples(self, *, samples_wait: bool, training_waits: bool) -> bool:
        if not (samples_wait and training_waits):
            return samples_wait
        return self._ahead_s <= 0.0

    def took(self, seconds: float, *, samples: bool, both_wait: bool) -> None:
        """A step is over. both_wait: before it and after it."""
        if both_wait:
            self._ahead_s += seconds if samples else -seconds
        else:
            self._ahead_s = 0.0
