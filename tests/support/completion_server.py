"""Small HTTP server of completions, streamed as server-sent events, whose behaviour a test scripts."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ServedRequest:
    """A request, and the means to answer it. number: in the order of arrival. connection: number of its connection."""

    number: int
    connection: int
    method: str
    path: str
    headers: dict[str, str]
    body: Any
    writer: asyncio.StreamWriter

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self, status: int, *headers: str, content_type: str = "application/json") -> None:
        lines = [f"HTTP/1.1 {status} Status", f"Content-Type: {content_type}", *headers]
        await self.write(("\r\n".join(lines) + "\r\n\r\n").encode())

    async def whole(self, status: int, content: Any, *headers: str) -> None:
        """Answer with a JSON body, or with text."""
        body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        await self.head(status, f"Content-Length: {len(body)}", *headers)
        await self.write(body)

    async def begin_stream(self) -> None:
        await self.head(200, "Transfer-Encoding: chunked", content_type="text/event-stream; charset=utf-8")

    async def event(self, content: Any) -> None:
        """Send an event in an HTTP chunk of its own. content: text as it is, or JSON."""
        text = content if isinstance(content, str) else json.dumps(content)
        data = f"data: {text}\n\n".encode()
        await self.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def end_stream(self) -> None:
        await self.write(b"0\r\n\r\n")

    def cut(self) -> None:
        """Reset the connection."""
        self.writer.transport.abort()


Handler = Callable[[ServedRequest], Awaitable[None]]


@dataclass
class CompletionServer:
    """Server at `url`. handler: answers a request. requests: that have come. num_cut: streams that the client left.

    keeps_requests: False forgets what was asked.
    """

    handler: Handler
    url: str = ""
    requests: list[ServedRequest] = field(default_factory=list)
    num_connections: int = 0
    num_cut: int = 0
    num_requests: int = 0
    keeps_requests: bool = True

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        self.num_connections += 1
        number = self.num_connections
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self.handler(await self._request(head.decode("latin-1"), reader, writer, number))
                if writer.is_closing():
                    break
        except asyncio.IncompleteReadError:
            pass
        except ConnectionError:
            self.num_cut += 1
        finally:
            writer.close()

    async def _request(
        self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int
    ) -> ServedRequest:
        first, *lines = head.strip().split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        try:
            parsed = json.loads(body) if body else None
        except ValueError:
            parsed = body.decode()
        request = ServedRequest(self.num_requests, connection, method, path, headers, parsed, writer)
        self.num_requests += 1
        if self.keeps_requests:
            self.requests.append(request)
        return request


_METRICS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="served"} 0.0
vllm:num_requests_waiting{model_name="served"} 0.0
"""


async def answer(request: ServedRequest, delay_s: float = 0.0) -> None:
    """Answer a completion or chat completion with `max_tokens` tokens, each after a delay; and every GET."""
    if request.method == "GET":
        answers: dict[str, Any] = {"/v1/models": {"data": [{"id": "served", "root": "demo"}]}, "/metrics": _METRICS}
        await request.whole(200, answers.get(request.path, {}))
        return
    body = request.body
    is_chat = "messages" in body
    num_tokens = body.get("max_completion_tokens", body.get("max_tokens", 16))
    num_prompt = 7 if is_chat or isinstance(body["prompt"], str) else len(body["prompt"])
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens}
    if not body.get("stream"):
        await asyncio.sleep(num_tokens * delay_s)
        text = "x" * num_tokens
        part = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        await request.whole(200, {"choices": [{"index": 0, **part, "finish_reason": "length"}], "usage": usage})
        return
    await request.begin_stream()
    if is_chat:
        await request.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    for _ in range(num_tokens):
        await asyncio.sleep(delay_s)
        part = {"delta": {"content": "x"}} if is_chat else {"text": "x"}
        await request.event({"choices": [{"index": 0, **part, "finish_reason": None}]})
    part = {"delta": {}} if is_chat else {"text": ""}
    await request.event({"choices": [{"index": 0, **part, "finish_reason": "length"}]})
    if body.get("stream_options", {}).get("include_usage"):
        await request.event({"choices": [], "usage": usage})
    await request.event("[DONE]")
    await request.end_stream()


@asynccontextmanager
async def serving(
    handler: Handler = answer, host: str = "127.0.0.1", port: int = 0, context: ssl.SSLContext | None = None
) -> AsyncIterator[CompletionServer]:
    """Serve on a port, by default a free one, on this event loop. context: of TLS."""
    server = CompletionServer(handler)
    listener = await asyncio.start_server(server.serve, host, port, backlog=2048, ssl=context)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    tasks_before = asyncio.all_tasks()
    try:
        yield server
    finally:
        listener.close()
        for task in asyncio.all_tasks() - tasks_before:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@contextmanager
def serving_in_a_thread(handler: Handler = answer) -> Iterator[CompletionServer]:
    """Serve on a free port, on the event loop of another thread."""
    ready: list[CompletionServer] = []
    started = threading.Event()
    loop = asyncio.new_event_loop()
    done = asyncio.Event()

    async def serve() -> None:
        async with serving(handler) as server:
            ready.append(server)
            started.set()
            await done.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    started.wait()
    try:
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


async def _serve_alone() -> None:
    """Serve on --host and --port until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--leak-bytes", type=int, default=0, help="memory that each request leaves behind")
    arguments = parser.parse_args()
    leaked = []

    async def leak_and_answer(request: ServedRequest) -> None:
        leaked.append(b"x" * arguments.leak_bytes)
        request_is_bad = request.method == "POST" and not isinstance(request.body, dict)
        await (request.whole(400, {"error": {"message": "bad"}}) if request_is_bad else answer(request, 0.001))

    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with serving(leak_and_answer, arguments.host, arguments.port) as server:
        server.keeps_requests = False
        await stopped.wait()


if __name__ == "__main__":
    asyncio.run(_serve_alone())
