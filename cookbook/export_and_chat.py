"""Take the weights home: the same answers by PEFT on this machine and through the OpenAI API.

A checkpoint is exported as PEFT's two files and fetched into --out. Then held-out sums are asked
three times, by the likeliest tokens: of the base model and of the checkpoint through the server's
OpenAI API, with the plain `openai` package, and of the fetched adapter on the base model in
transformers, without a server. It needs `pip install openai peft transformers`.
"""

# T tokens of one sequence

import argparse
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from demo import fetch_model
from lib import chat, options, tasks
from lib.evaluation import MAX_TOKENS
from lib.progress import Progress
from lib.run import leave

try:
    import torch
    from openai import OpenAI, OpenAIError
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
except ModuleNotFoundError as package:
    options.end_without(package)

Answer = Callable[[str], str]
"""A question to the likeliest answer."""


def parser() -> argparse.ArgumentParser:
    arguments = options.parser("Export an adapter, and ask it by PEFT and by the OpenAI API.")
    arguments.add_argument("state", help="the weights, tinker://..., as the other recipes print")
    options.add_model(arguments)
    arguments.add_argument(
        "--weights", type=Path, help="of the base model: a folder or a GGUF file; else the server's"
    )
    return arguments


def run(args: argparse.Namespace) -> None:
    tinker = args.sdk  # the same as `import tinker_gmi as tinker`, or `import tinker`
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if args.out is None else args.out / "adapter"
        with tinker.ServiceClient(base_url=args.base_url, api_key=args.api_key) as service:
            training = service.create_training_client_from_state(args.state).result()
            tokenizer = training.get_tokenizer()
            exported = training.save_weights_external("export").result().path
            fetch(service.create_rest_client(), exported, folder)
        print("fetched:", *sorted(path.name for path in folder.iterdir()), flush=True)
        model = PeftModel.from_pretrained(base_model(args.weights or fetch_model()), folder).eval()

    with OpenAI(base_url=f"{args.base_url}/oai/api/v1", api_key=args.api_key) as client:
        answering: dict[str, Answer] = {
            "base, by the API": lambda question: by_api(client, args.model, question),
            "checkpoint, by the API": lambda question: by_api(client, args.state, question),
            "checkpoint, by PEFT": lambda question: by_peft(model, tokenizer, question),
        }
        problems = tasks.sums().held_out[: args.held_out]
        answers = {
            name: ask(name, answer, [problem.question for problem in problems])
            for name, answer in answering.items()
        }
    report(args, problems, answers)


def fetch(rest: Any, path: str, folder: Path) -> None:
    """The links need no key, and end after an hour."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, url in rest.get_external_weights_urls(path).result().urls.items():
        urllib.request.urlretrieve(url, folder / name)


def base_model(weights: Path) -> Any:
    file = {"gguf_file": weights.name} if weights.is_file() else {}
    folder = weights.parent if weights.is_file() else weights
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **file)


def ask(name: str, answer: Answer, questions: list[str]) -> list[str]:
    progress = Progress(name, len(questions))
    given = []
    for done, question in enumerate(questions, 1):
        given.append(answer(question))
        progress.step(done)
    return given


def by_api(client: OpenAI, model: str, question: str) -> str:
    """Its system message is empty, as in training."""
    messages: list[Any] = [
        {"role": "system", "content": ""},
        {"role": "user", "content": question},
    ]
    try:
        reply = client.chat.completions.create(
            model=model, messages=messages, temperature=0.0, max_tokens=MAX_TOKENS
        )
    except OpenAIError as error:
        raise options.RecipeError(f"the OpenAI API: {error}") from error
    return reply.choices[0].message.content or ""


def by_peft(model: Any, tokenizer: Any, question: str) -> str:
    prompt_T = torch.tensor([chat.prompt_tokens(tokenizer, question)])
    with torch.inference_mode():
        said = model.generate(
            input_ids=prompt_T, attention_mask=torch.ones_like(prompt_T), do_sample=False,
            max_new_tokens=MAX_TOKENS, pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
    return chat.answer_text(tokenizer, said[0, prompt_T.shape[1] :].tolist())


def report(
    args: argparse.Namespace, problems: list[tasks.Problem], answers: dict[str, list[str]]
) -> None:
    table = {
        name: sum(tasks.grade(p, a) for p, a in zip(problems, given, strict=True)) / len(given)
        for name, given in answers.items()
    }
    for name, given in answers.items():
        print(f"{name}: {table[name]:.0%} right; {problems[0].question} -> {given[0]}", flush=True)
    _, api, peft = answers.values()
    num_same = sum(a == b for a, b in zip(api, peft, strict=True))
    print(f"the same by the API and by PEFT: {num_same} of {len(api)}", flush=True)
    figures = {"right": table, "num_same": num_same, "answers": answers}
    bars = {name: {"sums": share} for name, share in table.items()}
    leave(args.out, "export_and_chat", figures, lambda plot, path: plot.draw_bars(path, bars))


if __name__ == "__main__":
    options.main(run, parser())
