"""What of a drafter is trained while a server runs, and how the result comes into use."""

from collections.abc import Mapping

from torch import Tensor

from tinkercloud.core.types import LoraSpec
from tinkercloud.embedded.draft_training.dataset import CaseDataset, Mix, SequenceDataset
from tinkercloud.embedded.draft_training.fit import assign
from tinkercloud.embedded.draft_training.head_trainer import HeadObjective, HeadTrainer
from tinkercloud.embedded.draft_training.model_trainer import DraftModelTrainer, ModelObjective
from tinkercloud.embedded.draft_training.online_trainer import DraftTrainee, OnlineSettings
from tinkercloud.embedded.drafting.head_drafter import HeadDrafter
from tinkercloud.embedded.drafting.model_drafter import ModelDrafter
from tinkercloud.embedded.model.version import Version
from tinkercloud.errors import NotFound
from tinkercloud.speculative.learning.cases import CaseStore
from tinkercloud.speculative.learning.draft_folder import DraftFolder

MIX = Mix(batch_size=8, held_out_one_in=5, most_held_out=24, recent=4)
DRAFT_LORA = LoraSpec(rank=8, seed=0)


def head_trainee(drafter: HeadDrafter, following: OnlineSettings) -> DraftTrainee:
    """Learns from the states and laws of the policy's own training passes."""
    dataset = SequenceDataset(following.memory_bytes, following.max_age, MIX)
    trainer = HeadTrainer(drafter.head, drafter.params, HeadObjective())
    return DraftTrainee(trainer, dataset, drafter.use, drafter.layers, dataset.add)


def model_trainee(
    drafter: ModelDrafter, draft: Version, store: CaseStore, folder: DraftFolder
) -> DraftTrainee:
    """Learns an adapter from the cases in which draft and target disagreed; begins with the one
    that is best, if there is one."""
    trainer = DraftModelTrainer(draft.base, DRAFT_LORA, ModelObjective())

    def use(params: Mapping[str, Tensor]) -> None:
        adapter = trainer.adapter_of(params)
        scale = DRAFT_LORA.alpha / DRAFT_LORA.rank
        drafter.use(Version(draft.id, draft.base, draft.weights, adapter, scale))

    try:
        assign(trainer, trainer.read(folder.path("best")))
    except NotFound:
        pass
    else:
        use({name: tensor.detach().clone() for name, tensor in trainer.params.items()})
    return DraftTrainee(trainer, CaseDataset(store, MIX), use)
