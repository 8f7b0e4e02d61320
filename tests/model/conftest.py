import pytest

from tests.distributed.worlds import layout


@pytest.fixture(scope="module")
def context():
    with layout(tp=1, ep=1) as context:
        yield context
