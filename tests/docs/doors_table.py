"""The table of features in docs/doors.md: `python -m tests.docs.doors_table` writes it.

Every cell names the test that shows it, in tests/chat/test_openai_package.py,
tests/chat/test_anthropic_package.py, or with real weights in tests/e2e/test_doors.py."""

import re
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "doors.md"
FILES = {
    "openai": ("tests/chat/test_openai_package.py", "tests/e2e/test_doors.py"),
    "anthropic": ("tests/chat/test_anthropic_package.py", "tests/e2e/test_doors.py"),
}
MARK = re.compile(r"<!-- doors -->\n(?:\|.*\n)*")

# feature: (test with `openai`, test with `anthropic`); "" where that API has no such thing
FEATURES = {
    "models": ("test_models_are_listed_and_found", "test_models_are_listed"),
    "an answer": ("test_a_chat_is_answered", "test_a_message_is_answered"),
    "a stream": ("test_a_chat_is_streamed", "test_a_message_is_streamed_by_anthropic_s_events"),
    "the stream's text is the answer's": (
        "test_a_stream_comes_in_pieces_and_is_the_whole_answer",
        "test_the_streamed_text_is_the_whole_text",
    ),
    "tools, and their results": (
        "test_tools_are_called_and_their_results_come_back",
        "test_tools_are_called_and_their_results_come_back",
    ),
    "tool calls in a stream": (
        "test_tool_calls_are_streamed_as_they_are_written",
        "test_tool_inputs_are_streamed_as_json_deltas",
    ),
    "a call is required": (
        "test_tool_choice_required_gives_a_call_by_the_tool_s_schema",
        "test_a_tool_choice_gives_a_call_by_the_tool_s_schema",
    ),
    "no parallel calls": ("test_parallel_tool_calls_false_gives_one_call", ""),
    "JSON by a schema": (
        "test_response_format_json_schema_gives_what_parses",
        "test_an_output_format_gives_json_of_its_schema",
    ),
    "stop strings": (
        "test_a_stop_string_ends_the_answer",
        "test_a_stop_sequence_ends_the_answer_and_is_named",
    ),
    "a stream that is closed ends its sample": (
        "test_a_stream_that_is_closed_ends_its_sample",
        "test_a_stream_that_is_closed_ends_its_sample",
    ),
    "an answer that is cut off": (
        "test_max_tokens_is_the_reason_of_an_answer_that_is_cut_off",
        "test_max_tokens_is_the_reason_of_an_answer_that_is_cut_off",
    ),
    "the last message is continued": (
        "test_an_answer_that_was_begun_is_continued",
        "test_an_answer_that_was_begun_is_continued",
    ),
    "reasoning": (
        "test_reasoning_is_apart_from_the_answer",
        "test_reasoning_is_a_thinking_block",
    ),
    "reasoning of earlier turns": ("", "test_thinking_of_earlier_turns_is_taken"),
    "`n`, `logprobs`": ("test_n_and_logprobs", ""),
    "completions": ("test_a_completion_is_answered_and_streamed", ""),
    "log-probabilities of a prompt": ("test_a_prompt_is_scored_by_echo", ""),
    "counting tokens": ("", "test_tokens_are_counted"),
    "seeds of the Tinker API": (
        "test_a_seeded_chat_has_the_tokens_and_logprobs_of_the_tinker_api",
        "test_both_apis_give_the_same_text",
    ),
    "checkpoints, while training runs": (
        "test_a_checkpoint_answers_while_its_model_trains_on",
        "test_a_checkpoint_answers_while_its_model_trains_on",
    ),
    "another user's checkpoint": (
        "test_a_checkpoint_is_its_owner_s_alone",
        "test_a_checkpoint_is_its_owner_s_alone",
    ),
    "errors as the package raises them": (
        "test_an_unknown_model_raises_not_found",
        "test_an_unknown_model_raises_not_found",
    ),
}


def with_table(text: str) -> str:
    head = "| | " + " | ".join(f"`{package}` {version(package)}" for package in FILES) + " |\n"
    rows = [
        f"| {feature} | {' | '.join(map(_cell, tests))} |\n" for feature, tests in FEATURES.items()
    ]
    table = f"{head}|---|---|---|\n{''.join(rows)}"
    return MARK.sub(lambda _: f"<!-- doors -->\n{table}", text)


def _cell(test: str) -> str:
    return f"`{test}`" if test else "-"


def missing_tests() -> list[str]:
    """Tests of the table that no file of their package has."""
    missing: list[str] = []
    for place, files in enumerate(FILES.values()):
        sources = "\n".join((ROOT / file).read_text(encoding="utf-8") for file in files)
        tests = [tests[place] for tests in FEATURES.values() if tests[place]]
        missing += [test for test in tests if f"def {test}(" not in sources]
    return missing


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
