"""The log line of a step that failed."""

from __future__ import annotations

import pytest

from kvrelay.engine.masks.token_masks import GrammarFailed, NoTokenAllowed
from kvrelay.engine.sample.pending_tokens import BadLogits
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.step.batch import RowsFailed
from kvrelay.worker.step_loop import log_failed_step


@pytest.mark.parametrize("error", [NoTokenAllowed, GrammarFailed])
def test_what_a_client_got_wrong_is_one_line(error: type[RowsFailed], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvrelay.worker.step_loop")
    keys: list[SequenceKey] = [("b", 1, 0), ("a", 1, 0), ("a", 1, 1)]
    log_failed_step(7, error("its grammar ends", keys))
    (record,) = caplog.records
    assert record.levelname == "INFO" and record.exc_info is None
    assert record.getMessage() == "step 7 cannot go on with a, b: its grammar ends"


def test_many_requests_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvrelay.worker.step_loop")
    log_failed_step(7, NoTokenAllowed("none is left", [(f"r{number}", 1, 0) for number in range(10)]))
    assert "r0, r1, r2, r3, r4, r5, r6, r7 and 2 more: none is left" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("out"), RowsFailed("odd", [("a", 1, 0)]), BadLogits([("a", 1, 0)])])
def test_what_the_worker_got_wrong_has_a_traceback(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    log_failed_step(7, error)
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("ERROR", "step 7 failed")
    assert record.exc_info is not None and record.exc_info[1] is error
