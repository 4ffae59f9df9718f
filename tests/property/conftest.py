"""What the property tests share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Small tensors gain nothing from more, and threads that wait for each other are slow on a busy machine."""
    torch.set_num_threads(1)
