"""What the services of models, training and sampling are built on."""

from dataclasses import dataclass

from tinkercloud.backends.base import Backend
from tinkercloud.core.task_manager import TaskManager
from tinkercloud.services.catalog import Catalog
from tinkercloud.services.checkpoint_service import CheckpointService
from tinkercloud.services.loss_service import LossService
from tinkercloud.services.sample_record_service import SampleRecordService
from tinkercloud.services.session_service import SessionService
from tinkercloud.services.usage_recorder import UsageRecorder
from tinkercloud.storage.metadata import MetadataStorage


@dataclass(frozen=True, slots=True)
class Dependencies:
    backend: Backend
    catalog: Catalog
    metadata: MetadataStorage
    tasks: TaskManager
    sessions: SessionService
    checkpoints: CheckpointService
    sample_records: SampleRecordService
    usage: UsageRecorder
    losses: LossService
