"""`recourse schema`: the newest schema on stdout, its kind on stderr."""

from __future__ import annotations

import json

import pytest

from tests.support.registry import RegistryDouble, served
from tests.unit.orchestration.cli.conftest import Declare, Run


def test_the_newest_schema_is_printed_and_an_unknown_subject_refused(
    declare: Declare, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare()
    schema = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}
    with served(RegistryDouble()) as registry:
        monkeypatch.setenv("RECOURSE_REGISTRY__URL", registry.url)
        registry.register("orders-value", {**schema, "doc": "old"})
        registry.register("orders-value", schema)
        done = run.ended(0, "schema", "orders-value")
        assert json.loads(done.out) == schema and "avro" in done.err
        assert "no subject 'order-value'" in run.ended(2, "schema", "order-value").err
