"""What tests of the path over NIXL need: NIXL itself, and the transports that UCX has without RDMA."""

from __future__ import annotations

import pytest

from llm_datadist.paths.nixl_options import INSTALL, installed

needs_nixl = pytest.mark.skipif(installed() is None, reason=f"NIXL is not installed: {INSTALL}")
TRANSPORTS = {"shared memory": "sm,self,tcp", "TCP": "tcp"}
"""UCX_TLS for each of them. With shared memory the connection itself is made over TCP."""


@pytest.fixture(params=TRANSPORTS.values(), ids=TRANSPORTS.keys())
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """UCX uses this one, in this process and in those that it starts."""
    monkeypatch.setenv("UCX_TLS", request.param)
    return str(request.param)
