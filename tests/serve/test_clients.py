"""Public clients, signals to a process, a browser, and many clients that come, go, stall and send garbage."""

import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, DRIVER, chromium
from crowd import KINDS, Content, crowd
from fakes import write_checkpoint
from serving import Endless, Slow, served_by_a_process, serving
from test_texts_served import read_all, wait_for

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def alone(body: dict[str, Any]) -> Content:
    how: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "logprobs": True, "seed": body["seed"]}
    model, tokenizer = Slow(), Endless()
    made = model.generate(tokenizer, [body["prompt"]], body["max_tokens"], **how)[0]  # type: ignore[arg-type]
    return Content(made["generation"], made["logprobs"])


def test_openai_s_client_completes_chats_streams_and_reads_errors() -> None:
    openai = pytest.importorskip("openai")
    with serving(key="secret") as served:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="secret", max_retries=0)
        assert [model.id for model in client.models.list()] == ["demo"]
        assert client.models.retrieve("demo").id == "demo"
        how = {"model": "demo", "max_tokens": 8, "seed": 1}
        made = client.completions.create(prompt="Hello", logprobs=0, **how)
        assert made.choices[0].text == alone({"prompt": "Hello", **how}).text
        assert len(made.choices[0].logprobs.token_logprobs) == 8
        stream = client.completions.create(prompt="Hello", stream=True, **how)
        assert "".join(chunk.choices[0].text for chunk in stream) == made.choices[0].text
        dialog = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        ours: dict[str, Any] = {"extra_body": {"top_k": 5, "kv_caching": False}, **how}
        chat = client.chat.completions.create(messages=dialog, logprobs=True, **ours)
        logprobs = chat.choices[0].logprobs.content
        assert bytes(byte for one in logprobs for byte in one.bytes).decode() == chat.choices[0].message.content
        longer = [*dialog, chat.choices[0].message, *dialog]  # what its documentation appends
        assert client.chat.completions.create(messages=longer, **how).usage.prompt_tokens > chat.usage.prompt_tokens
        usage = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": {"top_k": 5}}
        *chunks, last = client.chat.completions.create(messages=dialog, **usage, **how)
        assert "".join(chunk.choices[0].delta.content for chunk in chunks) == chat.choices[0].message.content
        assert last.usage == chat.usage
        assert last.usage.prompt_tokens_details.cached_tokens == 0
        with pytest.raises(openai.BadRequestError, match="unknown field tone"):
            client.completions.create(prompt="a", extra_body={"tone": 1}, **how)
        with pytest.raises(openai.AuthenticationError, match="Authorization: Bearer KEY"):
            client.with_options(api_key="wrong").models.list()
        served.model.nan = True
        with pytest.raises(openai.APIError, match="not finite"):
            list(client.completions.create(prompt="a", stream=True, **how))


def test_clients_that_come_go_stall_and_send_garbage_change_no_text_and_leave_no_bytes() -> None:
    """For 20 seconds; `crowd.py` as a program does so with the demo model, for 10 minutes."""

    def some_body(draw: random.Random) -> dict[str, Any]:
        prompt = "A beginning that many share, " * draw.randrange(3) + str(draw.random())[:6]
        return {"prompt": prompt, "max_tokens": draw.randint(1, 60), "seed": draw.randrange(4), "logprobs": 0}

    with serving(rows=6, queue=10, cache_bytes=3000, check=0.1, time_limit=3.0) as served:
        seen = crowd(served, clients=24, seconds=20, patience=1, some_body=some_body, alone=alone)
        served.until("num_requests_running", 0)
        assert seen["wrong"] == 0
        assert min(seen[kind] for kind in (*KINDS, "compared")) > 10
        wait_for(lambda: served.metric("texts_checked_total") > 0)
        assert served.metric("texts_differed_total") == 0
        assert [*served.app.replies, *served.engine._jobs, *served.engine._uncached] == []
        texts = served.engine._writer.texts
        assert texts.idle
        assert texts.predicted_bytes == texts._caches.kept_bytes <= 3000


def test_sigterm_ends_a_process_after_its_texts_and_each_request_has_a_line_of_the_log(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", max_seq_len=32768)
    with served_by_a_process("--ckpt_dir", str(path), "--grace", "1", "--log_requests") as (process, served):
        short, long = (
            served.opened(prompt="a", max_tokens=5),
            served.opened(prompt="a", max_tokens=30000, stream=True, temperature=0),
        )
        assert long.recv(65536)
        process.send_signal(signal.SIGTERM)
        assert b'"finish_reason":"' in read_all(short)
        assert b'"code":"cancelled"' in read_all(long)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, "Traceback" in errors) == (0, False), errors
        assert errors.count("/v1/completions 200") == 2, errors


def test_the_example_of_a_unit_of_systemd_is_a_valid_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    unit = tmp_path / "llama-kv.service"
    command = Path(sys.executable).with_name("llama-kv")
    text = (EXAMPLES / "llama-kv.service").read_text().replace("/opt/llama-kv/bin/llama-kv", str(command))
    unit.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_example_of_an_image_is_built_and_its_command_has_help() -> None:
    def docker(*words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["docker", *words], capture_output=True, text=True, check=check)

    if shutil.which("docker") is None or docker("info", check=False).returncode:
        pytest.skip("there is no daemon of Docker")
    image = docker("build", "--quiet", "-f", EXAMPLES / "Dockerfile", EXAMPLES.parents[1]).stdout.strip()
    assert "--require_fast" in docker("run", "--rm", image, "llama-kv", "serve", "--help").stdout


# ---- the page --------------------------------------------------------------------------------------------------------

SHIFTS = """
window.shift = 0;
const add = (list) => list.getEntries().forEach((one) => { window.shift += one.hadRecentInput ? 0 : one.value; });
new PerformanceObserver(add).observe({ type: "layout-shift", buffered: true });
"""


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if not (CHROMIUM and DRIVER):
        pytest.skip("there is no Chromium with its driver here")
    driver = chromium(tmp_path)
    yield driver
    driver.quit()


def test_the_page_shows_what_a_token_costs_with_the_cache_and_without(browser: Any) -> None:
    """By keyboard alone, at all widths, without a shift of the layout, an outside resource or an error."""
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    def run(script: str) -> Any:
        return browser.execute_script(script)

    def press(*keys: str) -> None:
        browser.switch_to.active_element.send_keys(*keys)

    def text(name: str) -> str:
        return str(run(f"return document.getElementById('{name}').textContent"))

    def until(true: str) -> None:
        WebDriverWait(browser, 60, 0.02).until(lambda _: run(f"return {true}"))

    with serving(key="secret") as served:
        served.model.args = served.model.args.__class__(vocab_size=128, max_seq_len=1000)
        browser.get(f"http://127.0.0.1:{served.port}/")
        run(SHIFTS)
        until("document.getElementById('door').open")
        press("secret", Keys.ENTER)
        until("document.getElementById('byline').textContent.includes('scripted')")
        run("document.getElementById('text').focus()")
        served.model.seconds = 0.001
        press("<b>Hello</b>", Keys.ENTER)
        until("!document.getElementById('send').disabled && document.querySelectorAll('#log p').length === 2")
        press(Keys.TAB, Keys.TAB)
        run("document.getElementById('again').focus()")
        press(Keys.ENTER)
        until("document.getElementById('verdict').textContent.includes('The text is the same')")
        assert run("return document.querySelector('#log .you').textContent") == "<b>Hello</b>"
        assert run("return [...document.querySelectorAll('#log p')].slice(1).map((p) => p.textContent)[0]") == run(
            "return [...document.querySelectorAll('#log p')].slice(2).map((p) => p.textContent)[0]"
        )
        fed = [int(text(f"fed-{side}").replace(",", "")) for side in ("on", "off")]
        made = [int(text(f"made-{side}")) for side in ("on", "off")]
        assert made == [300, 300]
        prompt = fed[0] - 299
        assert fed[1] == sum(range(prompt, prompt + 300))
        assert text("reused-on") == "0"
        assert "cache on" in str(run("return document.getElementById('chart').ariaLabel"))
        assert run("return window.shift") < 0.01
        for width in (360, 800, 1280):
            screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
            assert run("return document.documentElement.scrollWidth <= document.documentElement.clientWidth"), width
            assert run(
                "return [...document.querySelectorAll('th, td')].every((c) => c.scrollWidth <= c.clientWidth)"
            ), width
        assert [one for one in run("return performance.getEntriesByType('resource').map((one) => one.name)")
                if not one.startswith(f"http://127.0.0.1:{served.port}/v1/")] == []  # fmt: skip
        named = browser.find_elements("css selector", "#form button, #form input, #form textarea")
        assert [one for one in named if not one.accessible_name.strip()] == []
        assert [one for one in browser.get_log("browser") if "401" not in one["message"]] == []
