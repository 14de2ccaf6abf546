"""All services of one running server: what handlers reach, and how they start and end. `wiring.py`
builds them."""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinkercloud.backends.base import Backend
from tinkercloud.config import Config
from tinkercloud.core.on_policy import OnPolicyTracker
from tinkercloud.core.task_manager import TaskManager
from tinkercloud.errors import DatabaseDamaged, StorageFailed
from tinkercloud.services.accounts.account_service import AccountService
from tinkercloud.services.accounts.billing_service import BillingService
from tinkercloud.services.accounts.observers import Observers
from tinkercloud.services.accounts.session_search import SessionSearch
from tinkercloud.services.accounts.session_service import SessionService
from tinkercloud.services.accounts.trace_service import TraceService
from tinkercloud.services.accounts.unused_sessions import UnusedSessions
from tinkercloud.services.accounts.usage_recorder import UsageRecorder
from tinkercloud.services.captures.capture_services import CaptureServices
from tinkercloud.services.chats.chat_services import ChatServices
from tinkercloud.services.checkpoints.checkpoint_service import CheckpointService
from tinkercloud.services.checkpoints.copy_service import CopyService
from tinkercloud.services.checkpoints.download_service import DownloadService
from tinkercloud.services.common.body_parser import BodyParser
from tinkercloud.services.common.catalog import Catalog
from tinkercloud.services.models.loss_service import LossService
from tinkercloud.services.models.model_service import ModelService
from tinkercloud.services.models.sample_record_service import SampleRecordService
from tinkercloud.services.models.sampling_service import SamplingService
from tinkercloud.services.models.training_service import TrainingService
from tinkercloud.services.observability.live_view import LiveView
from tinkercloud.services.observability.metrics_service import MetricsService
from tinkercloud.services.observability.readiness import ReadinessService
from tinkercloud.services.recovery.idle_models import IdleModels
from tinkercloud.services.recovery.published_weights import PublishedWeights
from tinkercloud.services.recovery.recovery import Recovery
from tinkercloud.services.recovery.run_archive import RunArchive
from tinkercloud.services.recovery.snapshots import Snapshots
from tinkercloud.services.results.completion_service import CompletionService
from tinkercloud.services.results.future_service import FutureService
from tinkercloud.services.results.reported_curves import ReportedCurves
from tinkercloud.services.results.rest_service import RestService
from tinkercloud.services.results.run_curves import RunCurves
from tinkercloud.storage.audit_log import AuditLog
from tinkercloud.storage.database import Database
from tinkercloud.storage.futures import FuturesStorage
from tinkercloud.storage.owners import Owners
from tinkercloud.storage.reported_metrics import ReportedMetricsStorage

if TYPE_CHECKING:
    from tinkercloud.services.observability.span_export import SpanExport

logger = logging.getLogger(__name__)

SHORTEST_SWEEP_S, LONGEST_SWEEP_S = 0.05, 60.0
FETCHED_S = 600.0
"""Within which clients have fetched their results, whatever happened."""


@dataclass(frozen=True, slots=True)
class Services:
    """What handlers reach. client_config: flags for client/config; empty: the client's defaults."""

    config: Config
    client_config: Mapping[str, object]
    backend: Backend
    catalog: Catalog
    database: Database
    futures: FuturesStorage
    tasks: TaskManager
    sessions: SessionService
    session_search: SessionSearch
    models: ModelService
    checkpoints: CheckpointService
    copies: CopyService
    downloads: DownloadService
    sample_records: SampleRecordService
    sampling: SamplingService
    training: TrainingService
    rest: RestService
    results: FutureService
    completions: CompletionService
    usage: UsageRecorder
    losses: LossService
    on_policy: OnPolicyTracker
    billing: BillingService
    audit: AuditLog
    owners: Owners
    traces: TraceService
    recovery: Recovery
    snapshots: Snapshots
    idle: IdleModels
    published_weights: PublishedWeights
    archive: RunArchive
    unused_sessions: UnusedSessions
    accounts: AccountService
    chats: ChatServices
    captures: CaptureServices
    readiness: ReadinessService
    bodies: BodyParser
    metrics: MetricsService
    live: LiveView
    curves: RunCurves
    reported_metrics: ReportedMetricsStorage
    reported_curves: ReportedCurves
    observers: Observers
    spans: "SpanExport | None"

    async def start(self) -> None:
        await self.checkpoints.start()
        await self.snapshots.start()
        await self.tasks.start()
        await self.models.start()  # after: what a deleted model has left to do still runs
        self.tasks.spawn(self._sweep_forever(), "expiry")
        self.tasks.spawn(self.captures.webhooks.run_forever(), "webhooks")
        self.tasks.spawn(self.usage.flush_forever(), "usage")
        self.tasks.spawn(self.idle.run_forever(), "idle")

    async def close(self) -> None:
        """Work first, so that nothing reaches for what is closed after it."""
        await self.stop_work(drain=not self.tasks.is_closing)  # it had its time before
        await self.usage.flush()
        await self.sampling.close()
        self.bodies.close()
        if self.spans is not None:
            await self.spans.close()

    async def _sweep(self) -> None:
        await self.futures.expire(self.config.result_ttl_s)
        num_gone = await self.futures.keep_within(self.config.result_bytes, FETCHED_S)
        if num_gone:
            logger.warning("%d results went before their time: result_bytes", num_gone)
        await self.checkpoints.remove_expired()
        await self.checkpoints.remove_unrecorded()
        await self.sample_records.expire()
        await self.captures.sessions.expire()
        await self.reported_metrics.expire(self.config.result_ttl_s)
        await self.sessions.expire()
        await self.unused_sessions.finish()
        await self.archive.expire()
        await self.published_weights.keep_within()
        await self.database.shrink()

    async def stop_work(self, *, drain: bool = True) -> None:
        """Let operations of models that run end, and keep what they made, within the time that is
        configured (drain False: none); what has not begun begins after the next start."""
        within_s = self.config.drain_s if drain else 0.0
        deadline = time.monotonic() + within_s
        await self.tasks.lanes.stop(within_s)
        await self.tasks.close()
        left_s = max(deadline - time.monotonic(), 0.0)
        await self.snapshots.close(self.recovery.positions, left_s)

    async def _sweep_forever(self) -> None:
        config = self.config
        results_s = min(config.result_ttl_s, config.record_ttl_s, config.capture_ttl_s)
        ttl_s = min(results_s, config.session_ttl_s)
        while True:
            try:
                await self._sweep()
            except (StorageFailed, DatabaseDamaged) as error:  # later there may be room
                logger.error("nothing was expired: %s", error)
            await asyncio.sleep(min(max(ttl_s / 4, SHORTEST_SWEEP_S), LONGEST_SWEEP_S))
