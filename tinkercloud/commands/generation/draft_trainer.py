"""A training of a server's draft, asked for and waited for."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinkercloud.commands.generation.api_client import ApiClient
from tinkercloud.speculative.learning.schedule import TRAINING_IS_OVER

PAUSE_S = 0.5  # between two looks


@dataclass
class DraftTrainer:
    """base_model: whose draft it is. before: trainings of it that had ended, by how they did."""

    client: ApiClient
    base_model: str
    before: Mapping[str, int]

    @classmethod
    def ask(cls, client: ApiClient, model: str) -> "DraftTrainer":
        """For the draft of a model, as the OpenAI API names it. Raises UserError where it does not
        learn."""
        answer = client.post("/oai/api/v1/train_draft", {"model": model})
        return cls(client, answer["base_model"], answer["following"]["trainings"])

    def outcome(self) -> str:
        """Once it has ended."""
        while True:
            following = self.client.get("/health")["speculation"][self.base_model]["following"]
            trainings = following["trainings"]
            if following["is_over"]:
                return TRAINING_IS_OVER
            if trainings["failed"] > self.before["failed"]:
                return (
                    "the training broke off, and the draft is as before; the server's log says why"
                )
            if sum(trainings.values()) > sum(self.before.values()):
                return training_summary(following["last_training"])
            if not following["is_asked"]:
                return "too little was sampled yet for it to learn from; talk on, and ask again"
            time.sleep(PAUSE_S)


def training_summary(training: Mapping[str, Any]) -> str:
    before, after = training["before"]["mean"], training["after"]["mean"]
    verdict = "it is drafted with" if training["promoted"] else "not used"
    return (
        f"{training['num_steps']} steps: {after:.2f} tokens of a draft are expected to be "
        f"accepted, before {before:.2f}; {verdict}"
    )
