"""What the services of models, training and sampling are built on."""

from dataclasses import dataclass

from tinkercloud.backends.base import Backend
from tinkercloud.core.on_policy import OnPolicyTracker
from tinkercloud.core.task_manager import TaskManager
from tinkercloud.services.accounts.quotas import Quotas
from tinkercloud.services.accounts.session_service import SessionService
from tinkercloud.services.accounts.usage_recorder import UsageRecorder
from tinkercloud.services.checkpoints.checkpoint_service import CheckpointService
from tinkercloud.services.common.catalog import Catalog
from tinkercloud.services.models.loss_service import LossService
from tinkercloud.services.models.sample_record_service import SampleRecordService
from tinkercloud.services.recovery.published_weights import PublishedWeights
from tinkercloud.services.recovery.recovery import Recovery
from tinkercloud.services.recovery.recovery_files import RecoveryFiles
from tinkercloud.services.recovery.version_store import VersionStore
from tinkercloud.storage.metadata import MetadataStorage


@dataclass(frozen=True, slots=True)
class Dependencies:
    """shares_prefixes: whether users may reuse what others' prompts left in the engine.
    idle_model_s: how long a model is unused before it goes to the disk."""

    backend: Backend
    catalog: Catalog
    metadata: MetadataStorage
    tasks: TaskManager
    sessions: SessionService
    checkpoints: CheckpointService
    sample_records: SampleRecordService
    usage: UsageRecorder
    losses: LossService
    on_policy: OnPolicyTracker
    versions: VersionStore
    recovery: Recovery
    recovery_files: RecoveryFiles
    published_weights: PublishedWeights
    quotas: Quotas
    shares_prefixes: bool
    idle_model_s: float
