"""Pages without plotly: a folder's conftest imports the fixture."""

from collections.abc import Iterator

import pytest

from heddle.lab.pages import render


@pytest.fixture(autouse=True, scope="module")
def light_pages() -> Iterator[None]:
    """Leaves plotly's five megabytes out of the pages that commands write; what a browser shows has its own tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(render, "plotly_script", lambda: "/* plotly */")
        yield
