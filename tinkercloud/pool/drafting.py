"""llama-server's own drafting, verified by the pool: a pass over a slow network takes hardly longer
for several tokens than for one."""

from tinkercloud.errors import ConfigError
from tinkercloud.pool.model_file import read_model_file
from tinkercloud.pool.pool_file import SUFFIX, Model

MATCHED_TOKENS = 2
"""Of a sample's end, that have to be in its text before: also the shortest draft. Of 192 tokens of
greedy JSON, code and arithmetic, with drafts of five, 78, 70 and 85 passes are left; with three
matched tokens and drafts of eight 79, 57 and 110. Where they are not in it, one token that is
decides: of 128 tokens 37, 52 and 55 passes are left, 53, 53 and 58 without that."""
DRAFT_FLAGS = (
    *("--spec-type", "--spec-ngram-simple-size-n", "--spec-ngram-simple-size-m"),
    *("--spec-ngram-map-k-size-n", "--spec-ngram-map-k-size-m"),
    *("--spec-draft-model", "--spec-draft-n-max", "--spec-draft-device", "--spec-draft-ngl"),
)


def draft_arguments(model: Model) -> list[str]:
    """A draft model stays in the coordinator's RAM: its passes cross no network."""
    num_tokens = str(model.drafted_tokens)
    if model.draft is None:
        return []
    if model.draft == SUFFIX:
        arguments = ["--spec-type", "ngram-simple,ngram-map-k"]
        arguments += ["--spec-ngram-simple-size-n", str(MATCHED_TOKENS)]
        arguments += ["--spec-ngram-simple-size-m", num_tokens]
        arguments += ["--spec-ngram-map-k-size-n", "1"]
        return [*arguments, "--spec-ngram-map-k-size-m", num_tokens]
    arguments = ["--spec-type", "draft-simple", "--spec-draft-model", str(model.draft)]
    arguments += ["--spec-draft-device", "none", "--spec-draft-ngl", "0"]
    return [*arguments, "--spec-draft-n-max", num_tokens]


def draft_text(model: Model) -> str:
    """For people; "" where nothing drafts. Raises ConfigError where the draft model cannot."""
    if model.draft is None:
        return ""
    if model.draft == SUFFIX:
        return f"up to {model.drafted_tokens} tokens a pass, from each sample's own text"
    drafting, drafted = read_model_file(model.draft), read_model_file(model.path)
    if drafting.vocabulary != drafted.vocabulary:
        raise ConfigError(
            f"{drafting.name} has {drafting.vocabulary} tokens and {drafted.name} "
            f"{drafted.vocabulary}: a model drafts for those with its own vocabulary only; name "
            f"another one as draft, or {SUFFIX}"
        )
    return f"up to {model.drafted_tokens} tokens a pass, by {drafting.name} on the coordinator"
