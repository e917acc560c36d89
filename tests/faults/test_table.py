"""The tables in docs/results-failures.md are what is recorded, and every row has its test."""

from __future__ import annotations

import json

from tests.faults import soak_table, test_deployed, test_rounds, test_runs
from tests.faults.rows import BEGIN, DOCUMENT, END, read, table


def test_the_document_shows_the_recorded_rows() -> None:
    shown = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert shown == table(read()) + "\n"


def test_the_document_shows_the_recorded_soak() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    shown = text.partition(soak_table.BEGIN)[2].partition(END)[0]
    assert shown == soak_table.table(json.loads(soak_table.RECORDED.read_text())) + "\n"


def test_every_row_has_its_test_and_there_are_enough() -> None:
    tested = {(role, f.name, phase) for role, f, phase in (c.values for c in test_rounds.cases())}
    tested |= {(f.role, f.name, phase) for f, phase in (c.values for c in test_runs.cases())}
    tested |= {(case.who, case.name, test_deployed.PHASE) for case in test_deployed.CASES}
    recorded = {(row.role, row.fault, row.phase) for row in read()}
    assert recorded <= tested
    assert len(recorded) >= 60
    quick = [case for case in test_rounds.cases() if not case.marks]
    assert len(quick) >= 20
