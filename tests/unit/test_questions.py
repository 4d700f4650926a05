import json
from pathlib import Path

import pytest

from kvx.errors import DatasetError
from kvx.verify.questions import Problem, is_correct, load_problems, own_problems, own_shots, prompt


def row(question="How many?", answer="1 + 1 = 2\n#### 2"):
    return json.dumps({"question": question, "answer": answer})


def write(folder: Path, *lines: str) -> Path:
    path = folder / "problems.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_own_problems_are_enough_and_not_shown_as_examples():
    problems = own_problems()
    assert len(problems) >= 24
    assert len({problem.question for problem in problems}) == len(problems)
    assert not {p.question for p in problems} & {p.question for p in own_shots()}


def test_own_answers_end_at_their_gold_number():
    for problem in own_problems() + own_shots():
        assert is_correct(problem.answer, problem)


def test_loads_gsm8k_lines_and_skips_empty_ones(tmp_path):
    problems = load_problems(write(tmp_path, row(), "", row(answer="so\n#### 1,234"), ""))
    assert [problem.gold for problem in problems] == ["2", "1234"]


def test_line_separators_inside_a_question_do_not_end_the_line(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text('{"question": "a\u2028b\x85c", "answer": "#### 3"}\n', encoding="utf-8")
    assert load_problems(path)[0].question == "a\u2028b\x85c"


def test_limit_stops_before_later_lines_are_looked_at(tmp_path):
    assert len(load_problems(write(tmp_path, row(), row(), "broken"), limit=2)) == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"answer": "#### 1"}', "'question'"),
        ('{"question": "q"}', "'answer'"),
        ('{"question": "q", "answer": 3}', "'answer'"),
        ('{"question": " ", "answer": "#### 1"}', "'question'"),
        ('{"question": "q", "answer": "no number"}', "no gold answer"),
    ],
)
def test_malformed_line_is_named(tmp_path, line, reason):
    with pytest.raises(DatasetError, match=reason) as caught:
        load_problems(write(tmp_path, row(), line))
    assert "line 2 of" in str(caught.value)
    assert caught.value.line == 2


def test_missing_dataset_is_named(tmp_path):
    with pytest.raises(DatasetError, match=r"gone\.jsonl cannot be read: No such file"):
        load_problems(tmp_path / "gone.jsonl")


def test_a_folder_empty_or_binary_file_is_no_dataset(tmp_path):
    with pytest.raises(DatasetError, match="cannot be read"):
        load_problems(tmp_path)
    with pytest.raises(DatasetError, match="holds no questions"):
        load_problems(write(tmp_path, "", ""))
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DatasetError, match="not UTF-8"):
        load_problems(binary)


@pytest.mark.parametrize(
    ("text", "gold", "correct"),
    [
        (" 3 + 4 = 7\n#### 7", "7", True),
        ("It is 7 dollars.", "7", True),
        ("#### 1,000", "1000", True),
        ("#### 7\n then 9", "7", True),
        ("7 then 8", "7", False),
        ("no number", "7", False),
        ("", "7", False),
        ("#### -3", "-3", True),
        ("#### 2.50", "2.5", True),
    ],
)
def test_is_correct(text, gold, correct):
    assert is_correct(text, Problem("q", "a", gold)) is correct


def test_prompt_holds_examples_without_calculator_notes():
    shot = Problem("One?", "1 * 2 = <<1*2=2>>2\n#### 2", "2")
    assert prompt(Problem("Two?", "", "3"), [shot]) == (
        "Question: One?\nAnswer: 1 * 2 = 2\n#### 2\n\nQuestion: Two?\nAnswer:"
    )
