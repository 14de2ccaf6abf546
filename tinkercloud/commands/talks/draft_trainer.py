"""A training of a server's draft, asked for and waited for."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinkercloud.commands.talks.door_client import Door

PAUSE_S = 0.5  # between two looks


@dataclass
class DraftTrainer:
    """base_model: whose draft it is. num_before: trainings of it that had ended."""

    door: Door
    base_model: str
    num_before: int

    @classmethod
    def ask(cls, door: Door, model: str) -> "DraftTrainer":
        """For the draft of a model, as the door names it. Raises UserError where it does not
        learn."""
        asked = door.post("/oai/api/v1/train_draft", {"model": model})
        return cls(door, asked["base_model"], _num_ended(asked["following"]))

    def outcome(self) -> str:
        """Once it has ended."""
        while True:
            following = self.door.get("/health")["speculation"][self.base_model]["following"]
            if _num_ended(following) > self.num_before:
                return told(following["last_training"])
            if not following["is_asked"]:
                return "too little was sampled yet for it to learn from; talk on, and ask again"
            time.sleep(PAUSE_S)


def _num_ended(following: Mapping[str, Any]) -> int:
    return sum(following["trainings"].values())


def told(training: Mapping[str, Any]) -> str:
    before, after = training["before"]["mean"], training["after"]["mean"]
    verdict = "it is drafted with" if training["promoted"] else "not used"
    return (
        f"{training['num_steps']} steps: {after:.2f} tokens of a draft are expected to be "
        f"accepted, before {before:.2f}; {verdict}"
    )
