"""In a browser the page shows each step: by slider, by keys and while playing, on phones and in dark mode.

Chromium runs without a window, and nothing is fetched. Skipped without Chromium, its driver or selenium.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, DRIVER, chromium
from fakes import Ids
from tiny import tiny_model

from llama.host import palette
from llama.watch.record import Recording, record
from llama.watch.watch_page import page

pytest.importorskip("selenium", reason="selenium is not installed")
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="there is no Chromium with its driver here"),
]

ROOT = Path(__file__).resolve().parents[2]
PROMPT, NEW = [3, 1, 4, 1, 5], 9
KINDS = ("static", "window:6+2", "int8")


class Page:
    """A page in the browser."""

    def __init__(self, driver: Any, folder: Path) -> None:
        self.driver, self.folder = driver, folder

    def open(self, kind: str = "static", address: str = "", *, width: int = 1000, dark: bool = False) -> None:
        screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        self.driver.get("about:blank")
        self.driver.get(f"{(self.folder / kind.partition(':')[0]).as_uri()}.html{address}")

    def run(self, script: str, *given: Any) -> Any:
        return self.driver.execute_script(script, *given)

    def find(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return str(self.find(selector).get_attribute("textContent"))

    @property
    def step(self) -> int:
        return int(self.text("#place").split()[0])

    def colour_at(self, canvas: str, row: int, position: int) -> str:
        """Return the colour in a cell of a grid or triangle, left of its middle, as #RRGGBB."""
        size = (2, 9) if canvas.startswith("grid") else (len(PROMPT) + NEW, 0)
        red, green, blue = self.run(
            "const c = document.getElementById(arguments[0]), copy = document.createElement('canvas');"
            "copy.width = c.width; copy.height = c.height;"
            "const pen = copy.getContext('2d', { willReadFrequently: true }); pen.drawImage(c, 0, 0);"
            "const width = c.width / arguments[3], height = (c.height - arguments[5]) / arguments[4];"
            "const x = Math.floor((arguments[2] + 0.25) * width), y = Math.floor((arguments[1] + 0.5) * height);"
            "return [...pen.getImageData(x, y, 1, 1).data].slice(0, 3);",
            *(canvas, row, position, len(PROMPT) + NEW, *size),
        )
        return f"#{red:02X}{green:02X}{blue:02X}"


@pytest.fixture(scope="module")
def recordings() -> dict[str, Recording]:
    model = tiny_model()
    made = {kind: record(model, Ids(), PROMPT, NEW, temperature=0.0, kv_cache=kind) for kind in KINDS}
    again = [*PROMPT, *PROMPT[:3]]
    return made | {
        "guesses": record(model, Ids(), again, len(PROMPT) + NEW - len(again), temperature=0.0, speculate=Wrong)
    }


class Wrong:
    """Guesses two tokens, of which the model chooses none."""

    def propose(self, ids: Sequence[int], count: int) -> list[int]:
        return [38, 39][:count]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory, recordings: dict[str, Recording]) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("pages")
    for kind, recording in recordings.items():
        (folder / f"{kind.partition(':')[0]}.html").write_bytes(page(recording).encode())
    driver = chromium(folder / "profile")
    try:
        yield Page(driver, folder)
    finally:
        driver.quit()


@pytest.fixture(autouse=True)
def no_errors_in_the_console(shown: Page) -> Iterator[None]:
    yield
    assert shown.driver.get_log("browser") == []


def test_the_slider_and_keys_and_the_address_turn_to_a_step(shown: Page) -> None:
    shown.open(address="#step=4")
    assert shown.step == 4
    slider, body = shown.find("#slider"), shown.find("body")
    slider.send_keys(Keys.ARROW_RIGHT)
    assert shown.step == 5
    webdriver.ActionChains(shown.driver).move_to_element(slider).click().perform()
    assert shown.step == (NEW + 1) // 2
    shown.run("document.activeElement.blur()")
    for key, step in ((Keys.END, NEW), (Keys.ARROW_LEFT, NEW - 1), (Keys.HOME, 1), (Keys.ARROW_RIGHT, 2)):
        body.send_keys(key)
        assert shown.step == step
    assert shown.driver.current_url.endswith("#step=2")
    assert slider.get_attribute("aria-valuetext") == f"Step 2 of {NEW}"
    assert shown.text("#words").startswith("Step 2: 1 token fed, 5 positions read from the cache.")
    for button, step in (("#next", 3), ("#back", 2)):
        shown.find(button).click()
        assert shown.step == step


def test_it_plays_to_the_end_and_pauses(shown: Page) -> None:
    shown.open()
    shown.find("#play").click()
    assert shown.text("#play") == "Pause"
    assert shown.find("#words").get_attribute("aria-live") == "off"
    WebDriverWait(shown.driver, 20, 0.05).until(lambda _: shown.step > 1)
    shown.find("#play").click()
    paused = shown.step
    assert shown.text("#play") == "Play"
    assert shown.find("#words").get_attribute("aria-live") == "polite"
    shown.run(f"location.hash = 'step={NEW - 1}'")
    shown.find("#play").click()
    WebDriverWait(shown.driver, 20, 0.05).until(lambda _: shown.text("#play") == "Play")
    assert 1 < paused <= NEW
    assert shown.step == NEW


def test_counters_read_back_are_those_of_the_recording(shown: Page, recordings: dict[str, Recording]) -> None:
    wasted = 0
    shown.open()
    for step, moment in enumerate(recordings["static"].moments, 1):
        shown.run(f"location.hash = 'step={step}'")
        WebDriverWait(shown.driver, 20, 0.01).until(lambda _, step=step: shown.step == step)
        works = [moment.on, moment.off]
        wanted = [[getattr(work, name) for work in works] for name in ("fed", "flops", "bytes_read", "bytes_held")]
        assert [[figure(shown, place, side) for side in ("on", "off")] for place in range(4)] == wanted
        wasted += moment.off.fed - moment.on.fed
        assert shown.text("#tally-off").split()[0] == str(wasted)


def figure(shown: Page, place: int, side: str) -> int:
    formula = shown.text(f"#counter-{place} .formula .{side} span")
    return int(formula.rpartition("= ")[2].replace(",", ""))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_cells_have_the_colours_of_their_states(shown: Page, dark: bool) -> None:
    shown.open(address="#step=3", dark=dark)
    shade = {name: getattr(palette, name)[dark] for name in ("CACHE", "WRITTEN", "RECOMPUTED")}
    newest = len(PROMPT) + 1
    for layer in range(2):
        on = [shown.colour_at("grid-on", layer, position) for position in range(newest + 1)]
        assert on == [shade["CACHE"]] * newest + [shade["WRITTEN"]]
        off = [shown.colour_at("grid-off", layer, position) for position in range(newest + 2)]
        assert shade["RECOMPUTED"] in off[:newest]  # hatched
        assert not {shade["CACHE"], shade["WRITTEN"]} & set(off[:newest])
        assert off[newest] == shade["WRITTEN"]
        assert off[newest + 1] not in shade.values()
    assert len(shown.driver.find_elements(By.CSS_SELECTOR, "#text-on .written")) == 1
    assert len(shown.driver.find_elements(By.CSS_SELECTOR, "#text-off .recomputed")) == newest


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_triangle_has_a_new_row_with_the_cache_and_all_rows_without_it(shown: Page, dark: bool) -> None:
    shown.open(address="#step=3", dark=dark)
    written, again, empty = (getattr(palette, name)[dark] for name in ("WRITTEN", "RECOMPUTED", "GRID"))
    newest = len(PROMPT) + 1
    for side, old in (("on", False), ("off", True)):
        rows = [[shown.colour_at(f"pairs-{side}", row, key) for key in range(row + 2)] for row in range(newest + 2)]
        assert {row.pop() for row in rows} == {"#000000"}  # ahead: transparent
        assert [set(row) for row in rows[newest:]] == [{written}, {empty}]
        before = {colour for row in rows[:newest] for colour in row}
        assert (again in before, bool({written, empty} & before)) == (old, False)
    assert shown.text("#pairs-words-on") == "Step 3 computes 1 row: 7 pairs. Computed earlier: 6 pale rows."
    assert shown.text("#pairs-words-off") == "Step 3 computes 7 rows: 28 pairs, 21 of them again."


def test_an_answer_is_shown_after_a_choice_by_the_keyboard(shown: Page) -> None:
    shown.open()
    choice, button = shown.find("#questions input"), shown.find("#questions button")
    assert not button.is_enabled()
    for key, said in ((Keys.SPACE, "✓ Yes: 1. The cache has the keys"), (Keys.ARROW_RIGHT, "✗ No: 1. ")):
        choice.send_keys(key)
        button.send_keys(Keys.ENTER)
        assert shown.text("#questions .why").startswith(said)
    assert shown.step == 1  # an arrow key in a question turns no step


def test_a_mistake_shows_its_curve_and_its_text_beside_the_right_one(shown: Page) -> None:
    shown.open()
    right, first, *_ = runs = json.loads((ROOT / "llama" / "watch" / "mistakes.json").read_text())["runs"]
    assert shown.text("#text-broken") == shown.text("#text-right") == "".join(right["text"])
    inputs = shown.driver.find_elements(By.CSS_SELECTOR, "#mistakes input")
    assert len(inputs) == len(runs)
    inputs[0].send_keys(Keys.ARROW_DOWN)
    assert shown.text("#text-broken") == "".join(first["text"])
    assert shown.text("#mistake-words").startswith(first["title"])
    assert first["title"] in str(shown.find("#symptom").get_attribute("aria-label"))
    assert shown.driver.find_elements(By.CSS_SELECTOR, "#text-broken .wrong")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_rejected_guesses_are_outlined_in_the_cache_and_struck_out_in_the_text(shown: Page, dark: bool) -> None:
    shown.open("guesses", "#step=2", width=400, dark=dark)
    struck = shown.driver.find_elements(By.CSS_SELECTOR, "#text-on .rejected")
    assert [one.text.strip() for one in struck] == ["38", "39"]
    assert "2 guesses are rejected" in str(shown.find("#grid-on").get_attribute("aria-label"))
    assert "a guess of 2 fed: 0 right, 2 rejected" in shown.text("#words")
    assert not shown.run("return document.getElementById('legend-rejected').hidden")
    assert len(shown.driver.find_elements(By.CSS_SELECTOR, "#text-off .rejected")) == 0
    shown.open("static", "#step=2")
    assert shown.run("return document.getElementById('legend-rejected').hidden")


def test_positions_that_a_window_drops_disappear(shown: Page) -> None:
    shown.open("window:6+2", f"#step={NEW}")
    newest = len(PROMPT) + NEW - 2
    kept = {0, 1, *range(newest - 5, newest)}
    cached = {p for p in range(newest) if shown.colour_at("grid-on", 0, p) == palette.CACHE.light}
    assert cached == kept
    assert len(shown.driver.find_elements(By.CSS_SELECTOR, "#text-on .gone")) == newest - len(kept)
    assert "are dropped" in str(shown.find("#grid-on").get_attribute("aria-label"))


def test_nothing_has_to_be_scrolled_sideways(shown: Page) -> None:
    for kind, width in (("static", 360), ("window:6+2", 400), ("int8", 400), ("guesses", 360), ("static", 1600)):
        shown.open(kind, f"#step={NEW}", width=width)
        shown.run("document.querySelectorAll('details').forEach((line) => { line.open = true; })")
        page = "document.documentElement"
        assert shown.run(f"return [{page}.scrollWidth - {page}.clientWidth, window.innerWidth]") == [0, width], kind


def test_every_control_has_a_name_and_each_picture_a_description(shown: Page) -> None:
    shown.open(address="#step=2")
    used = shown.driver.find_elements(By.CSS_SELECTOR, "button, input, select, summary")
    assert len(used) >= 11
    assert [one.tag_name for one in used if not one.accessible_name.strip()] == []
    pictures = shown.driver.find_elements(By.CSS_SELECTOR, "canvas:not([aria-hidden])")
    words = [str(one.get_attribute("aria-label")) for one in pictures]
    assert [one.get_attribute("role") for one in pictures] == ["img"] * 6
    assert "5 positions are read, 1 are computed and written" in words[0]
    assert "5 positions are computed again, 1 for the first time" in words[1]
    assert words[2].startswith("Triangle of queries and keys. With the cache, step 2 computes 1 row: 6 pairs.")
    assert words[4].startswith("Attention over 6 positions")
    assert words[5].startswith("KL divergence over ")
