"""Make an animated picture of a page of llama/watch: python scripts/make_animation.py.

Takes a screenshot of each step in Chromium and joins them by Pillow. Needs selenium, and Chromium with its driver.
"""

import base64
import io
import shutil
import tempfile
from pathlib import Path
from typing import Any

from llama import cli
from llama.host.files import check_writable, replace_file

FLAGS = "headless=new no-sandbox disable-gpu disable-quic no-first-run disable-background-networking hide-scrollbars"
PARTS = ("#words", ".legend")  # the first and the last part of the page in the picture
LARGEST = 1_000_000  # bytes
COLOURS = 128
MARGIN = 14  # pixels


def main(
    *,
    page: str = "page.html",
    picture: str = "docs/images/watch.gif",
    width: int = 860,
    frames: int = 22,
    ms: int = 420,
) -> int:
    """Make an animated GIF of a page that --watch has written.

    Args:
        page: The page; the default is the one that `llama-kv watch` writes.
        picture: The picture to write, FILE.gif.
        width: The width of the picture in pixels.
        frames: The number of steps to show, evenly spread; the first three are always shown.
        ms: The milliseconds of each frame; the first and the last one have five times as many.
    """
    if frames < 2:
        raise ValueError(f"--frames={frames} must be at least 2, for the first step and the last")
    check_writable(Path(picture))
    with tempfile.TemporaryDirectory() as profile:
        driver = browser(Path(profile))
        try:
            pictures = screenshots(driver, Path(page).resolve(strict=True).as_uri(), width=width, frames=frames)
        finally:
            driver.quit()
    content = animated(pictures, ms)
    if len(content) > LARGEST:
        raise ValueError(f"{len(content):,} bytes are more than {LARGEST:,}; take fewer frames or a smaller width")
    print(f"{replace_file(Path(picture), content)}: {len(pictures)} frames, {len(content):,} bytes")
    return 0


def browser(profile: Path) -> Any:
    """Start Chromium without a window."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in [*FLAGS.split(), f"user-data-dir={profile}"]:
        options.add_argument(f"--{flag}")
    return webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))


def screenshots(driver: Any, address: str, *, width: int, frames: int) -> list[bytes]:
    """Return PNG pictures of some steps, in order."""
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    driver.get(address)
    last = int(driver.execute_script("return document.getElementById('slider').max"))
    steps = sorted(
        {1, 2, 3, *(round(1 + (last - 1) * part / (frames - 1)) for part in range(frames))} & {*range(last + 1)}
    )
    places = [
        driver.execute_script(
            f"const box = document.querySelector('{part}').getBoundingClientRect(); return [box.top, box.bottom]"
        )
        for part in PARTS
    ]
    top, bottom = places[0][0] - MARGIN, places[1][1] + MARGIN
    clip = {"x": 0, "y": top, "width": width, "height": bottom - top, "scale": 1}
    made = []
    for step in steps:
        driver.execute_script(f"location.hash = 'step={step}'")
        driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
        taken = driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
        made.append(base64.b64decode(taken["data"]))
    return made


def animated(pictures: list[bytes], ms: int) -> bytes:
    """Return PNG pictures as one GIF that repeats."""
    from PIL import Image

    whole = [Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures]
    palette = whole[len(whole) // 2].quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in whole]
    times = [5 * ms, *[ms] * (len(frames) - 2), 5 * ms]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=times, loop=0, optimize=True)
    return file.getvalue()


if __name__ == "__main__":
    cli.main(main)
