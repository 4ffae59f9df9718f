"""The case fixture: one driver with addresses reserved, for every kind of driver."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from driver_cases import KINDS, Case, open_case


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    if request.param.startswith("cuda"):
        request.getfixturevalue("cuda_device")
    driver, real, used = open_case(request.param, request)
    case = Case(driver, real, used, driver.granularity)
    case.base = driver.reserve(Case.PAGES * case.page)
    yield case
    driver.close()
