"""The documentation site builds without warnings, its links lead somewhere, and a browser shows it without errors."""

import html
import json
import re
import subprocess
import sys
from urllib.parse import unquote

import pytest
from browser import elements_of
from documents import ROOT

# Pages with the widest tables and the longest code.
SHOWN = ["index", "getting-started", "benchmarks", "compatibility", "guides/command-line", "tutorials/custom-layer"]
SHOWN += ["api/transformers_neuronx.models.sampling", "api/transformers_neuronx.hlo"]
WIDTHS = (1280, 390)
# Opens each page in a frame of each width, and says by how much its contents are wider.
# A window of its own would have at least 500 pixels.
FRAMES = """<!doctype html><body><script>
const wanted = PAGES, found = {};
async function measure() {
  for (const [page, width] of wanted) {
    const frame = document.createElement("iframe");
    frame.width = width;
    frame.height = 900;
    frame.src = page + ".html";
    document.body.append(frame);
    await new Promise((done) => { frame.onload = done; });
    const root = frame.contentDocument.documentElement;
    found[page + " " + width] = root.scrollWidth - root.clientWidth;
    frame.remove();
  }
  document.body.dataset.found = JSON.stringify(found);
}
measure();
</script></body>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", ROOT / "docs", out]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    return out


def test_links_on_the_site_lead_somewhere(site):
    pages = {path: path.read_text() for path in site.rglob("*.html")}
    anchors = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    for path, text in pages.items():
        for target in map(html.unescape, re.findall(r'(?:href|src)="([^"]+)"', text)):
            if re.match(r"\w+:|//", target):
                assert re.match(r"https://|mailto:|data:", target), f"{path.relative_to(site)}: {target}"
                continue
            file, _, anchor = unquote(target).partition("#")
            there = (path.parent / file.partition("?")[0]).resolve() if file else path
            assert there.exists(), f"{path.relative_to(site)} links to {target}"
            if anchor and there in anchors:
                assert anchor in anchors[there], f"{path.relative_to(site)} links to {target}"


def test_the_site_needs_no_network(site):
    loads = re.compile(r'<(?:script|img|link rel="(?:stylesheet|icon)")[^>]* (?:src|href)="(http[^"]*)"')
    for path in site.rglob("*.html"):
        assert not loads.findall(path.read_text()), path.relative_to(site)


def test_the_search_finds_words_and_names(site):
    index = (site / "searchindex.js").read_text()
    assert "save_pretrained_split" in index and '"specul' in index


def test_pages_fit_a_browser(site, tmp_path):
    wanted = [(page, width) for page in SHOWN for width in WIDTHS]
    frames = site / "frames.html"
    frames.write_text(FRAMES.replace("PAGES", json.dumps(wanted)))
    shown = elements_of(frames, tmp_path, "--virtual-time-budget=60000", "--window-size=1400,1000")
    found = json.loads(html.unescape(re.search(r'data-found="([^"]*)"', shown)[1]))
    assert found == {f"{page} {width}": 0 for page, width in wanted}
