"""All services of one running server, wired to each other."""

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
from tinkercloud.errors import StorageFailed
from tinkercloud.services.accounts.account_service import AccountService
from tinkercloud.services.accounts.billing_service import BillingService
from tinkercloud.services.accounts.observers import Observers
from tinkercloud.services.accounts.quotas import Quotas
from tinkercloud.services.accounts.session_search import SessionSearch
from tinkercloud.services.accounts.session_service import SessionService
from tinkercloud.services.accounts.trace_service import TraceService
from tinkercloud.services.accounts.unused_sessions import UnusedSessions
from tinkercloud.services.accounts.usage_recorder import UsageRecorder
from tinkercloud.services.captures.capture_results import CaptureResults
from tinkercloud.services.captures.capture_service import CaptureService, CaptureStores
from tinkercloud.services.captures.reward_webhooks import RewardWebhooks
from tinkercloud.services.captures.webhook_hosts import WebhookHosts
from tinkercloud.services.captures.webhook_sender import WebhookSender
from tinkercloud.services.chats.chat_service import ChatService
from tinkercloud.services.chats.draft_service import DraftService
from tinkercloud.services.chats.model_names import ModelNames
from tinkercloud.services.chats.request_slots import RequestSlots
from tinkercloud.services.chats.sample_texts import SampleTexts
from tinkercloud.services.chats.text_completion_service import TextCompletionService
from tinkercloud.services.chats.text_models import TextModels
from tinkercloud.services.chats.verify_service import VerifyService
from tinkercloud.services.checkpoints.checkpoint_service import CheckpointService, CheckpointStores
from tinkercloud.services.checkpoints.copy_service import CopyService
from tinkercloud.services.checkpoints.download_service import DownloadService
from tinkercloud.services.common.body_parser import BodyParser
from tinkercloud.services.common.catalog import Catalog
from tinkercloud.services.models.completion_service import CompletionService
from tinkercloud.services.models.dependencies import Dependencies
from tinkercloud.services.models.finished_samples import FinishedSamples
from tinkercloud.services.models.future_service import FutureService
from tinkercloud.services.models.idle_models import IdleModels
from tinkercloud.services.models.loss_service import LossService
from tinkercloud.services.models.model_service import ModelService
from tinkercloud.services.models.published_weights import PublishedWeights
from tinkercloud.services.models.recovery import Recovery
from tinkercloud.services.models.recovery_files import RecoveryFiles
from tinkercloud.services.models.reported_curves import ReportedCurves
from tinkercloud.services.models.rest_service import RestService
from tinkercloud.services.models.run_archive import RunArchive
from tinkercloud.services.models.run_curves import RunCurves
from tinkercloud.services.models.sample_record_service import SampleRecordService
from tinkercloud.services.models.sampling_service import SamplingService
from tinkercloud.services.models.snapshots import Snapshots
from tinkercloud.services.models.training_service import TrainingService
from tinkercloud.services.models.version_store import VersionStore
from tinkercloud.services.observability.live_view import LiveView
from tinkercloud.services.observability.metrics_service import MetricSources, MetricsService
from tinkercloud.services.observability.readiness import ReadinessService
from tinkercloud.storage.archive import ArchiveStorage
from tinkercloud.storage.audit_log import AuditLog
from tinkercloud.storage.capture_rewards import CaptureRewardStorage
from tinkercloud.storage.captures import CaptureStorage
from tinkercloud.storage.database import Database
from tinkercloud.storage.finished_results import FinishedResults
from tinkercloud.storage.futures import FuturesStorage
from tinkercloud.storage.journal import JournalStorage
from tinkercloud.storage.keys import KeyStore
from tinkercloud.storage.loss_storage import LossStorage
from tinkercloud.storage.metadata import MetadataStorage
from tinkercloud.storage.owners import Owners
from tinkercloud.storage.publications import PublicationStorage
from tinkercloud.storage.reported_metrics import ReportedMetricsStorage
from tinkercloud.storage.sample_records import SampleRecordStorage
from tinkercloud.storage.session_storage import SessionStorage
from tinkercloud.storage.usage_storage import UsageStorage

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
    names: ModelNames
    chat: ChatService
    captures: CaptureService
    capture_results: CaptureResults
    reward_webhooks: RewardWebhooks
    text_completions: TextCompletionService
    verifications: VerifyService
    drafts: DraftService
    readiness: ReadinessService
    bodies: BodyParser
    metrics: MetricsService
    live: LiveView
    curves: RunCurves
    reported_metrics: ReportedMetricsStorage
    reported_curves: ReportedCurves
    sample_texts: SampleTexts
    observers: Observers
    spans: "SpanExport | None"

    async def start(self) -> None:
        await self.checkpoints.start()
        await self.snapshots.start()
        await self.tasks.start()
        await self.models.start()  # after: what a deleted model has left to do still runs
        self.tasks.spawn(self._sweep_forever(), "expiry")
        self.tasks.spawn(self.reward_webhooks.run_forever(), "webhooks")
        self.tasks.spawn(self.usage.flush_forever(), "usage")
        self.tasks.spawn(self.idle.run_forever(), "idle")

    async def close(self) -> None:
        """Work first, so that nothing reaches for what is closed after it."""
        await self.stop_work()
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
        await self.captures.expire()
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
        running = await self.tasks.lanes.stop(within_s)
        await self.tasks.close()
        settled = {key: p for key, p in self.recovery.positions.items() if key not in running}
        await self.snapshots.close(settled, max(deadline - time.monotonic(), 0.0))

    async def _sweep_forever(self) -> None:
        config = self.config
        results_s = min(config.result_ttl_s, config.record_ttl_s, config.capture_ttl_s)
        ttl_s = min(results_s, config.session_ttl_s)
        while True:
            try:
                await self._sweep()
            except StorageFailed as error:  # the disk is full: later there may be room
                logger.error("nothing was expired: %s", error)
            await asyncio.sleep(min(max(ttl_s / 4, SHORTEST_SWEEP_S), LONGEST_SWEEP_S))


@dataclass(frozen=True, slots=True)
class Stores:
    """What is open for the length of a server's run."""

    database: Database
    keys: KeyStore


def _observers(config: Config, keys: KeyStore) -> Observers:
    names = {name.strip() for name in config.metrics_users.split(",")}
    return Observers(names, keys, auth=config.auth)


def _span_export(config: Config, tasks: TaskManager) -> "SpanExport | None":
    if config.otlp_endpoint is None:
        return None
    from tinkercloud.services.observability.span_export import SpanExport  # an extra's packages

    return SpanExport(config.otlp_endpoint, tasks)


def build_services(
    config: Config,
    client_config: Mapping[str, object],
    backend: Backend,
    catalog: Catalog,
    stores: Stores,
) -> Services:
    database = stores.database
    futures = FuturesStorage(database)
    metadata = MetadataStorage(database)
    tasks = TaskManager(futures, gap_grace_s=config.gap_grace_s)
    audit = AuditLog(database)
    stored_sessions = SessionStorage(database)
    sessions = SessionService(stored_sessions, audit, config.session_ttl_s)
    usage_storage = UsageStorage(database)
    usage = UsageRecorder(usage_storage)
    quotas = Quotas(metadata, usage)
    tasks.use_admission(quotas)
    publications = PublicationStorage(database)
    checkpoints = CheckpointService(
        backend, CheckpointStores(metadata, publications, stores.keys, audit), config.data_dir
    )
    sample_records = SampleRecordService(
        SampleRecordStorage(database), sessions, config.record_bytes, config.record_ttl_s
    )
    losses = LossService(LossStorage(database), sessions, tasks)
    on_policy = OnPolicyTracker()
    journal = JournalStorage(database)
    versions = VersionStore(backend)
    files = RecoveryFiles(config.data_dir)
    archive = RunArchive(
        *(ArchiveStorage(database), journal, files),
        days=config.archive_days,
        max_bytes=config.archive_bytes,
    )
    snapshots = Snapshots(backend, journal, versions, files, archive)
    recovery = Recovery(backend, catalog, metadata, journal, snapshots)
    tasks.lanes.keeper, recovery.recorded = recovery, tasks.outcomes.recorded
    idle = IdleModels(tasks.lanes, metadata, recovery, versions, config.idle_model_s)
    sessions.when_expired(idle.put_session_away)
    backend.use_for_room(idle.make_room)
    published_weights = PublishedWeights(journal, versions, files, config.published_bytes)
    dependencies = Dependencies(
        *(backend, catalog, metadata, tasks, sessions, checkpoints, sample_records, usage),
        losses=losses,
        on_policy=on_policy,
        versions=versions,
        recovery=recovery,
        recovery_files=files,
        published_weights=published_weights,
        quotas=quotas,
        shares_prefixes=config.share_prefix_cache,
        idle_model_s=config.idle_model_s,
    )
    sampling = SamplingService(dependencies)
    models = ModelService(dependencies)
    names = ModelNames(catalog, checkpoints, sampling)
    stored = CaptureStores(CaptureStorage(database), CaptureRewardStorage(database), metadata)
    texts, slots = TextModels(catalog), RequestSlots(quotas)
    stats = (on_policy.stats, snapshots.stats, recovery.stats, idle.stats, sessions.stats)
    sources = MetricSources(backend, tasks, stats, usage.totals)
    captures = CaptureService(config, stored, names, texts)
    metrics = MetricsService(sources)
    results, reported = FinishedResults(database), ReportedMetricsStorage(database)
    return Services(
        config=config,
        client_config=client_config,
        backend=backend,
        catalog=catalog,
        database=database,
        futures=futures,
        tasks=tasks,
        sessions=sessions,
        session_search=SessionSearch(SessionStorage(database)),
        models=models,
        checkpoints=checkpoints,
        copies=CopyService(checkpoints, metadata, sessions, quotas),
        downloads=DownloadService(
            checkpoints, catalog, stores.keys.secret("signed links"), config.data_dir
        ),
        sample_records=sample_records,
        sampling=sampling,
        training=TrainingService(dependencies, models, sampling),
        rest=RestService(metadata, checkpoints, publications, journal),
        results=FutureService(backend, tasks, futures, config.hold_s),
        completions=CompletionService(tasks, futures, config.hold_s),
        usage=usage,
        losses=losses,
        on_policy=on_policy,
        billing=BillingService(usage_storage, usage, SessionStorage(database)),
        audit=audit,
        owners=Owners(database),
        traces=TraceService(sessions, futures, stores.keys.secret("signed links")),
        recovery=recovery,
        snapshots=snapshots,
        idle=idle,
        published_weights=published_weights,
        archive=archive,
        unused_sessions=UnusedSessions(stored_sessions, sessions, days=config.session_days),
        accounts=AccountService(stores.keys),
        names=names,
        captures=captures,
        capture_results=CaptureResults(captures, stored.captures, stored.rewards),
        reward_webhooks=RewardWebhooks(
            stored.captures, stored.rewards, WebhookSender(WebhookHosts.of(config.reward_hosts))
        ),
        chat=ChatService(names, texts, sampling, slots),
        text_completions=TextCompletionService(names, texts, sampling, slots),
        verifications=VerifyService(names, texts, sampling, slots),
        drafts=DraftService(names, catalog, backend),
        bodies=BodyParser(),
        readiness=ReadinessService(backend, database, config.data_dir),
        spans=_span_export(config, tasks),
        observers=_observers(config, stores.keys),
        metrics=metrics,
        live=LiveView(metrics, tasks, backend),
        curves=RunCurves(results),
        reported_metrics=reported,
        reported_curves=ReportedCurves(reported, metadata),
        sample_texts=SampleTexts(FinishedSamples(results, metadata), texts),
    )
