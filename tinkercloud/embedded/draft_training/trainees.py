"""What of a drafter is trained while a server runs, and how the result comes into use."""

from collections.abc import Mapping

from torch import Tensor

from tinkercloud.core.types import LoraSpec
from tinkercloud.embedded.draft_training.dataset import CapturedSequences, Lessons, Mix
from tinkercloud.embedded.draft_training.fit import assign
from tinkercloud.embedded.draft_training.head_model import HeadStudent, HeadTraining
from tinkercloud.embedded.draft_training.online_trainer import Following, Pupil
from tinkercloud.embedded.draft_training.small_model import ModelStudent, ModelTraining
from tinkercloud.embedded.drafting.head_drafter import HeadDrafter
from tinkercloud.embedded.drafting.model_drafter import ModelDrafter
from tinkercloud.embedded.model.version import Version
from tinkercloud.errors import NotFound
from tinkercloud.speculative.learning.cases import CaseStore
from tinkercloud.speculative.learning.draft_folder import DraftFolder

MIX = Mix(batch_size=8, held_out_one_in=5, most_held_out=24, recent=4)
DRAFT_LORA = LoraSpec(rank=8, seed=0)


def head_pupil(drafter: HeadDrafter, following: Following) -> Pupil:
    """Learns from the states and laws of the policy's own training passes."""
    material = CapturedSequences(following.memory_bytes, following.max_age, MIX)
    student = HeadStudent(drafter.head, drafter.params, HeadTraining())
    return Pupil(student, material, drafter.use, drafter.layers, material.add)


def model_pupil(
    drafter: ModelDrafter, draft: Version, store: CaseStore, folder: DraftFolder
) -> Pupil:
    """Learns an adapter from the cases in which draft and target disagreed; begins with the one
    that is best, if there is one."""
    student = ModelStudent(draft.base, DRAFT_LORA, ModelTraining())

    def use(params: Mapping[str, Tensor]) -> None:
        adapter = student.adapter_of(params)
        scale = DRAFT_LORA.alpha / DRAFT_LORA.rank
        drafter.use(Version(draft.id, draft.base, draft.weights, adapter, scale))

    try:
        assign(student, student.read(folder.path("best")))
    except NotFound:
        pass
    else:
        use({name: tensor.detach().clone() for name, tensor in student.params.items()})
    return Pupil(student, Lessons(store, MIX), use)
