"""The services of capture sessions, wired to each other."""

from dataclasses import dataclass

from tinkercloud.config import Config
from tinkercloud.services.captures.capture_results import CaptureResults
from tinkercloud.services.captures.capture_service import CaptureService, CaptureStores
from tinkercloud.services.captures.reward_webhooks import RewardWebhooks
from tinkercloud.services.captures.webhook_hosts import WebhookHosts
from tinkercloud.services.captures.webhook_sender import WebhookSender
from tinkercloud.services.chats.chat_services import ChatServices


@dataclass(frozen=True, slots=True)
class CaptureServices:
    sessions: CaptureService
    results: CaptureResults
    webhooks: RewardWebhooks

    @classmethod
    def build(cls, config: Config, stores: CaptureStores, chats: ChatServices) -> "CaptureServices":
        sessions = CaptureService(config, stores, chats.names, chats.texts)
        sender = WebhookSender(WebhookHosts.of(config.reward_hosts))
        return cls(
            sessions=sessions,
            results=CaptureResults(sessions, stores.captures, stores.rewards),
            webhooks=RewardWebhooks(stores.captures, stores.rewards, sender),
        )
