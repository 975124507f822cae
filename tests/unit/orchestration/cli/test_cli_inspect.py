"""`recourse inspect` as it is typed."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.plain_histories import PlainJob
from tests.unit.orchestration.cli.conftest import Run
from tests.unit.streaming_jobs.inspection.test_adoption import TwoPartitions

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("empty_folder")]


@pytest.fixture
def job(tmp_path: Path) -> PlainJob:
    (tmp_path / "job").mkdir()
    made = PlainJob(tmp_path / "job", random.Random(1), "append")
    made.run(3, kill="written")
    return made


def test_a_double_is_told_with_its_offsets_and_the_exit_code_is_ten(job: PlainJob, run: Run, tmp_path: Path) -> None:
    arguments = ("inspect", str(job.checkpoint), "--table", str(job.table))
    code, out, _ = run(*arguments)
    assert code == 10 and "will double (likely): batch 2 is in the table (version 2)" in out
    job.run(2)
    code, out, err = run(*arguments, "--page", "found.html", "--offset-columns", "partition,offset")
    assert code == 10 and out.splitlines()[-1] == f"{len(job.doubled)} records doubled"
    assert "batch 2 ran more than once: versions 2 to 3" in out and "the page is in found.html" in err
    assert "ran more than once" in Path("found.html").read_text(encoding="utf-8")
    value = json.loads(run(*arguments, "-o", "json")[1])
    assert value["alarming"] is True and value["findings"][0]["reason"] == "ran_again"


def test_a_sound_job_ends_with_zero_and_a_wrong_path_with_two(job: PlainJob, run: Run) -> None:
    fresh = PlainJob(job.root.parent / "fresh", random.Random(1), "sink")
    fresh.run(3)
    code, out, _ = run("inspect", str(fresh.checkpoint), "--table", str(fresh.table))
    assert code == 0 and out.splitlines()[-1] == "no loss and no double was found"
    code, out, err = run("inspect", str(job.table), "--table", str(job.table))
    assert (code, out) == (2, "") and "is not a checkpoint of Spark" in err


def test_neither_spark_nor_kafka_nor_deltalake_is_imported(job: PlainJob) -> None:
    script = (
        "import sys\nfrom orchestration import cli\n"
        f"code = cli.main(['inspect', {str(job.checkpoint)!r}, '--table', {str(job.table)!r}])\n"
        "heavy = {'pyspark', 'dagster', 'pandas', 'pyarrow', 'deltalake', 'confluent_kafka'} & sys.modules.keys()\n"
        "assert code == 10 and not heavy, (code, heavy)\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_an_adoption_shows_what_it_writes_and_asks(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, job: PlainJob
) -> None:
    monkeypatch.setattr("streaming_jobs.sources.topics.Topics.of", lambda *_: TwoPartitions())
    Path("recourse.toml").write_text(
        'flows = ["tests.unit.streaming_jobs.inspection.test_adoption"]\nkafka.bootstrap_servers = "nowhere:9092"\n'
    )
    job.run(1)
    job.append_by_hand(3)
    (tmp_path / "tables").mkdir()
    shutil.move(job.table, tmp_path / "tables" / "orders")
    places = ("--set", f"tables_dir={tmp_path / 'tables'}", "--set", f"state_dir={tmp_path / 'state'}")
    asked = (*places, "adopt", "orders", "--checkpoint", str(job.checkpoint))
    code, out, err = run(*asked)
    assert code == 2 and "version 4 (WRITE)" in err and "say --despite-findings" in err
    asked = (*asked, "--despite-findings")
    code, out, err = run(*asked)
    assert "  doubled (likely): batch 2 ran more than once: versions 2 to 3" in out
    assert code == 1 and "one commit without rows, by which the table belongs to the stream" in out
    assert "nobody is here to answer" in err and not (tmp_path / "state").exists()
    code, out, err = run(*asked, "--yes")
    assert code == 0 and "adopted: start it with `recourse streams run orders`" in err
    value = json.loads(run(*asked, "--yes", "-o", "json")[1])
    assert value["adopted"] is True and value["recorded"] is True and value["batch"] == 2

    taken_back = (*places, "adopt", "orders", "--undo")
    assert f"`recourse {' '.join(taken_back[-3:])}`" in err
    code, out, err = run(*taken_back)
    assert code == 1 and "one commit without rows, with the properties of version 4" in out
    assert "not undone: nobody is here to answer" in err and (tmp_path / "state" / "orders" / "stream.json").exists()
    assert json.loads(run(*taken_back, "-o", "json")[1])["undone"] is False
    code, out, err = run(*taken_back, "--yes")
    assert code == 0 and "undone: the job can go on" in err
    assert not (tmp_path / "state" / "orders" / "stream.json").exists()
    code, out, err = run(*taken_back, "--yes")
    assert code == 2 and "stream orders has no adoption" in err
    for wrong in (taken_back[:-1], (*asked, "--undo")):
        code, out, err = run(*wrong)
        assert code == 2 and "an adoption needs --checkpoint, its undo has none" in err
