"""The program that looks for faults of the JSON reader: it finds none here, and it would find each kind."""

from __future__ import annotations

import pytest

from tests.support.binary_fuzz import main as compare_binary
from tests.support.json_fuzz import fuzz, main
from tests.support.readers import ending, failing, lenient

pytestmark = pytest.mark.slow


def test_no_random_record_is_read_differently_from_the_judge(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--minutes", "0.05", "--seed", "20131231"]) == 0
    text = capsys.readouterr().out
    assert "no difference, no error, no crash" in text
    for verdict in ("good", "malformed_json", "wrong_type", "invalid_utf8", "missing_field", "trailing_data"):
        assert verdict in text


def test_a_wrong_verdict_an_error_and_a_crash_are_found_with_the_record_that_makes_them() -> None:
    (problem, *_) = fuzz(60, 1, lenient).problems
    assert "value=None" in problem and "empty_value" in problem
    (problem,) = fuzz(60, 1, failing).problems
    assert "KeyError: 'a null'" in problem and "None" in problem.partition("values: ")[2]
    (problem,) = fuzz(60, 1, ending).problems
    assert problem.startswith("the interpreter ended on None\nschema: {")


@pytest.mark.parametrize("name", ["avro", "protobuf"])
def test_binary_records_are_read_alike_side_by_side_one_by_one_and_by_another_library(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare_binary(["--format", name, "--records", "6000", "--seed", "20131231"]) == 0
    text = capsys.readouterr().out
    assert "no difference, no error" in text
    for verdict in ("good", "malformed", "invalid_utf8"):
        assert verdict in text
