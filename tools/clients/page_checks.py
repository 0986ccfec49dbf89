"""Checks of the page, within the environment of `page_suite`: python page_checks.py URL [OPTIONS].

Each function `check_...` gets a new tab of the browser, with the key given.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, sync_playwright

_FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
_PATIENCE_MS = 60_000
_WIDE, _PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
_SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"day": {"enum": ["today", "tomorrow"]}},
            "required": ["day"],
            "additionalProperties": False,
        },
    },
}
_HOSTILE = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
_SECRET_PROMPT = "quagmire"


@dataclass
class Tab:
    """A tab with the page. problems: errors in its console, other than refused calls."""

    browser: Browser
    url: str
    key: str
    folder: Path
    problems: list[str] = field(default_factory=list)

    def open(self, view: str = "", **options: Any) -> Page:
        """The page in a context of its own, with the key."""
        page = self.without_key(view, **options)
        page.fill("#key", self.key)
        page.keyboard.press("Enter")
        page.wait_for_selector("#model option", state="attached")
        return page

    def without_key(self, view: str = "", **options: Any) -> Page:
        context = self.browser.new_context(**{"viewport": _WIDE, **options})
        page = context.new_page()
        page.set_default_timeout(_PATIENCE_MS)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda message: self._note(message.type, message.text))
        page.goto(f"{self.url}/{view}")
        page.wait_for_selector("#key-dialog[open]")
        return page

    def shoot(self, page: Page, name: str, **options: Any) -> None:
        page.screenshot(path=self.folder / f"{name}.png", **options)

    def get(self, path: str) -> Any:
        request = urllib.request.Request(self.url + path, headers={"x-api-key": self.key})
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)

    def _note(self, kind: str, text: str) -> None:
        if kind == "error" and "the server responded with a status of 401" not in text:
            self.problems.append(text)


@contextlib.contextmanager
def load(tab: Tab, num_clients: int = 6) -> Iterator[list[int]]:
    """Clients that complete prompts meanwhile. Gives the numbers of tokens of their answers, all whole."""
    has_ended, lengths = threading.Event(), list[int]()

    def complete(number: int) -> None:
        body = {"model": "demo", "max_tokens": 60, "ignore_eos": True}
        while not has_ended.is_set():
            data = json.dumps({**body, "prompt": f"{_SECRET_PROMPT} {number} {time.time()} " * (1 + 4 * number)})
            headers = {"x-api-key": tab.key, "Content-Type": "application/json"}
            request = urllib.request.Request(f"{tab.url}/v1/completions", data.encode(), headers)
            with urllib.request.urlopen(request, timeout=120) as response:
                lengths.append(json.load(response)["usage"]["completion_tokens"])

    threads = [threading.Thread(target=complete, args=(number,)) for number in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield lengths
    finally:
        has_ended.set()
        for thread in threads:
            thread.join()


def wait_until(is_so: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_MS / 1000
    while not is_so():
        assert time.monotonic() < deadline, f"it never happened: {what}"
        time.sleep(0.05)


def wait(page: Page, condition: str) -> None:
    """Wait for a condition of the page. Playwright's own way needs `eval`, which the page's policy forbids."""
    wait_until(lambda: page.evaluate(condition), condition)


def ask(page: Page, text: str, num_tokens: int = 40) -> str:
    """Send a text, and return the answer to it."""
    page.fill("#max_tokens", str(num_tokens))
    page.fill("#input", text)
    page.press("#input", "Enter")
    return answer_of(page)


def answer_of(page: Page) -> str:
    """Last answer, once it is there. Fails if it is an error."""
    wait(page, "!document.querySelector('.busy')")
    last = page.locator(".turn.assistant").last
    assert not last.locator(".failure").count(), last.inner_text()
    return last.locator(".text").last.inner_text()


def no_violations(page: Page, where: str) -> None:
    found = Axe().run(page).response["violations"]
    assert not found, f"{where}: " + "; ".join(
        f"{one['id']} ({one['help']}) {[node['target'] for node in one['nodes']][:4]}" for one in found
    )


def check_key(tab: Tab) -> None:
    page = tab.without_key()
    assert page.locator("#state").inner_text() == "needs an API key"
    no_violations(page, "the dialog of the key")
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector("#key-dialog[open]")
    page.fill("#key", tab.key)
    page.keyboard.press("Enter")
    page.wait_for_selector("#state.good")
    assert page.locator("#model").input_value() == "demo"
    assert tab.key not in page.content()


def check_chat(tab: Tab) -> None:
    page = tab.open()
    assert ask(page, "Tell me about the sea")
    assert ask(page, _HOSTILE)
    assert page.locator(".turn.user .text").last.inner_text() == _HOSTILE
    assert page.title() == "Penstock"
    assert page.locator(".turn").count() == 4
    figures = page.locator(".figures").last.inner_text()
    assert "40 tokens" in figures or "stop" in figures, figures
    no_violations(page, "a chat")


def check_stream(tab: Tab) -> None:
    page = tab.open()
    page.evaluate(
        """() => { window.lengths = new Set();
        const note = () => window.lengths.add(document.querySelector(".assistant .text")?.innerText.length ?? 0);
        const observed = { subtree: true, childList: true, characterData: true };
        new MutationObserver(note).observe(document.getElementById("log"), observed); }"""
    )
    text = ask(page, "Tell me about the sea", 60)
    lengths = page.evaluate("[...window.lengths]")
    assert len(lengths) > 5, lengths
    assert max(lengths) >= len(text)
    assert page.locator("#announcer").inner_text()
    page.uncheck("#stream")
    assert ask(page, "And the land?")


def check_markdown(tab: Tab) -> None:
    page = tab.open()
    table, link = "| a | b |\n|---|---|\n| 1 | 2 |", "[link](https://example.org)"
    answer = f"# Sea\n\n- **deep**\n- `blue`\n\n{table}\n\n{link}\n\n{_HOSTILE}"
    pieces = [{"choices": [{"index": 0, "delta": {"content": answer[at : at + 7]}}]} for at in range(0, len(answer), 7)]
    stream = "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces) + "data: [DONE]\n\n"
    headers = {"content-type": "text/event-stream"}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=200, headers=headers, body=stream))
    text = ask(page, "Tell me about the sea")
    shown = page.locator(".assistant .markdown")
    contents = {"h3": "Sea", "li strong": "deep", "li code": "blue", "td >> nth=1": "2", "a": "link"}
    for selector, content in contents.items():
        assert shown.locator(selector).inner_text() == content
    assert _HOSTILE in text
    assert page.title() == "Penstock"
    no_violations(page, "Markdown")
    tab.shoot(page, "markdown")
    page.uncheck("#formatted")
    assert page.locator(".assistant .text").inner_text() == answer
    page.check("#formatted")
    assert shown.locator("h3").inner_text() == "Sea"


def check_images(tab: Tab) -> None:
    """Images come by file, drop and paste, and go with the next message; the server is told to be one that sees."""
    page = tab.open()
    assert page.locator("#attach").is_hidden(), "the model reads text"
    sent: list[dict[str, Any]] = []

    def models(route: Route) -> None:
        card = {"id": "demo", "tasks": ["generate"], "modalities": ["text", "image"]}
        route.fulfill(json={"data": [card]})

    def answer(route: Route) -> None:
        sent.append(route.request.post_data_json)
        chunk = {"choices": [{"delta": {"content": "A square."}, "finish_reason": "stop"}]}
        route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")

    page.route("**/v1/models", models)
    page.route("**/v1/chat/completions", answer)
    page.evaluate("loadModels()")
    page.wait_for_selector("#attach:visible")
    pixel = base64.b64decode(
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYGD4DwABBAEAX+XDSwAAAABJRU5ErkJggg=="
    )
    file = {"name": "a.png", "mimeType": "image/png", "buffer": pixel}
    page.set_input_files("#files", [file, file, {**file, "name": "b.txt", "mimeType": "text/plain"}])
    give = """([target, kind, field, bytes]) => {
        const data = new DataTransfer();
        data.items.add(new File([new Uint8Array(bytes)], "a.png", { type: "image/png" }));
        const event = new Event(kind, { bubbles: true, cancelable: true });
        event[field] = data;
        return !document.querySelector(target).dispatchEvent(event);
    }"""
    assert page.evaluate(give, ["#composer", "drop", "dataTransfer", list(pixel)]), "the page takes it"
    assert page.evaluate(give, ["#input", "paste", "clipboardData", list(pixel)]), "the page takes it"
    wait(page, "document.querySelectorAll('#attached img').length === 4")
    no_violations(page, "attached images")
    tab.shoot(page, "images")
    page.click("#attached button >> nth=0")
    assert page.locator("#attached img").count() == 3
    page.fill("#input", "What is it?")
    page.click("#as-python")
    shown = page.locator("#share-code").inner_text()
    assert shown.count('"url": "data:image/png;base64,..."') == 3, shown
    page.keyboard.press("Escape")
    page.click("#send")
    page.wait_for_selector(".turn.assistant:not(.busy)")
    assert page.locator(".turn.assistant .text").inner_text() == "A square."
    assert page.locator(".turn.user .images img").count() == 3
    assert page.locator("#attached").is_hidden()
    (message,) = sent[0]["messages"]
    url = f"data:image/png;base64,{base64.b64encode(pixel).decode()}"
    images = [{"type": "image_url", "image_url": {"url": url}}] * 3
    assert message["content"] == [*images, {"type": "text", "text": "What is it?"}], message
    page.click("#again")
    page.wait_for_selector(".turn.assistant:not(.busy)")
    assert sent[1]["messages"] == sent[0]["messages"]
    page.set_input_files("#files", [file])
    wait(page, "document.querySelectorAll('#attached img').length === 1")
    page.click("text=Completion")
    assert page.locator("#attach").is_hidden(), "completions have no images"
    assert page.locator("#attached").is_hidden()


def check_similarity(tab: Tab) -> None:
    """With the model's tasks and embeddings as an embedding model's server would give them."""
    page = tab.without_key()
    models = {"object": "list", "data": [{"id": "minilm", "object": "model", "tasks": ["embed", "token_embed"]}]}
    vectors = {"one": [1, 0], "two": [0, 2], "three": [3, 3]}

    def embed(route: Any) -> None:
        texts = route.request.post_data_json["input"]
        data = [{"index": index, "embedding": vectors[text]} for index, text in enumerate(texts)]
        route.fulfill(status=200, json={"data": data, "usage": {"prompt_tokens": 9}})

    page.route("**/v1/models", lambda route: route.fulfill(status=200, json=models))
    page.route("**/v1/embeddings", embed)
    page.fill("#key", tab.key)
    page.keyboard.press("Enter")
    page.wait_for_selector("#model option", state="attached")
    assert page.locator("#composer button.main").inner_text() == "Compare"
    assert not page.locator("[value=chat]").is_visible()
    assert not page.locator("#temperature").is_visible()
    page.fill("#input", "one")
    page.press("#input", "Enter")
    assert "Give at least two texts" in page.locator(".failure").inner_text()
    page.fill("#input", "one\ntwo\n\nthree")
    page.click("#send")
    page.wait_for_selector(".similar")
    cells = page.locator(".similar td").all_inner_texts()[1:]
    assert cells == ["1.000", "0.000", "0.707", "0.000", "1.000", "0.707", "0.707", "0.707", "1.000"]
    assert "2 dimensions" in page.locator(".figures").inner_text()
    no_violations(page, "a table of similarities")
    tab.shoot(page, "similarity")
    page.click("#as-python")
    program = page.locator("#share-code").inner_text()
    compile(program, "program", "exec")
    assert "embeddings.create" in program


def check_charts_begin_before_the_page_was_opened(tab: Tab) -> None:
    with load(tab, num_clients=2):
        time.sleep(6)
    page = tab.open("#live")
    wait(page, "live.samples.length > 5")
    first, last = page.evaluate("[live.samples[0], live.samples.at(-1)]")
    assert last["time"] - first["time"] > 5
    assert last["counters"]["generated_tokens"] > first["counters"]["generated_tokens"]
    assert page.evaluate("live.samples.every((one, index, all) => !index || one.time > all[index - 1].time)")


def check_stop_and_regenerate(tab: Tab) -> None:
    page = tab.open()
    page.fill("#max_tokens", "900")
    page.fill("#input", "Tell me about the sea")
    for press in (lambda: page.press("#input", "Enter"), lambda: page.click("#again")):
        press()
        wait(page, "document.querySelector('.busy .text')?.innerText.length > 20")
        page.click("#stop")
        page.wait_for_selector(".figures")
        assert "stopped" in page.locator(".figures").inner_text()
        assert page.locator(".turn").count() == 2
    wait_until(lambda: tab.get("/live")["requests"]["unfinished"] == 0, "the stopped request ends")
    assert page.evaluate("document.activeElement.id") == "input"


def check_schema(tab: Tab) -> None:
    page = tab.open()
    page.click("#format summary")
    page.fill("#schema", "{oops")
    page.fill("#input", "How old are you?")
    page.press("#input", "Enter")
    assert "The schema is not JSON" in page.locator(".failure").inner_text()
    page.fill("#schema", json.dumps(_SCHEMA))
    page.click("#again")
    assert isinstance(json.loads(answer_of(page))["age"], int)
    page.check("[value=completion]", force=True)
    assert isinstance(json.loads(ask(page, "Age: "))["age"], int)


def check_tool_call(tab: Tab) -> None:
    page = tab.open()
    page.click("#functions summary")
    page.fill("#tools", json.dumps([_TOOL]))
    page.select_option("#tool-choice", "required")
    ask(page, "What is the weather?", 400)
    # The model, which knows no tools, may call it any number of times.
    calls = page.locator(".call")
    assert set(calls.locator("strong").all_inner_texts()) == {"weather"}
    days = [json.loads(arguments)["day"] for arguments in calls.locator("pre").all_inner_texts()]
    assert days
    assert set(days) <= {"today", "tomorrow"}
    no_violations(page, "a tool call")
    tab.shoot(page, "tool-call")
    page.select_option("#tool-choice", "none")
    for result in calls.locator("textarea").all():
        result.fill("rain")
    page.get_by_role("button", name="Send the result").click()
    assert answer_of(page)
    assert page.locator(".turn.assistant").count() == 2


def check_probabilities(tab: Tab) -> None:
    page = tab.open()
    page.check("#probabilities")
    ask(page, "Tell me about the sea")
    tokens = page.locator(".token")
    assert tokens.count() > 10
    tokens.nth(7).hover()
    shown = page.locator("#likeliest tr").all_inner_texts()
    values = [float(row.split("\t")[1].removesuffix("%")) for row in shown]
    assert 5 <= len(values) <= 6
    assert sum(values) <= 100.3
    assert page.locator("#likeliest .chosen").count() == 1
    tab.shoot(page, "probabilities")
    page.mouse.move(0, 0)
    page.locator(".assistant .text").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.locator("#likeliest").is_visible()
    assert "%" in page.locator("#announcer").inner_text()
    no_violations(page, "probabilities")
    page.check("[value=completion]", force=True)
    ask(page, "Once upon a time")
    page.locator(".token").nth(3).hover()
    assert page.locator("#likeliest tr").count() >= 5


def check_share(tab: Tab) -> None:
    page = tab.open()
    page.fill("#input", "What's the sea?")
    page.fill("#max_tokens", "5")
    page.fill("#top_k", "3")
    page.click("#as-python")
    program = page.locator("#share-code").inner_text()
    compile(program, "program", "exec")
    assert '"top_k": 3' in program
    no_violations(page, "the dialog with a program")
    page.keyboard.press("Escape")
    page.click("#as-curl")
    command = page.locator("#share-code").inner_text()
    assert tab.key not in command
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60).stdout
    assert answer.rstrip().endswith("data: [DONE]")
    assert '"completion_tokens":5' in answer


def check_live_view(tab: Tab) -> None:
    page = tab.open("#live")
    with load(tab) as lengths:
        wait(page, "parseInt(document.querySelector('#stats dd').textContent) > 0")
        wait(page, "/[1-9]\\d* prefill, [1-9]\\d* decode/.test(document.getElementById('steps').ariaLabel)")
        page.wait_for_timeout(4000)
        box = page.locator("#steps").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] - 100, box["y"] + 50)
        assert "requests" in page.locator("#step").inner_text()
        page.click("#step-table summary")
        wait(page, "document.querySelectorAll('#step-table tbody tr').length > 3")
        no_violations(page, "the live view")
        page.click("#step-table summary")
        tab.shoot(page, "live")
        assert _SECRET_PROMPT not in page.content()
    assert lengths
    assert set(lengths) == {60}


def check_killed_worker(tab: Tab) -> None:
    page = tab.open("#live")
    page.wait_for_selector("#events li")
    with load(tab) as lengths:
        wait_until(lambda: lengths, "an answer")
        workers = [one for one in psutil.Process(tab_pid()).children(recursive=True) if _is_worker(one)]
        assert len(workers) == 2
        workers[0].kill()
        page.wait_for_selector("#events li:has-text('1 of 1 cores recover from a lost process')")
        page.wait_for_selector("#events li:has-text('workers: started again')")
        num_before = len(lengths)
        wait_until(lambda: len(lengths) > num_before + 6, "answers after the loss")
        page.wait_for_timeout(1500)
        tab.shoot(page, "killed-worker")
    assert set(lengths) == {60}
    assert "workers 1" in page.locator("#restarts").inner_text()


def check_phone(tab: Tab) -> None:
    page = tab.open(viewport=_PHONE, has_touch=True, is_mobile=True)
    for view in ("play", "live"):
        page.tap(f"#tab-{view}")
        page.wait_for_timeout(800)
        assert page.evaluate("document.documentElement.scrollWidth") <= _PHONE["width"], view
        no_violations(page, f"a phone's {view}")
        tab.shoot(page, f"phone-{view}", full_page=True)
    page.tap("#tab-play")
    page.fill("#input", "Tell me about the sea")
    page.tap("#send")
    assert answer_of(page)
    tab.shoot(page, "phone-chat")


def check_dark(tab: Tab) -> None:
    page = tab.open(color_scheme="dark")
    brightness = "Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"
    assert page.evaluate(brightness) < 60
    page.check("#probabilities")
    ask(page, "Tell me about the sea")
    no_violations(page, "dark")
    tab.shoot(page, "dark")
    page.click("#tab-live")
    page.wait_for_timeout(1200)
    no_violations(page, "the dark live view")
    page.click("#theme")
    page.click("#theme")
    assert page.locator("#theme").get_attribute("aria-label") == "Theme: light"
    assert page.evaluate(brightness) > 200
    page.reload()
    assert page.evaluate(brightness) > 200


def check_keyboard(tab: Tab) -> None:
    page = tab.open()
    page.reload()
    page.wait_for_selector("#state.good")
    name = "document.activeElement.id || document.activeElement.className"
    assert page.evaluate(name) == "input"
    press_until(page, "Shift+Tab", name, "skip")
    press_until(page, "Tab", name, "tab-play")
    page.keyboard.press("ArrowRight")
    assert page.locator("#view-live").is_visible()
    page.keyboard.press("ArrowLeft")
    press_until(page, "Tab", name, "model")
    press_until(page, "Shift+Tab", name, "input")
    page.keyboard.type("Tell me about the sea")
    page.keyboard.press("Enter")
    page.wait_for_selector(".busy")
    page.keyboard.press("Escape")
    page.wait_for_selector(".figures")
    press_until(page, "Tab", name, "again")
    page.keyboard.press("Enter")
    page.wait_for_selector(".busy")
    assert answer_of(page)


def press_until(page: Page, key: str, read: str, expected: str) -> None:
    """Press a key until an element has the focus; each on the way must be seen to have it."""
    visible = """(() => { const one = document.activeElement;
        const shown = one.type === "radio" ? one.parentElement : one;
        return getComputedStyle(shown).outlineStyle !== "none"; })()"""
    seen: list[str] = []
    while not seen or seen[-1] != expected:
        page.keyboard.press(key)
        seen.append(page.evaluate(read))
        assert page.evaluate(visible), seen
        assert len(seen) < 40, seen


def tab_pid() -> int:
    """Process id of the server's launcher."""
    return int(os.environ["PENSTOCK_PID"])


def _is_worker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "worker_process" in " ".join(process.cmdline())
    return False


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("checks", nargs="*")
    parser.add_argument("--screenshots", type=Path)
    given = parser.parse_intermixed_args()
    checks = {name.removeprefix("check_"): one for name, one in globals().items() if name.startswith("check_")}
    num_failed = 0
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        folder = given.screenshots or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        browser = playwright.chromium.launch(
            executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"), args=_FLAGS
        )
        for name in given.checks or checks:
            began = time.monotonic()
            tab = Tab(browser, given.url, os.environ["PENSTOCK_API_KEY"], folder)
            try:
                checks[name](tab)
                assert not tab.problems, tab.problems
            except Exception:
                num_failed += 1
                print(f"failed  {name}\n{traceback.format_exc(limit=4)}", flush=True)
                for number, context in enumerate(browser.contexts):
                    context.pages[0].screenshot(path=folder / f"failed-{name}-{number}.png")
            else:
                print(f"passed  {name} in {time.monotonic() - began:.1f} s", flush=True)
            for context in browser.contexts:
                context.close()
        browser.close()
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
