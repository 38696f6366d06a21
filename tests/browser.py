"""Pages in a headless Chromium without a network."""

import shutil
import subprocess

import pytest

SWITCHES = (
    "--headless --no-sandbox --disable-gpu --enable-logging=stderr --disable-background-networking "
    "--host-resolver-rules=MAP*~NOTFOUND --allow-file-access-from-files"
).split()


def chromium():
    """The path of a Chromium; without one, the test is skipped."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium to open the page with")
    return found


def run_browser(page, profile, *switches):
    """Open a file, check that its console stays empty, and return what the browser prints."""
    command = [chromium(), *SWITCHES, *switches, f"--user-data-dir={profile}", page.as_uri()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in ran.stderr, ran.stderr
    return ran.stdout


def elements_of(page, profile, *switches):
    """The page's elements after its scripts have run."""
    return run_browser(page, profile, "--dump-dom", *switches)
