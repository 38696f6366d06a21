"""A minute of requests that are drawn from the server's description; `fuzz.py` sends them for as long as one likes."""

import pytest
from served import NAME

pytest.importorskip("schemathesis", reason="needs schemathesis, which `make test-all` installs")
from fuzz import fuzz

pytestmark = pytest.mark.slow


def test_no_request_breaks_the_server(started, tmp_path, caplog):
    assert fuzz(started(NAME).address(), 60, tmp_path) == 0
    assert not [record.getMessage() for record in caplog.records if record.exc_info or record.levelname == "ERROR"]
