"""The documentation site builds, is complete, and looks right in a browser."""

import contextlib
import functools
import http.server
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--remote-debugging-pipe"),
)
WIDTHS = (390, 1280)  # a phone, a laptop

pytestmark = pytest.mark.skipif(
    not (ROOT / "mkdocs.yml").exists(), reason="the source distribution comes without docs"
)
fcntl = pytest.importorskip("fcntl", reason="the browser's pipe needs it, and Windows lacks it")
for tool in ("mkdocs", "material", "mkdocstrings_handlers", "latex2mathml", "typer"):
    pytest.importorskip(tool, reason=f"{tool} is not installed: pip install '.[docs,train]'")


def build(config, folder):
    """Builds a site like `make docs`; returns the exit code and the output."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(
        [*command, "--config-file", str(config), "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout


@pytest.mark.slow
def test_the_site(tmp_path):
    """A single test, so that it is built once."""
    site = tmp_path / "site"
    code, output = build(ROOT / "mkdocs.yml", site)
    assert code == 0, output
    pages = sorted(page for page in site.rglob("*.html") if page.name != "404.html")
    assert len(pages) > 50
    check_reference(site / "reference")
    check_equations(pages)
    check_in_a_browser(site, [page.relative_to(site).as_posix() for page in pages], tmp_path)


def check_reference(folder):
    """Every public name and every command has an entry."""
    text = "".join(page.read_text() for page in folder.glob("*.html"))
    entries = {name.rpartition(".")[2] for name in re.findall(r'id="(rbn\.[\w.]+)"', text)}
    for module in ("rbn", "rbn.nn", "rbn.ops", "rbn.models", "rbn.data", "rbn.training"):
        public = set(importlib.import_module(module).__all__) - {"__version__", "init"}
        assert public <= entries, module
    assert 'href="statistics.html#rbn.update_population_stats"' in text  # from a docstring
    assert '<span class="nf">BatchNormLSTM</span><span class="p">(</span>' in text  # its signature
    init = importlib.import_module("rbn").init
    functions = {name for name in vars(init) if name.endswith("_") and name[0] != "_"}
    assert functions <= entries
    import typer

    from rbn.cli.app import app

    commands = (folder / "command-line.html").read_text()
    for name in typer.main.get_command(app).commands:
        assert f"<code>rbn {name}</code>" in commands
    configs = (folder / "configs.html").read_text()
    for path in (ROOT / "src/rbn/experiments/configs").glob("*.yaml"):
        assert f"<code>{path.stem}</code>" in configs
    from rbn.experiments.config import Config

    for name in Config.__dataclass_fields__:
        assert f"<code>{name}</code>" in configs


def check_equations(pages):
    """All LaTeX became MathML."""
    equations = 0
    for page in pages:
        text = re.sub(r"<(pre|code|script).*?</\1>", "", page.read_text(), flags=re.S)
        assert not re.search(r"arithmatex|\\(?:mathrm|gamma|tilde|begin|frac)\b|:math:", text), page
        equations += text.count("<math")
    assert equations > 15


WIDTH = "document.documentElement.scrollWidth"
# Menus move immediately after a resize, instead of sliding.
STILL = """
    const style = document.createElement("style");
    style.textContent = "* { transition: none !important }";
    document.head.append(style);
"""


def check_in_a_browser(site, pages, folder):
    """No errors, no other hosts, and no page that is wider than the screen."""
    if BROWSER is None:
        pytest.skip("the site builds; there is no Chromium to open its pages with")
    with served(site) as address, Chromium(folder / "profile") as browser:
        for page in pages:
            browser.open(f"{address}/{page}")
            for width in WIDTHS:
                browser.resize(width)
                assert browser.ask(WIDTH) <= width, f"{page} is too wide for {width} px"
        assert browser.errors == []
        assert {url for url in browser.requests if not url.startswith((address, "data:"))} == set()


@contextlib.contextmanager
def served(folder):
    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=folder)
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Chromium:
    """One headless browser, controlled through a pipe with the DevTools protocol."""

    def __init__(self, profile):
        self.errors, self.requests = [], []
        self._number, self._seen = 0, b""
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # The browser reads from 3 and writes to 4; copies above those do not conflict.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (theirs_in, theirs_out)]
        quiet = os.open(os.devnull, os.O_RDWR)
        self._process = os.posix_spawn(
            BROWSER,
            [BROWSER, *OPTIONS, f"--user-data-dir={profile}"],
            dict(os.environ),
            file_actions=[
                (os.POSIX_SPAWN_DUP2, quiet, 1),
                (os.POSIX_SPAWN_DUP2, quiet, 2),
                (os.POSIX_SPAWN_DUP2, ends[0], 3),
                (os.POSIX_SPAWN_DUP2, ends[1], 4),
            ],
            setpgroup=0,
        )
        for end in (theirs_in, theirs_out, *ends, quiet):
            os.close(end)
        self._session = None

    def __enter__(self):
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        found = self._send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")
        return self

    def __exit__(self, *_):
        os.close(self._out)
        os.close(self._in)
        deadline = time.monotonic() + 10
        while os.waitpid(self._process, os.WNOHANG)[0] == 0:  # it exits when its pipe is closed
            if time.monotonic() > deadline:
                os.killpg(self._process, signal.SIGKILL)
                os.waitpid(self._process, 0)
                break
            time.sleep(0.02)

    def open(self, url):
        self._loaded = False
        found = self._send("Page.navigate", url=url)
        assert "errorText" not in found, f"{url}: {found}"
        while not self._loaded:
            self._take()
        self.ask(STILL)

    def resize(self, width):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._send("Emulation.setDeviceMetricsOverride", **size)

    def ask(self, expression):
        return self._send("Runtime.evaluate", expression=expression)["result"].get("value")

    def _send(self, method, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._take()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _take(self):
        """The next message; records errors and requests along the way."""
        while b"\0" not in self._seen:
            part = os.read(self._in, 2**16)
            if not part:
                pytest.fail("Chromium ended early")
            self._seen += part
        text, _, self._seen = self._seen.partition(b"\0")
        message = json.loads(text)
        method, params = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(params["args"])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            # The report is a separate page without an icon, which the browser then requests.
            if not params["entry"].get("url", "").endswith("/favicon.ico"):
                self.errors.append(params["entry"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        return message


@pytest.mark.slow
def test_a_broken_link_is_an_error(tmp_path):
    """Without them the same pages build, as `test_the_site` shows."""
    (tmp_path / "docs").mkdir()
    text = "[a link](no-such-page.md)\n\n[a link](index.md#no-such-place)\n\n[a link](#top)\n"
    (tmp_path / "docs/index.md").write_text(f"# Top\n\n{text}")
    (tmp_path / "mkdocs.yml").write_text(
        f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: {tmp_path / 'docs'}\nnav: [index.md]\n"
        f"hooks: [{ROOT / 'mkdocs_hooks.py'}]\nextra_css: []\n"
        "markdown_extensions: [toc]\nplugins: [search]\n"
    )
    code, output = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert code != 0, output
    for message in ("'no-such-page.md'", "no-such-place'", "with 2 warnings in strict mode"):
        assert message in output


def test_a_link_to_a_missing_file_outside_the_site_is_an_error(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT)
    hooks = importlib.import_module("mkdocs_hooks")
    config = SimpleNamespace(docs_dir=tmp_path / "docs", repo_url="https://example.org/rbn")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    for link in ("[a link](no-such-page.md)", "[a link](https://example.org)"):  # from mkdocs
        assert hooks.on_page_markdown(link, page=page, config=config, files=None) == link
    with pytest.raises(FileNotFoundError, match="no-such-file"):
        hooks.on_page_markdown("[a](../no-such-file.py)", page=page, config=config, files=None)
