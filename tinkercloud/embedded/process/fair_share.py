"""How sampling and training share a device: the next step is of the one that had less time."""

CREDIT_S = 0.5
"""Of time that one may be behind when it comes: a short request is done at once where the other had
the device before, and nobody waits longer than that for one who was away."""


class FairShareScheduler:
    """Each step takes some time of one of the two; steps differ in length and cannot be cut.

    While one is alone the other falls behind, by CREDIT_S at most.
    """

    def __init__(self) -> None:
        self._samples_lead_s = 0.0  # time of sampling less time of training

    def is_for_samples(self, *, samples_wait: bool, training_waits: bool) -> bool:
        if not (samples_wait and training_waits):
            return samples_wait
        return self._samples_lead_s <= 0.0

    def took(self, seconds: float, *, samples: bool, both_wait: bool) -> None:
        """A step is over. both_wait: before it and after it."""
        self._samples_lead_s += seconds if samples else -seconds
        if not both_wait:
            self._samples_lead_s = min(max(self._samples_lead_s, -CREDIT_S), CREDIT_S)
