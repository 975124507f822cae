"""A real session process of two streams that starts no Spark: its queries run until somebody ends them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from streaming_jobs.settings import Settings
from tests.support import ROOT

FLOW = """
from pyspark.sql.types import LongType, StructField, StructType
from streaming_jobs.formats import Json
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream

@stream(source=KafkaTopic("t", value=Json(StructType([StructField("n", LongType())]))), sink=DeltaTable("watched"))
def watched(t):
    return t.select("n")

@stream(source=KafkaTopic("t", value=Json(StructType([StructField("n", LongType())]))), sink=DeltaTable("beside"))
def beside(t):
    return t.select("n")
"""

WITHOUT_SPARK = """
import os, sys
from streaming_jobs.runtime.code_version import loaded_code
from streaming_jobs.session import Session, main
from streaming_jobs.testing import MemoryQueries, MemoryQuery, MemoryRuntime

class Running(MemoryQueries):
    def query(self, stream):
        self.batch_done(stream, 0)
        return MemoryQuery()

def make(settings, streams, **options):
    codes = {stream.name: loaded_code(stream, settings.flows).hash for stream in streams}
    print(os.getpid(), "--again" in sys.argv, codes, flush=True)
    return Session(settings, streams, runtime=MemoryRuntime(), queries=Running(settings), **options)

sys.exit(main(make=make))
"""


def without_spark(flow: Path, home: Settings, *options: str) -> subprocess.Popen[str]:
    """A supervised session of both streams, in a process of its own that starts no Spark."""
    script = flow.with_name("session_without_spark.py")
    script.write_text(WITHOUT_SPARK)
    variables = {"RECOURSE_HOME": str(home.home), "RECOURSE_FLOWS": '["watched_flow"]'}
    return subprocess.Popen(
        [sys.executable, str(script), "--streams", "watched,beside", "--supervised", *options],
        env={**os.environ, "PYTHONPATH": str(ROOT), "RECOURSE_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:1", **variables},
        cwd=flow.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
