"""The server as an ASGI application: who may ask, and answers that end when their clients leave.

Knows HTTP and the engine's jobs; `llama.serve.requests` and `llama.serve.answers` know OpenAI's JSON.
"""

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import re
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from importlib import resources
from typing import Any

from prometheus_client import generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from llama.host import palette
from llama.schemas import TooManySchemas, schema_of
from llama.serve.answers import Answer
from llama.serve.engine import Engine, Job, Update
from llama.serve.requests import MOST_BYTES, Asked, Refused, check_model, read
from llama.streaming import encode_prompt
from llama.tokenizer.chat import ChatFormat
from llama.untrusted.words import printable

logger = logging.getLogger(__name__)

PUBLIC = ("/", "/health")  # paths that need no key
PROBES = ("/health", "/metrics")  # which machines ask for every few seconds: their successes are not logged
QUIET_SECONDS = 15  # after which a stream without tokens has a comment, so that it is not taken for broken
MADE = ("completions", "chat/completions")  # paths, below /v1, of texts that are made
LEFT = 499  # the status, in metrics and logs only, of a request whose client has left before the answer
LEFT_SECONDS = 5  # for a client to take its last bytes
DEFAULT_TOKENS = {True: 512, False: 16}  # of a chat, if that fits; OpenAI's of a completion


class App:
    """The server of one engine, an ASGI application.

    names: those of the model; answers have the first one. hosts: this server's names: without a key a browser may use
    no other, which another site might have made this machine's. places: the most texts that run or wait. log: is called
    with a line for each request that has ended. draining: whether the server ends. open: the requests that have not
    been answered.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        names: Sequence[str],
        key: str | None,
        hosts: Collection[str],
        places: int,
        time_limit: float,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.engine, self.names, self.places, self.time_limit = engine, names, places, time_limit
        self._log = log
        self.key = None if key is None else f"Bearer {key}".encode()
        self.hosts = hosts
        self.replies: set[Reply] = set()
        self.draining = False
        self.open = 0
        self._chat: ChatFormat | None = None
        page = _page()
        routes: list[tuple[str, Any]] = [
            ("/", lambda _: page),
            ("/health", self._health),
            ("/metrics", self._metrics),
            ("/v1/models", self._models),
            ("/v1/models/{name:path}", self._models),
        ]
        self._paths = {path for path, _ in routes} | {f"/v1/{path}" for path in MADE}
        made = [Route(f"/v1/{path}", self._complete, methods=["POST"]) for path in MADE]
        self._router = Router([*(Route(*route, methods=["GET"]) for route in routes), *made], redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Every error is OpenAI's JSON, unless a part of the answer was sent."""
        began, status, whole = time.monotonic(), 0, False
        refused: Refused | None = None
        scope = {**scope, "app": self}

        async def sending(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        async def receiving() -> Message:
            nonlocal whole
            message = await receive()
            whole = not message.get("more_body")
            return message

        self.open += 1
        try:
            self._admit(scope["path"], dict(scope["headers"]))
            await self._router(scope, receiving, sending)
        except ClientDisconnect:
            pass
        except Exception as error:
            refused = _refused(error)
        finally:
            self.open -= 1
        sent, status = status, status or (refused.status if refused else scope.get("state", {}).get("refused", LEFT))
        self.note(scope, status, time.monotonic() - began)
        if refused is not None and not sent:
            await _refuse(refused, None if whole else receive, send)

    def note(self, scope: Scope, status: int, seconds: float) -> None:
        """Count a request that has ended, and log it without its content."""
        path = scope["path"]
        known = path if path in self._paths else "other"
        self.engine.metrics.requests.labels(known, str(status)).observe(seconds)
        if self._log is not None and not (path in PROBES and status == 200):
            client, at = (scope.get("client") or "-")[0], time.strftime("%Y-%m-%dT%H:%M:%S%z")
            texts = scope["answer"].summary if "answer" in scope else ""
            self._log(f"{at} {client} {scope['method']} {printable(path, 80)} {status} {seconds:.3f} s{texts}")

    def cancel_all(self) -> None:
        """End all texts; their clients are told."""
        for reply in self.replies:
            reply.stop(Refused("the text is cancelled: the server ends", 503, code="cancelled"))

    def _admit(self, path: str, headers: dict[bytes, bytes]) -> None:
        """Raise Refused for a request that must not be looked at."""
        host = headers.get(b"host", b"").decode("latin-1")
        origin = headers.get(b"origin", b"").decode("latin-1")  # a scheme, "://", and a host; or "null"
        if origin and origin.rpartition("://")[2] != host:
            raise Refused("pages of other sites may not use this server", 403)
        if self.key is None and re.sub(r":\d*\Z", "", host) not in self.hosts:
            raise Refused(f"this is not {host:.80}, but {' or '.join(self.hosts)}; --key allows other names", 403)
        if path in PUBLIC:
            return
        if self.key is not None and not hmac.compare_digest(headers.get(b"authorization", b""), self.key):
            message = "send the header Authorization: Bearer KEY, with the key that the server was started with"
            raise Refused(message, 401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        self._check_ready()
        if self.open > 2 * self.places:
            raise self._busy()

    def _check_ready(self) -> None:
        ready = self.engine.ready
        if not ready.done() or ready.exception() is not None:
            raise Refused("the model is loading", 503, code="loading", headers={"Retry-After": "2"})
        if self.draining:
            raise Refused("the server ends; it takes no new requests", 503, code="ending", headers={"Retry-After": "9"})

    def _busy(self) -> Refused:
        message = f"{self.places} texts run or wait, which is the limit (--rows, --queue); try again"
        return Refused(message, 429, code="queue_full", headers={"Retry-After": "1"})

    # ---- routes ------------------------------------------------------------------------------------------------------

    async def _health(self, _: Request) -> Response:
        self._check_ready()
        return JSONResponse({"status": "ok", "execution": self.engine.execution})

    async def _metrics(self, _: Request) -> Response:
        await asyncio.wrap_future(self.engine.gauges())
        return Response(generate_latest(self.engine.metrics.registry), media_type="text/plain; version=0.0.4")

    async def _models(self, request: Request) -> Response:
        engine, model = self.engine, self.engine.model
        check_model(request.path_params.get("name", self.names[0]), self.names)
        own = {"id": self.names[0], "object": "model", "created": 0, "owned_by": "llama-kv"}
        own |= {"max_model_len": model.args.max_seq_len, "system_fingerprint": engine.fingerprint}
        own |= {"kv_cache": engine.options.get("kv_cache"), "execution": engine.execution}
        return JSONResponse(own if request.path_params else {"object": "list", "data": [own]})

    async def _complete(self, request: Request) -> Response:
        chat, engine = request.url.path.endswith("/chat/completions"), self.engine
        asked = read(await _body(request), chat=chat, names=self.names)
        if sum(len(reply.jobs) for reply in self.replies) >= self.places:  # before work that takes long
            raise self._busy()
        if asked.options.get("schema") is not None:
            await run_in_threadpool(self._compile, asked)
        prompts = await run_in_threadpool(self._encoded, asked)
        choices = (prompt for prompt in prompts for _ in range(asked.n))
        jobs = [self._job(asked, prompt, index) for index, prompt in enumerate(choices)]
        if len(jobs) > self.places:  # waiting would not help
            most = f"the {self.places} texts that run and wait here (--rows, --queue)"
            raise Refused(f"{len(prompts)} prompts x n={asked.n} are more than {most}", param="n")
        if sum(len(reply.jobs) for reply in self.replies) + len(jobs) > self.places:
            raise self._busy()
        head = {"model": self.names[0], "system_fingerprint": engine.fingerprint}
        request.scope["answer"] = answer = Answer(asked, jobs, engine.tokenizer, **head)
        return Reply(self, jobs, answer)

    def _compile(self, asked: Asked) -> None:
        """Compile the schema, in a thread beside the loop. Raises Refused."""
        size = self.engine.model.args.vocab_size
        try:
            asked.options["schema"] = schema_of(asked.options["schema"], self.engine.tokenizer, size, limited=True)
        except ValueError as error:
            raise Refused(str(error).replace("schema=", "response_format: "), param="response_format") from None
        except TooManySchemas as error:
            raise Refused(str(error), 429, code="queue_full", headers={"Retry-After": "1"}) from None

    def _encoded(self, asked: Asked) -> list[list[int]]:
        """Return the ids of all prompts, in a thread beside the loop: a chat template is rendered by a process."""
        tokenizer, ids = self.engine.tokenizer, []
        try:
            for prompt in asked.prompts:
                if asked.chat:
                    self._chat = self._chat or ChatFormat(tokenizer, day=self.engine.day)
                    rendering = self._chat.render(prompt)
                    self._check_length(asked, tokenizer.fewest(rendering.text))
                    ids.append(self._chat.encode(rendering))
                else:
                    self._check_length(asked, tokenizer.fewest(prompt) if isinstance(prompt, str) else len(prompt))
                    ids.append(encode_prompt(tokenizer, prompt))
            return ids
        except ValueError as error:
            raise Refused(str(error), param=asked.prompt_field) from None

    def _job(self, asked: Asked, prompt: list[int], index: int) -> Job:
        """Return the job of a choice, by its index in the answer. Raises Refused for a text that is too long."""
        longest, tokens = self.engine.longest, asked.max_tokens or DEFAULT_TOKENS[asked.chat]
        if longest is not None and not asked.max_tokens:
            tokens = max(1, min(tokens, longest - len(prompt)))
        self._check_length(asked, len(prompt), tokens)
        options = asked.options.copy()
        if isinstance(seed := options.get("seed"), int):
            options["seed"] = seed + index
        return Job(prompt, tokens, asked.stop, options, asked.kv_caching, asked.timings, asked.prompt_field)

    def _check_length(self, asked: Asked, prompt: int, tokens: int | None = None) -> None:
        """Raise Refused for a text that is too long. Without `tokens`, `prompt` is a lower bound."""
        longest = self.engine.longest
        if longest is not None and prompt + (tokens or 1) > longest:
            raise Refused(
                f"the prompt has {'' if tokens else 'at least '}{prompt} tokens and max_tokens={tokens or 1}: more "
                f"than the {longest} of this server (--max_seq_len); shorten one of them",
                param="max_tokens" if prompt < longest else asked.prompt_field,
                code="context_length_exceeded",
            )


class Reply(Response):
    """The answer to a request: its texts end as soon as the client leaves, or the time is over."""

    def __init__(self, app: App, jobs: Sequence[Job], answer: Answer) -> None:
        self.app, self.jobs, self.answer = app, jobs, answer
        self._updates: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()  # at most one for each token
        self._streaming = False

    def stop(self, why: Refused) -> None:
        """End the answer with an error."""
        self._updates.put_nowait((0, Update(error=why)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. Raises Refused if nothing of it was sent."""
        loop = asyncio.get_running_loop()
        for index, job in enumerate(self.jobs):
            job.deliver = partial(_deliver, loop, self._updates, index)
        self.app.replies.add(self)
        self.app.engine.add(self.jobs)
        tasks = [asyncio.ensure_future(self._send(send)), asyncio.ensure_future(_left(receive))]
        try:
            limit = self.app.time_limit + LEFT_SECONDS
            ended, _ = await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.app.engine.cancel(self.jobs)
            self.app.replies.discard(self)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if tasks[0] in ended:
            tasks[0].result()

    async def _send(self, send: Send) -> None:
        limit = self.app.time_limit
        try:
            async with asyncio.timeout(limit):
                await (self._stream(send) if self.answer.asked.stream else self._whole(send))
        except (TimeoutError, Refused) as error:
            message = f"the text has taken {limit:g} s, which is the limit (--time_limit); ask for fewer tokens"
            refused = error if isinstance(error, Refused) else Refused(message, 504, code="timeout")
            if not self._streaming:
                raise refused from None
            await send(_event(refused.body, more=False))

    async def _next(self) -> tuple[int, Update]:
        index, update = await self._updates.get()
        if update.error is not None:
            raise update.error
        return index, update

    async def _whole(self, send: Send) -> None:
        while not self.answer.ended:
            index, update = await self._next()
            self.answer.latest[index] = update
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": _json(self.answer.whole())})

    async def _stream(self, send: Send) -> None:
        for _ in self.jobs:  # the first update of each accepts it, or has the error that is the whole answer
            await self._next()
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._streaming = True
        while not self.answer.ended:
            try:
                async with asyncio.timeout(QUIET_SECONDS):
                    index, update = await self._next()
            except TimeoutError:
                await send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})
                continue
            if (chunk := self.answer.chunk(index, update)) is not None:
                await send(_event(chunk))
        if self.answer.asked.include_usage:
            await send(_event(self.answer.closing()))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _event(content: dict[str, Any], *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": b"data: %b\n\n" % _json(content), "more_body": more}


def _deliver(loop: asyncio.AbstractEventLoop, updates: "asyncio.Queue[Any]", index: int, update: Update) -> None:
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(updates.put_nowait, (index, update))


async def _left(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> bytes:
    """Return the body. Raises Refused if it is too long."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MOST_BYTES:
            raise Refused(f"the body has more than {MOST_BYTES:,} bytes; send less", 413)
    return bytes(data)


async def _refuse(refused: Refused, receive: Receive | None, send: Send) -> None:
    """Send an error. `receive`: of a body that has not ended, which is read: else its client may see a reset only."""
    response = JSONResponse(refused.body, refused.status, refused.headers)
    await send({"type": "http.response.start", "status": refused.status, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    with suppress(TimeoutError):
        async with asyncio.timeout(LEFT_SECONDS):
            while receive is not None and (await receive()).get("more_body"):
                pass
    await send({"type": "http.response.body"})


def _refused(error: Exception) -> Refused:
    """Return an error as an answer; log an unexpected one as one line."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, HTTPException):
        what = "this path has another method" if error.status_code == 405 else "there is no such path"
        paths = "/v1/completions, /v1/chat/completions, /v1/models, /health, /metrics and the page /"
        return Refused(f"{what}; there are {paths}", error.status_code, headers=error.headers)
    logger.error("a request failed: %s", printable(f"{type(error).__name__}: {error}"))
    return Refused("the server failed at this request", 500)


def _page() -> HTMLResponse:
    """Return the page, which may use its own style and script and this server, and nothing else."""
    text = resources.files(__package__).joinpath("server_page.html").read_text("utf-8")
    text = text.replace("/* palette */", palette.css())
    allowed = []
    for tag in ("style", "script"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        allowed.append(f"{tag}-src 'sha256-{digest}'")
    policy = "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    headers = {"Content-Security-Policy": f"default-src 'none'; {'; '.join(allowed)}; {policy}"}
    return HTMLResponse(text, headers={**headers, "X-Content-Type-Options": "nosniff"})
