"""A start for the cookbook's rl_numerics_check: SmolLM2 calls no tool by itself, so a few steps of
supervised fine-tuning show it how pages are read. The recipe resumes from there, by its own option.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import tinker
from tinker_cookbook.recipes.rl_numerics_check import env
from tinker_cookbook.renderers import Message, Renderer, TrainOnWhat
from tinker_cookbook.supervised.common import datum_from_model_input_weights

from tests.e2e.hub import MODEL

# Shorter than the recipe's, as its arguments in recipes.py ask for.
TASK = env.CountingTaskConfig(num_pages_min=2, num_pages_max=2, page_chars=250)
CALL = '<tool_call>\n{"name": "read_page", "arguments": {"page": %d}}\n</tool_call>'
NUM_STEPS, LEARNING_RATE, RANK = 7, 2e-3, 8


def write_start(
    log_dir: Path, service: tinker.ServiceClient, renderer: Renderer, corpus: str
) -> None:
    """The log directory of a run that is at its first step, with weights that read pages."""
    model, rng = service.create_lora_training_client(MODEL, rank=RANK).result(), random.Random(7)
    for _ in range(NUM_STEPS):
        problem = env.sample_problem(rng, corpus, TASK)
        data = [_datum(renderer, _conversation(renderer, problem))]
        training = model.forward_backward(data, "cross_entropy")
        model.optim_step(tinker.AdamParams(learning_rate=LEARNING_RATE)).result()
        training.result()
    checkpoint = {
        "name": "start",
        "batch": 0,
        "state_path": model.save_state("start").result().path,
        "sampler_path": model.save_weights_for_sampler("start").result().path,
    }
    log_dir.mkdir(parents=True)
    (log_dir / "checkpoints.jsonl").write_text(json.dumps(checkpoint) + "\n", encoding="utf-8")


def _conversation(renderer: Renderer, problem: env.CountingProblem) -> list[Message]:
    """Every page is read, one in each turn, then the right answer is given."""
    reader = env.PageReader(problem.pages, env.EpisodeState())
    messages = renderer.create_conversation_prefix_with_tools(
        tools=[reader.read_page.to_spec()], system_prompt=env.SYSTEM_PROMPT
    )
    messages = [*messages, Message(role="user", content=problem.prompt)]
    for number, page in enumerate(problem.pages[: problem.num_pages], 1):
        shown = f"[Page {number}]\n{page}"
        messages.append(Message(role="assistant", content=CALL % number))
        messages.append(Message(role="tool", content=shown, name="read_page"))
    return [*messages, Message(role="assistant", content=f"Answer: {problem.true_count}")]


def _datum(renderer: Renderer, messages: Sequence[Message]) -> tinker.Datum:
    tokens, weights = renderer.build_supervised_example(
        list(messages), train_on_what=TrainOnWhat.ALL_ASSISTANT_MESSAGES
    )
    return datum_from_model_input_weights(tokens, weights)
