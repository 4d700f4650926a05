"""Word problems with gold answers: the project's own, or any file in gsm8k's JSONL form; prompts made from them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from kvx.errors import DatasetError

STOP = ("\nQuestion:",)
_GOLD = re.compile(r"####\s*(-?[\d,]*\.?\d+)")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_CALCULATOR_NOTE = re.compile(r"<<[^>]*>>")


@dataclass(frozen=True)
class Problem:
    """One word problem: `answer` is the worked solution, `gold` its final number as text (no thousands commas)."""

    question: str
    answer: str
    gold: str


def own_problems() -> list[Problem]:
    """The problems that come with kvx."""
    return _parse(_own_text("word_problems.jsonl"), "kvx's own problems")


def own_shots() -> list[Problem]:
    """The worked examples that come with kvx; none of them is among `own_problems`."""
    return _parse(_own_text("few_shot.jsonl"), "kvx's own examples")


def load_problems(path: Path, limit: int | None = None) -> list[Problem]:
    """Read a gsm8k JSONL file: per line an object with `question` and `answer`, the answer ending in `#### NUMBER`.

    Triggers of DatasetError: the file is missing, unreadable or empty; a line (named) is malformed. Lines after the
    first `limit` problems are not looked at.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DatasetError(f"the dataset {path} cannot be read: {error.strerror}; give a gsm8k JSONL file") from error
    except UnicodeDecodeError as error:
        raise DatasetError(f"the dataset {path} is not UTF-8 text; a gsm8k JSONL file is needed") from error
    problems = _parse(text, str(path), limit)
    if not problems:
        raise DatasetError(f"the dataset {path} holds no questions; one JSON object a line is needed")
    return problems


def prompt(problem: Problem, shots: Sequence[Problem]) -> str:
    """The completion prompt: the worked examples, then the question."""
    worked = [f"Question: {shot.question}\nAnswer: {_CALCULATOR_NOTE.sub('', shot.answer)}\n\n" for shot in shots]
    return "".join(worked) + f"Question: {problem.question}\nAnswer:"


def is_correct(text: str, problem: Problem) -> bool:
    """Whether a model's answer ends at the gold number: the one after `####`, else the last number of the text."""
    match = _GOLD.search(text)
    numbers = [match.group(1)] if match else _NUMBER.findall(text)
    return bool(numbers) and _value(numbers[-1]) == _value(problem.gold)


def _own_text(name: str) -> str:
    return resources.files("kvx.verify").joinpath(name).read_text(encoding="utf-8")


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def _parse(text: str, source: str, limit: int | None = None) -> list[Problem]:
    problems: list[Problem] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if limit is not None and len(problems) >= limit:
            break
        if line.strip():
            problems.append(_parse_line(line, f"line {number} of {source}", number))
    return problems


def _parse_line(line: str, where: str, number: int) -> Problem:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DatasetError(f"{where} is not JSON ({error}); one JSON object a line is needed", number) from error
    if not isinstance(row, dict):
        raise DatasetError(f"{where} is not a JSON object; question and answer are needed", number)
    for field in ("question", "answer"):
        if not isinstance(row.get(field), str) or not row[field].strip():
            raise DatasetError(f"{where} has no text in {field!r}; question and answer are needed", number)
    match = _GOLD.search(row["answer"])
    if match is None:
        raise DatasetError(f"{where} has no gold answer; the answer must end in '#### NUMBER'", number)
    return Problem(row["question"].strip(), row["answer"].strip(), match.group(1).replace(",", ""))
