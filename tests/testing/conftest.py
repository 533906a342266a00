"""The test kit is tested on stock Inductor: a lowering of the plugin would change what it shows."""

import pytest

import inductor_ext


@pytest.fixture(autouse=True)
def stock_inductor():
    with inductor_ext.disable():
        yield
