"""One pair for all routers, one process of each router for all its tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import cast

import pytest
import pytest_asyncio

from support.cluster import PairCluster
from support.foreign import NAMES, Before, OpenCluster, before


@pytest.fixture(scope="session")
def pair() -> Iterator[PairCluster]:
    # Mode exact: a text must not depend on what else was computed in the same step.
    with OpenCluster(model="tiny-glm", mode="exact", chunk=256) as started:
        yield started


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=NAMES)
async def placed(
    pair: PairCluster, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Before]:
    folder = tmp_path_factory.mktemp("routers")
    async with before(pair, cast("str", request.param), folder) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def foreign(placed: Before) -> AsyncIterator[Before]:
    """A router with empty records; what a test leaves behind fails it."""
    placed.forget()
    yield placed
    await placed.cluster.wait_idle()
