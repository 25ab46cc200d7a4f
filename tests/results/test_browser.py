"""The report in a real browser."""

import shutil
import time
from contextlib import contextmanager

import pytest

from became_avalanche.results.record import StageRecord, TaskRecord
from became_avalanche.results.report import report
from became_avalanche.runs.spec import read_spec
from tests.results.records import made_up
from tests.runs.components import BLOBS, record_of

pytestmark = pytest.mark.browser

METHODS = ("finetune", "gpm", "gpm-2x", "gpm+became", "joint")
BAD = "<img src=x onerror=alert(1)></script>"
FLAGS = [
    "--headless",
    "--no-sandbox",  # needed when running as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Headless Chromium; its log contains console messages and network requests."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("chromium and chromedriver are not installed (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield browser
    browser.quit()


@contextmanager
def opened(browser, file, width=1280, scheme="light"):
    """Open the page, and check at the end that it logged no message and requested only the file itself."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    wishes = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
    features = [{"name": name, "value": value} for name, value in wishes.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get_log("performance"), browser.get_log("browser")
    browser.get(file.as_uri())
    yield browser
    assert browser.get_log("browser") == []
    sent = [
        entry["message"] for entry in browser.get_log("performance") if "Network.requestWillBeSent" in entry["message"]
    ]
    assert len(sent) == 1
    assert file.as_uri() in sent[0]


def ask(browser, script, *arguments):
    return browser.execute_script(f"return {script}", *arguments)


def texts(browser, selector):
    return ask(browser, "[...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector)


def press(browser, selector):
    browser.find_element("css selector", selector).click()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A report of five methods and a failed run. One method has a name that contains HTML, which must be escaped."""
    runs = [made_up(method, seed, 4) for method in METHODS for seed in range(3)]
    for i, run in enumerate(runs):
        if run.method == "gpm":
            tasks = [TaskRecord(stages=[StageRecord(epochs=1)], ranks={"a": t + 1, BAD: 9}) for t in range(4)]
            runs[i] = run.model_copy(update={"tasks": tasks})
        if run.method == "finetune":
            runs[i] = run.model_copy(update={"label": BAD})
    runs[0] = runs[0].model_copy(update={"status": "failed", "error": BAD})
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(report(runs, BAD), encoding="utf-8")
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_page_fits_and_follows_the_system(browser, file, width, scheme):
    with opened(browser, file, width, scheme):
        assert ask(browser, "document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        lightness = "getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] > 128"
        assert ask(browser, lightness) is (scheme == "light")
        assert len(texts(browser, "figure")) == 5
        assert texts(browser, "img") == []
        other = "dark" if scheme == "light" else "light"
        ask(
            browser,
            "(document.querySelector('#theme').value = arguments[0], "
            "document.querySelector('#theme').dispatchEvent(new Event('change')))",
            other,
        )
        assert ask(browser, lightness) is (other == "light")
        charts = "[...document.querySelectorAll('figure svg[width]')]"
        scales = ask(browser, f"{charts}.map((e) => e.clientWidth / e.viewBox.baseVal.width)")
        assert scales == pytest.approx([1] * 4, abs=0.01)  # drawn for this width, not scaled
        assert overlapping_texts(browser) == []


def overlapping_texts(browser):
    """Return the pairs of texts in a chart whose boxes overlap."""
    return ask(
        browser,
        """[...document.querySelectorAll("figure svg[width]")].flatMap((chart) => {
          const texts = [...chart.querySelectorAll("text")].map((e) => [e.textContent, e.getBoundingClientRect()]);
          return texts.flatMap(([one, a], i) => texts.slice(i + 1)
            .filter(([, b]) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)
            .map(([other]) => `${one} / ${other}`));
        })""",
    )


def test_long_numbers_stay_clear_of_the_axis_title(browser, tmp_path):
    run = made_up("gpm", 0, 2)
    run = run.model_copy(update={"accuracy": {"test": [[0.925, None], [0.924, 0.927]]}})
    page = tmp_path / "report.html"
    page.write_text(report([run], "mine"), encoding="utf-8")
    with opened(browser, page):
        ticks = texts(browser, "#accuracy-1 .plot svg text")
        assert max(len(text) for text in ticks if text[0].isdigit()) >= 4
        assert overlapping_texts(browser) == []


def contrast(browser, selector):
    """Return the lowest contrast (WCAG) between text and background among visible elements."""
    return ask(
        browser,
        """(() => {
          const pixel = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
          const channels = (colour) => {
            pixel.clearRect(0, 0, 1, 1);
            pixel.fillStyle = colour;
            pixel.fillRect(0, 0, 1, 1);
            return [...pixel.getImageData(0, 0, 1, 1).data];
          };
          const luminance = ([r, g, b]) => [r, g, b].map((c) => c / 255)
            .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
            .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
          const behind = (e) => {
            const colour = channels(getComputedStyle(e).backgroundColor);
            return colour[3] === 255 ? colour : behind(e.parentElement);
          };
          const visible = [...document.querySelectorAll(arguments[0])].filter((e) => e.getClientRects().length);
          return Math.min(...visible.map((e) => {
            const front = getComputedStyle(e)[e.closest("svg") ? "fill" : "color"];
            const [x, y] = [channels(front), behind(e)].map(luminance);
            return (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
          }));
        })()""",
        selector,
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(browser, file, scheme):
    with opened(browser, file, scheme=scheme):
        text = (
            "p, li, h1, h2, h3, h4, th, td, dt, small, label, summary, legend, output, a, .results button, .heat button"
        )
        assert contrast(browser, f"{text}, svg text") >= 4.5
        assert contrast(browser, "figure svg .mark") >= 3


def test_table_sorts(browser, file):
    with opened(browser, file):
        names = texts(browser, ".results tbody th")
        column = (
            "[...document.querySelectorAll('.results tbody [data-metric=acc]')].map((e) => Number(e.dataset.value))"
        )
        first = ask(browser, column)
        heading = ".results thead [data-metric=acc]"
        orders = []
        for _ in range(3):
            press(browser, f"{heading} button")
            orders.append(
                (ask(browser, "document.querySelector(arguments[0]).ariaSort", heading), ask(browser, column))
            )
        assert orders == [
            ("descending", sorted(first, reverse=True)),
            ("ascending", sorted(first)),
            ("none", first),
        ]
        browser.find_element("css selector", ".results thead button").send_keys("\ue007")  # Enter
        ascending = texts(browser, ".results tbody th")
        assert sorted(ascending) == sorted(names)
        assert [ascending[0], ascending[1], ascending[-1]] == [BAD, "gpm", "joint upper bound"]
        bwt = "[...document.querySelectorAll('.results tbody [data-metric=bwt]')].map((e) => e.textContent)"
        for _ in range(2):
            press(browser, ".results thead [data-metric=bwt] button")
            assert ask(browser, bwt)[-1] == "–"  # joint training has no BWT, so it is last in both directions


def test_columns_can_be_chosen(browser, file):
    with opened(browser, file):
        shown = "[...document.querySelectorAll('[data-metric=aaa]')].map((e) => e.offsetParent !== null)"
        assert set(ask(browser, shown)) == {False}
        press(browser, ".columns [value=aaa]")
        assert set(ask(browser, shown)) == {True}


def test_method_filter_changes_the_charts(browser, file):
    with opened(browser, file):
        drawn = "#accuracy-1 .plot g"
        labels = [BAD, *METHODS[1:]]
        assert ask(browser, f"[...document.querySelectorAll('{drawn}')].map((e) => e.dataset.label)") == labels
        press(browser, ".picker label:nth-of-type(1) input")
        assert ask(browser, f"[...document.querySelectorAll('{drawn}')].map((e) => e.dataset.label)") == labels[1:]
        assert texts(browser, ".heat tbody th") == labels[1:]
        assert sorted(texts(browser, "#coefficients-1 .readout li span")) == ["1/t", "gpm+became"]
        press(browser, ".picker .all button:last-child")
        assert texts(browser, drawn) == []
        assert texts(browser, "#coefficients-1 .readout li span") == ["1/t"]
        press(browser, ".picker .all button:first-child")
        assert len(texts(browser, drawn)) == 5


def test_stepping_through_tasks_and_pointing_at_one(browser, file):
    with opened(browser, file):
        heading = "#tasks-1 .readout h4"
        assert texts(browser, heading) == ["Task 1, after 4 tasks"]
        press(browser, "#tasks-1 .bar button:first-of-type")
        assert texts(browser, "#tasks-1 output") == ["after 3 of 4 tasks"]
        assert texts(browser, "#tasks-1 thead button") == ["1", "2", "3"]
        ask(browser, "document.querySelector('#tasks-1 td[data-task=\"2\"]').dispatchEvent(new Event('pointerenter'))")
        assert texts(browser, heading) == ["Task 2, after 3 tasks"]
        cells = texts(browser, '#tasks-1 td[data-task="2"]')
        ranked = [text.split(" ± ")[0] for text in texts(browser, "#tasks-1 .readout b")]
        assert [f"{float(value):.1f}" for value in ranked] == sorted((c for c in cells if c != "–"), reverse=True)
        press(browser, "#accuracy-1 .bar button:last-of-type")
        press(browser, "#accuracy-1 .bar button:last-of-type")
        assert texts(browser, "#accuracy-1 .readout h4") == ["Task 2, after 4 tasks"]
        assert texts(browser, "#accuracy-1 .numbers thead th") == ["tasks learned", "2", "3", "4"]


def test_keyboard_moves_the_cursor_and_a_screen_reader_hears_it(browser, file):
    with opened(browser, file):
        plot = browser.find_element("css selector", "#coefficients-1 .plot")
        assert plot.aria_role == "slider"
        plot.send_keys("\ue012")  # left arrow
        heading, values = plot.get_attribute("aria-valuetext").split(": ")
        assert (heading, set(values.split(", "))) == ("Task 3", {"gpm+became 0.333", "1/t 0.333"})
        plot.send_keys("\ue011")  # Home
        assert plot.get_attribute("aria-valuenow") == "2"
        assert texts(browser, "#coefficients-1 .readout h4") == ["Task 2"]
        assert "gpm+became over gpm " in ask(browser, "document.querySelector('#gains-1 svg').ariaLabel")
        unnamed = [
            e.tag_name
            for e in browser.find_elements("css selector", "button, select, input, .plot")
            if e.is_displayed() and not e.accessible_name
        ]
        assert unnamed == []


def test_ranks_of_the_chosen_method(browser, file):
    with opened(browser, file):
        assert texts(browser, "#ranks-1 option") == ["gpm"]
        assert texts(browser, "#ranks-1 .readout li span") == [BAD, "a"]


def test_a_saved_specification_repeats_the_run(browser, tmp_path):
    spec = BLOBS.spec("gpm+became", 3)
    page = tmp_path / "report.html"
    page.write_text(report([record_of(spec)], "mine"), encoding="utf-8")
    behaviour = {"behavior": "allow", "downloadPath": str(tmp_path / "saved")}
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", behaviour)
    browser.get(page.as_uri())
    ask(browser, "document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    press(browser, ".save")
    saved = tmp_path / "saved" / "spec.json"
    end = time.monotonic() + 20
    while not saved.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert read_spec(saved).key() == spec.key()
