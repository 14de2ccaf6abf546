"""The services of texts and conversations, wired to each other."""

from dataclasses import dataclass

from tinkercloud.services.chats.chat_service import ChatService
from tinkercloud.services.chats.draft_service import DraftService
from tinkercloud.services.chats.model_names import ModelNames
from tinkercloud.services.chats.request_slots import RequestSlots
from tinkercloud.services.chats.sample_texts import SampleTexts
from tinkercloud.services.chats.text_completion_service import TextCompletionService
from tinkercloud.services.chats.text_models import TextModels
from tinkercloud.services.chats.verify_service import VerifyService
from tinkercloud.services.models.dependencies import Dependencies
from tinkercloud.services.models.sampling_service import SamplingService
from tinkercloud.services.results.finished_samples import FinishedSamples


@dataclass(frozen=True, slots=True)
class ChatServices:
    names: ModelNames
    texts: TextModels
    conversations: ChatService
    completions: TextCompletionService
    verifications: VerifyService
    drafts: DraftService
    sample_texts: SampleTexts

    @classmethod
    def build(
        cls, dependencies: Dependencies, sampling: SamplingService, samples: FinishedSamples
    ) -> "ChatServices":
        catalog = dependencies.catalog
        names = ModelNames(catalog, dependencies.checkpoints, sampling)
        texts, slots = TextModels(catalog), RequestSlots(dependencies.quotas)
        return cls(
            names=names,
            texts=texts,
            conversations=ChatService(names, texts, sampling, slots),
            completions=TextCompletionService(names, texts, sampling, slots),
            verifications=VerifyService(names, texts, sampling, slots),
            drafts=DraftService(names, catalog, dependencies.backend),
            sample_texts=SampleTexts(samples, texts),
        )
