"""How sampling and training share a device: the next step is of the one that had less time."""


class FairShareScheduler:
    """Each step takes some time of one of the two; steps differ in length and cannot be cut.

    Only time while both had work counts: being alone earns nobody a credit.
    """

    def __init__(self) -> None:
        self._samples_lead_s = 0.0  # time of sampling less time of training

    def is_for_samples(self, *, samples_wait: bool, training_waits: bool) -> bool:
        if not (samples_wait and training_waits):
            return samples_wait
        return self._samples_lead_s <= 0.0

    def took(self, seconds: float, *, samples: bool, both_wait: bool) -> None:
        """A step is over. both_wait: before it and after it."""
        if both_wait:
            self._samples_lead_s += seconds if samples else -seconds
        else:
            self._samples_lead_s = 0.0
