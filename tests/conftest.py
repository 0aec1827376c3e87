"""Which tests are for which build; see `make test-compiled`."""

import pytest

from gateway.version import compiled


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if compiled():
        skipped = pytest.mark.skip(reason="puts something of its own into what is compiled")
        for item in items:
            if item.get_closest_marker("interpreted") is not None:
                item.add_marker(skipped)
