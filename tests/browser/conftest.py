"""A real browser, and a server as a user starts it. Without Chromium the tests are skipped, and say so."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from serving import Serve, Serving, serving

from patience import PATIENCE_SECONDS

playwright = pytest.importorskip("playwright.sync_api")
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright  # noqa: E402

ARTEFACTS = Path(os.environ.get("HEADWATER_ARTEFACTS", Path(__file__).parents[2] / "artefacts")) / "browser"
# What a browser does by itself over the network, it does not do in tests.
QUIET = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PATIENCE_MS = PATIENCE_SECONDS * 1000
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def serve(dsn: str) -> Serve:
    return lambda *options, **given: serving(dsn, *options, **given)


@pytest.fixture(scope="module")
def server(serve: Serve) -> Iterator[Serving]:
    with serve("--kafka", "127.0.0.1:0", "--allow-network", "127.0.0.1") as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Not for the whole run: while Playwright is there, its event loop runs in this thread, and no other can.
    found = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    arguments = [*QUIET, *(("--no-sandbox",) if os.getuid() == 0 else ())]
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=found, args=arguments)
        yield browser
        browser.close()


@contextmanager
def _page(browser: Browser, name: str, **given: object) -> Iterator[Page]:
    context: BrowserContext = browser.new_context(**given)  # type: ignore[arg-type]
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    # A refused request is part of some tests; that the browser reports it is no error of the page.
    page.on(
        "console",
        lambda message: (
            wrong.append(message.text)
            if message.type == "error" and "Failed to load resource" not in message.text
            else None
        ),
    )
    try:
        yield page
    finally:
        ARTEFACTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=ARTEFACTS / f"{name}.png", full_page=True)
        context.close()
    assert wrong == []


@pytest.fixture
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page at the width of a desk; its last sight is kept as a picture."""
    with _page(browser, request.node.name, viewport={"width": 1200, "height": 800}) as found:
        yield found


@pytest.fixture
def phone(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    with _page(
        browser,
        request.node.name,
        viewport={"width": 375, "height": 740},
        has_touch=True,
        is_mobile=True,
        color_scheme="dark",
    ) as found:
        yield found
