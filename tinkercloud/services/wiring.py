"""Builds the services of one server on its configuration, backend and database."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinkercloud.backends.base import Backend
from tinkercloud.config import Config
from tinkercloud.core.on_policy import OnPolicyTracker
from tinkercloud.core.task_manager import TaskManager
from tinkercloud.services.accounts.account_service import AccountService
from tinkercloud.services.accounts.billing_service import BillingService
from tinkercloud.services.accounts.observers import Observers
from tinkercloud.services.accounts.quotas import Quotas
from tinkercloud.services.accounts.session_search import SessionSearch
from tinkercloud.services.accounts.session_service import SessionService
from tinkercloud.services.accounts.trace_service import TraceService
from tinkercloud.services.accounts.unused_sessions import UnusedSessions
from tinkercloud.services.accounts.usage_recorder import UsageRecorder
from tinkercloud.services.captures.capture_service import CaptureStores
from tinkercloud.services.captures.capture_services import CaptureServices
from tinkercloud.services.chats.chat_services import ChatServices
from tinkercloud.services.checkpoints.checkpoint_service import CheckpointService, CheckpointStores
from tinkercloud.services.checkpoints.copy_service import CopyService
from tinkercloud.services.checkpoints.download_service import DownloadService
from tinkercloud.services.common.body_parser import BodyParser
from tinkercloud.services.common.catalog import Catalog
from tinkercloud.services.container import Services
from tinkercloud.services.models.dependencies import Dependencies
from tinkercloud.services.models.loss_service import LossService
from tinkercloud.services.models.model_service import ModelService
from tinkercloud.services.models.sample_record_service import SampleRecordService
from tinkercloud.services.models.sampling_service import SamplingService
from tinkercloud.services.models.training_service import TrainingService
from tinkercloud.services.observability.live_view import LiveView
from tinkercloud.services.observability.metrics_service import MetricSources, MetricsService
from tinkercloud.services.observability.readiness import ReadinessService
from tinkercloud.services.recovery.idle_models import IdleModels
from tinkercloud.services.recovery.published_weights import PublishedWeights
from tinkercloud.services.recovery.recovery import Recovery
from tinkercloud.services.recovery.recovery_files import RecoveryFiles
from tinkercloud.services.recovery.run_archive import RunArchive
from tinkercloud.services.recovery.snapshots import Snapshots
from tinkercloud.services.recovery.version_store import VersionStore
from tinkercloud.services.results.completion_service import CompletionService
from tinkercloud.services.results.finished_samples import FinishedSamples
from tinkercloud.services.results.future_service import FutureService
from tinkercloud.services.results.reported_curves import ReportedCurves
from tinkercloud.services.results.rest_service import RestService
from tinkercloud.services.results.run_curves import RunCurves
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


@dataclass(frozen=True, slots=True)
class Stores:
    """What is open for the length of a server's run."""

    database: Database
    keys: KeyStore


@dataclass(frozen=True, slots=True)
class _Storages:
    """Those that several services use."""

    futures: FuturesStorage
    metadata: MetadataStorage
    sessions: SessionStorage
    usage: UsageStorage
    publications: PublicationStorage
    journal: JournalStorage
    results: FinishedResults
    reported: ReportedMetricsStorage
    audit: AuditLog

    @classmethod
    def of(cls, database: Database) -> "_Storages":
        return cls(
            futures=FuturesStorage(database),
            metadata=MetadataStorage(database),
            sessions=SessionStorage(database),
            usage=UsageStorage(database),
            publications=PublicationStorage(database),
            journal=JournalStorage(database),
            results=FinishedResults(database),
            reported=ReportedMetricsStorage(database),
            audit=AuditLog(database),
        )

    def samples(self) -> FinishedSamples:
        return FinishedSamples(self.results, self.metadata)


@dataclass(frozen=True, slots=True)
class _Foundation:
    """What services of models are built on: who calls, what runs, where it is written."""

    config: Config
    backend: Backend
    catalog: Catalog
    database: Database
    storages: _Storages
    tasks: TaskManager
    sessions: SessionService
    usage: UsageRecorder
    quotas: Quotas
    checkpoints: CheckpointService


@dataclass(frozen=True, slots=True)
class _Persistence:
    """What brings models to the disk and back."""

    archive: RunArchive
    snapshots: Snapshots
    idle: IdleModels


def build_services(
    config: Config,
    client_config: Mapping[str, object],
    backend: Backend,
    catalog: Catalog,
    stores: Stores,
) -> Services:
    base = _foundation(config, backend, catalog, stores)
    dependencies, persistence = _models(base)
    storages, sessions, tasks = base.storages, base.sessions, base.tasks
    sampling, models = SamplingService(dependencies), ModelService(dependencies)
    chats = ChatServices.build(dependencies, sampling, storages.samples())
    metrics = _metrics(base, dependencies, persistence)
    links_secret = stores.keys.secret("signed links")
    return Services(
        config=config,
        client_config=client_config,
        backend=backend,
        catalog=catalog,
        database=stores.database,
        futures=storages.futures,
        tasks=tasks,
        sessions=sessions,
        session_search=SessionSearch(storages.sessions),
        models=models,
        checkpoints=base.checkpoints,
        copies=CopyService(base.checkpoints, storages.metadata, sessions, base.quotas),
        downloads=DownloadService(base.checkpoints, catalog, links_secret, config.data_dir),
        sample_records=dependencies.sample_records,
        sampling=sampling,
        training=TrainingService(dependencies, models, sampling),
        rest=_rest(base),
        results=FutureService(
            backend, dependencies.recovery, tasks, storages.futures, config.hold_s
        ),
        completions=CompletionService(tasks, storages.futures, config.hold_s),
        usage=base.usage,
        losses=dependencies.losses,
        on_policy=dependencies.on_policy,
        billing=BillingService(storages.usage, base.usage, storages.sessions),
        audit=storages.audit,
        owners=Owners(stores.database),
        traces=TraceService(sessions, storages.futures, links_secret),
        recovery=dependencies.recovery,
        snapshots=persistence.snapshots,
        idle=persistence.idle,
        published_weights=dependencies.published_weights,
        archive=persistence.archive,
        unused_sessions=UnusedSessions(storages.sessions, sessions, days=config.session_days),
        accounts=AccountService(stores.keys),
        chats=chats,
        captures=CaptureServices.build(config, _capture_stores(base), chats),
        bodies=BodyParser(),
        readiness=ReadinessService(backend, stores.database, config.data_dir),
        spans=_span_export(config, tasks),
        observers=_observers(config, stores.keys),
        metrics=metrics,
        live=LiveView(metrics, tasks, backend),
        curves=RunCurves(storages.results),
        reported_metrics=storages.reported,
        reported_curves=ReportedCurves(storages.reported, storages.metadata),
    )


def _foundation(config: Config, backend: Backend, catalog: Catalog, stores: Stores) -> _Foundation:
    storages = _Storages.of(stores.database)
    tasks = TaskManager(storages.futures, gap_grace_s=config.gap_grace_s)
    sessions = SessionService(storages.sessions, storages.audit, config.session_ttl_s)
    usage = UsageRecorder(storages.usage)
    quotas = Quotas(storages.metadata, usage)
    tasks.use_admission(quotas)
    checkpoint_stores = CheckpointStores(
        storages.metadata, storages.publications, stores.keys, storages.audit
    )
    return _Foundation(
        config=config,
        backend=backend,
        catalog=catalog,
        database=stores.database,
        storages=storages,
        tasks=tasks,
        sessions=sessions,
        usage=usage,
        quotas=quotas,
        checkpoints=CheckpointService(backend, checkpoint_stores, config.data_dir),
    )


def _models(base: _Foundation) -> tuple[Dependencies, _Persistence]:
    config, backend, storages, tasks = base.config, base.backend, base.storages, base.tasks
    records = SampleRecordStorage(base.database)
    sample_records = SampleRecordService(
        records, base.sessions, config.record_bytes, config.record_ttl_s
    )
    losses = LossService(LossStorage(base.database), base.sessions, tasks)
    versions, files = VersionStore(backend), RecoveryFiles(config.data_dir)
    archive = RunArchive(
        *(ArchiveStorage(base.database), storages.journal, files),
        days=config.archive_days,
        max_bytes=config.archive_bytes,
    )
    snapshots = Snapshots(backend, storages.journal, versions, files, archive)
    recovery = Recovery(backend, base.catalog, storages.metadata, storages.journal, snapshots)
    tasks.lanes.recovery, recovery.recorded = recovery, tasks.outcomes.recorded
    idle = IdleModels(tasks.lanes, storages.metadata, recovery, versions, config.idle_model_s)
    base.sessions.when_expired(idle.offload_session)
    backend.use_for_room(idle.make_room)
    dependencies = Dependencies(
        *(backend, base.catalog, storages.metadata, tasks, base.sessions, base.checkpoints),
        *(sample_records, base.usage),
        losses=losses,
        on_policy=OnPolicyTracker(),
        versions=versions,
        recovery=recovery,
        recovery_files=files,
        published_weights=PublishedWeights(
            storages.journal, versions, files, config.published_bytes
        ),
        quotas=base.quotas,
        shares_prefixes=config.share_prefix_cache,
        idle_model_s=config.idle_model_s,
    )
    return dependencies, _Persistence(archive, snapshots, idle)


def _metrics(
    base: _Foundation, dependencies: Dependencies, persistence: _Persistence
) -> MetricsService:
    stats = (
        dependencies.on_policy.stats,
        persistence.snapshots.stats,
        dependencies.recovery.stats,
        persistence.idle.stats,
        base.sessions.stats,
    )
    return MetricsService(MetricSources(base.backend, base.tasks, stats, base.usage.totals))


def _rest(base: _Foundation) -> RestService:
    storages = base.storages
    return RestService(storages.metadata, base.checkpoints, storages.publications, storages.journal)


def _capture_stores(base: _Foundation) -> CaptureStores:
    captures, rewards = CaptureStorage(base.database), CaptureRewardStorage(base.database)
    return CaptureStores(captures, rewards, base.storages.metadata)


def _observers(config: Config, keys: KeyStore) -> Observers:
    names = {name.strip() for name in config.metrics_users.split(",")}
    return Observers(names, keys, auth=config.auth)


def _span_export(config: Config, tasks: TaskManager) -> "SpanExport | None":
    if config.otlp_endpoint is None:
        return None
    from tinkercloud.services.observability.span_export import SpanExport  # an extra's packages

    return SpanExport(config.otlp_endpoint, tasks)
