"""What a long prompt makes a model do, learned, so that the prompt can go.

The teacher is the model itself behind a prompt with examples; its answers to new questions are
sampled, and the student, an adapter of the same model, learns to give them without the prompt. No
answer is looked up: what the teacher gets wrong is learned too.
"""

# B sequences in a batch, T tokens of one sequence

import argparse
from typing import Any

from lib import chat, options, tasks
from lib.evaluation import MAX_TOKENS, Evaluation
from lib.progress import Progress, show
from lib.run import Run
from lib.start import path_of, started
from sft import make_data

NUM_EXAMPLES = 12  # in the teacher's prompt


def parser() -> argparse.ArgumentParser:
    arguments = options.parser("Move what a prompt does into the weights.")
    options.add_adapter(arguments)
    options.add_steps(arguments, 10, learning_rate=5e-4, save_every=5)
    arguments.add_argument("--batch-size", type=int, default=16)
    return arguments


def run(args: argparse.Namespace) -> Run:
    tinker = args.sdk  # the same as `import tinker_gmi as tinker`, or `import tinker`
    with started(args, "prompt_distillation") as start:
        training, tokenizer, metrics = start.training, start.tokenizer, start.metrics
        base = options.sampling_client(start.service, base_model=args.model)
        split = tasks.sums()
        held_out = split.held_out[: args.held_out]
        shown = conversation(split.train[:NUM_EXAMPLES])

        before = start.judge_before("the base model", base, split.held_out)
        taught = answers(tinker, base, tokenizer, shown, held_out)
        show("with the prompt", graded(held_out, taught))

        progress = Progress("distilling", args.steps)
        batches = tasks.batches(split.train[NUM_EXAMPLES:], args.batch_size, args.seed)
        for step, problems_B in metrics.left(batches, args.steps):
            answers_B = answers(tinker, base, tokenizer, shown, problems_B)
            examples_B_T = [
                chat.example(tokenizer, problem.question, answer)
                for problem, answer in zip(problems_B, answers_B, strict=True)
            ]
            backward = training.forward_backward(make_data(tinker, examples_B_T), "cross_entropy")
            update = training.optim_step(tinker.AdamParams(learning_rate=args.learning_rate))
            loss = backward.result().metrics["loss:sum"]
            update.result()
            metrics.add(step, loss=loss, teacher=graded(problems_B, answers_B).accuracy)
            progress.step(step, loss=loss)
            start.save_to_go_on(step)

        saving = start.save()
        student = training.save_weights_and_get_sampling_client().result()
        after = start.judge("without the prompt, afterwards", student, split.held_out)
        path = path_of(saving)
        losses = metrics.values("loss")
        return Run(
            "prompt_distillation", "loss per answer token (nats)", losses, None, before, after, path
        )  # fmt: skip


def conversation(examples: list[tasks.Problem]) -> list[dict[str, str]]:
    """The prompt: questions with their answers, as earlier turns."""
    messages = [{"role": "system", "content": ""}]
    for example in examples:
        messages.append({"role": "user", "content": example.question})
        messages.append({"role": "assistant", "content": example.answer})
    return messages


def answers(
    tinker: Any, sampler: Any, tokenizer: Any, shown: list[dict[str, str]],
    problems: list[tasks.Problem],
) -> list[str]:  # fmt: skip
    """The likeliest of the model behind the prompt."""
    futures = []
    for problem in problems:
        messages = [*shown, {"role": "user", "content": problem.question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt_T = tokenizer.encode(text, add_special_tokens=False)
        futures.append(
            sampler.sample(
                prompt=tinker.ModelInput.from_ints(prompt_T),
                num_samples=1,
                sampling_params=tinker.SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0),
            )
        )
    return [chat.answer_text(tokenizer, f.result().sequences[0].tokens) for f in futures]


def graded(problems: list[tasks.Problem], given: list[str]) -> Evaluation:
    grades = [tasks.grade(p, answer) for p, answer in zip(problems, given, strict=True)]
    examples = [
        (p.question, answer, bool(grade))
        for p, answer, grade in zip(problems, given, grades, strict=True)
    ]
    return Evaluation(sum(grades) / len(grades), len(grades), examples)


if __name__ == "__main__":
    options.main(run, parser())
