"""Fixtures for the tests of experiments."""

import functools
import http.server
import json
import re
import shutil
import subprocess
import threading

import pytest
import torch

from rbn.experiments.build import build, make_trainer


@pytest.fixture
def stopped_and_whole(tmp_path):
    """Trains without a stop, and with a stop after some steps, and compares the results."""

    def compare(config, steps):
        def trainer(folder):
            return make_trainer(config, build(config, 1, torch.device("cpu")), tmp_path / folder)

        whole, first = trainer("whole"), trainer("stopped")
        whole.run()
        for progress in first.steps():
            if progress.step == steps:
                break
        with first.isolated():
            first.save()
        second = trainer("stopped")
        assert second.progress.step == steps
        second.run()
        expected, found = whole.module.state_dict(), second.module.state_dict()
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert torch.equal(value, found[name]), name
        assert whole.progress.best == second.progress.best

    return compare


BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
HEADLESS = (BROWSER, "--headless", "--no-sandbox", "--disable-gpu")
WIDTHS = (390, 768, 1280)
# Loads the page at each width, with all details open, and measures it.
MEASURE = """<!DOCTYPE html><body><pre></pre><script>
async function measure(width) {
  const frame = document.createElement("iframe");
  frame.style = `border:0;width:${width}px;height:900px`;
  const loaded = new Promise(resolve => { frame.onload = resolve; });
  frame.src = "index.html";
  document.body.append(frame);
  await loaded;
  const page = frame.contentDocument;
  page.querySelectorAll("details").forEach(d => { d.open = true; });
  const right = e => e.getBoundingClientRect().right;
  return {
    overflow: page.documentElement.scrollWidth - width,
    images: [...page.images].map(i => [i.complete, i.naturalWidth, i.clientWidth]),
    captions: [...page.querySelectorAll("caption, figcaption, summary, h1, h2, h3, p")].map(right),
    anchors: [...page.querySelectorAll("a")].map(a => a.getAttribute("href")),
    targets: [...page.querySelectorAll("[id]")].map(e => "#" + e.id),
    background: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
  };
}
(async () => {
  const found = {};
  for (const width of %s) found[width] = await measure(width);
  document.querySelector("pre").textContent = JSON.stringify(found);
})();
</script></body>"""


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """The command line of a working Chromium."""
    if BROWSER is None:
        pytest.skip("no Chromium to open the page with")
    profile = tmp_path_factory.mktemp("profile")
    command = [*HEADLESS, f"--user-data-dir={profile}", "--dump-dom", "data:text/html,<p>here</p>"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{BROWSER} does not finish with a page of one word")
    if "<p>here</p>" not in done.stdout:
        pytest.skip(f"{BROWSER} does not start here: {done.stderr[-300:]}")
    return HEADLESS


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/favicon.ico":
            self.send_response(204)
            self.end_headers()
        else:
            super().do_GET()


@pytest.fixture
def open_page(browser, tmp_path):
    """Opens a page in Chromium; returns its measurements by width, and checks the console."""

    def opened(page, dark=False):
        shown = tmp_path / ("dark" if dark else "light")
        shown.mkdir()
        shutil.copy(page, shown / "index.html")
        (shown / "measure.html").write_text(MEASURE % list(WIDTHS))
        handler = functools.partial(Quiet, directory=str(shown))
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            done = subprocess.run(
                [
                    *browser,
                    *("--enable-logging=stderr", f"--user-data-dir={shown / 'profile'}"),
                    *("--virtual-time-budget=8000", "--dump-dom"),
                    f"--blink-settings=preferredColorScheme={0 if dark else 1}",
                    f"http://127.0.0.1:{server.server_port}/measure.html",
                ],
                capture_output=True,
                text=True,
                timeout=120,
            )
            server.shutdown()
        (found,) = re.findall(r"<pre>(\{.*\})</pre>", done.stdout)
        assert "CONSOLE" not in done.stderr
        return {int(width): values for width, values in json.loads(found).items()}

    return opened


@pytest.fixture
def check_page(open_page):
    """Checks a page at all widths: nothing overflows, all pictures load, all links work."""

    def check(page, dark=False):
        measured = open_page(page, dark)
        assert set(measured) == set(WIDTHS)
        for width, values in measured.items():
            assert values["overflow"] <= 0, width
            assert 0 < max(values["captions"]) <= width, width
            assert set(values["anchors"]) <= set(values["targets"])
            for complete, natural, shown in values["images"]:
                assert complete
                assert natural > 100
                assert shown > 300
            red, green, blue = map(int, re.findall(r"\d+", values["background"])[:3])
            assert (red + green + blue < 200) == dark
        return measured

    return check
