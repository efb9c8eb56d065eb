"""The HTTP server of `rlinf-actors serve`. Each request passes `guard` first. Nothing here changes the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from rlinf_actors.errors import RlinfActorsError
from rlinf_actors.net.loop import Tasks
from rlinf_actors.sampling.choice import WORKER_SORTS, chosen_workers
from rlinf_actors.sampling.sample import WorkerView
from rlinf_actors.sampling.sampler import Sampler
from rlinf_actors.serve import metrics
from rlinf_actors.serve.guard import HEADERS, Guard, Refusal
from rlinf_actors.serve.pages import SHOWN_EVENTS, Output, Pages, group_rows, summary
from rlinf_actors.shown import bar
from rlinf_actors.wire.log_values import file_name
from rlinf_actors.wire.stack_values import WorkerStacks

MOST_LISTENERS = 64
"""Most pages that are kept up to date at a time."""
ALIVE_S = 15.0
"""Seconds after which a silent page is sent a comment, so that a connection that is gone is noticed."""
LOG_LINES = 200
"""Lines of stdout, and of stderr, on the page of a worker's log."""
MOST_QUERY = 200
"""Most characters of a filter."""
STATIC: Mapping[str, str] = {"page.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}
"""The files that are served, by name, and their types."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
StackLines = Callable[[WorkerView, WorkerStacks], Sequence[str]]


class App:
    """Serves the pages and metrics of *sampler*.

    *stack_lines* makes the text of a worker's stacks. *guard* decides which requests are served.
    """

    def __init__(self, sampler: Sampler, guard: Guard, stack_lines: StackLines) -> None:
        self._sampler = sampler
        self._board = sampler.board
        self._guard = guard
        self._stack_lines = stack_lines
        self._pages = Pages(sampler.board, sampler.endpoint, sampler.every_s)
        self._changed = asyncio.Event()
        self._listeners = 0
        self._closing = False
        self._tasks = Tasks()
        self._outputs: dict[str, tuple[float, asyncio.Task[list[Output]]]] = {}  # by worker, with the sample's time
        folder = Path(__file__).parent / "static"
        self._static = {name: (folder / name).read_bytes() for name in STATIC}
        sampler.on_sample = self._on_sample

    def make(self) -> web.Application:
        """Return the application."""
        application = web.Application(middlewares=[self._guarded], client_max_size=1)
        application.add_routes(
            [
                web.get("/", self._overview),
                web.get("/workers", self._workers),
                web.get("/workers/{id}", self._worker),
                web.get("/workers/{id}/stacks", self._stacks),
                web.get("/workers/{id}/log", self._log),
                web.get("/nodes/{id}", self._node),
                web.get("/channels", self._channels),
                web.get("/events", self._events),
                web.get("/live", self._live),
                web.get("/metrics", self._metrics),
                web.get("/static/{name}", self._file),
            ]
        )
        return application

    def close(self) -> None:
        """End the answers that keep pages up to date."""
        self._closing = True
        self._changed.set()
        self._tasks.cancel()

    # --- guard ---

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        token = request.query.get("token")
        opens = token is not None and self._guard.opens_session(token)
        refusal = self._guard.refusal(request.method, request.headers, opens=opens)
        if refusal is None and opens:
            answer: web.StreamResponse = self._open_session(request)
        elif refusal is None:
            try:
                answer = await handler(request)
            except web.HTTPException as error:
                answer = self._refused(Refusal(error.status, error.reason))
        else:
            answer = self._refused(refusal)
        if not answer.prepared:
            answer.headers.update(HEADERS)
        return answer

    def _open_session(self, request: web.Request) -> web.Response:
        """Give the browser its cookie, and send it to the same page without the token, which then is in no history."""
        rest = {name: value for name, value in request.query.items() if name != "token"}
        answer = web.Response(status=303, headers={"Location": str(request.rel_url.with_query(rest))})
        guard = self._guard
        answer.set_cookie(guard.cookie, guard.session, httponly=True, samesite="Strict", path="/", secure=guard.secure)
        return answer

    def _refused(self, refusal: Refusal) -> web.Response:
        answer = self._html(self._pages.refused(refusal.status, refusal.text), refusal.status)
        if refusal.status == 405:
            answer.headers["Allow"] = "GET, HEAD"
        if refusal.status == 401:
            answer.headers["WWW-Authenticate"] = "Bearer"
        return answer

    # --- pages ---

    async def _overview(self, request: web.Request) -> web.Response:
        board = self._board
        events = list(board.events)[: -SHOWN_EVENTS - 1 : -1]
        numbers = summary(board, board.last_status)
        return self._page("overview.html", "/", groups=group_rows(board), summary=numbers, events=events)

    async def _workers(self, request: web.Request) -> web.Response:
        query, sort = request.query.get("q", "")[:MOST_QUERY], request.query.get("sort", "name")
        workers, total = chosen_workers(self._board, query, sort), len(self._board.workers)
        return self._page(
            "workers.html", "/workers", workers=workers, total=total, query=query, sort=sort, sorts=list(WORKER_SORTS)
        )

    async def _worker(self, request: web.Request) -> web.Response:
        return self._page("worker.html", "", worker=self._asked_worker(request), tab="now")

    async def _stacks(self, request: web.Request) -> web.Response:
        worker = self._asked_worker(request)
        if worker.node is None:
            raise web.HTTPNotFound(reason="the node of this worker is not known to the head")
        try:
            found = await self._sampler.stacks(worker.node.report.node_id, worker.group.namespace, [worker.state.id])
            lines = [line for one in found for line in self._stack_lines(worker, one)]
        except RlinfActorsError as error:
            lines = [str(error)]
        return self._page("stacks.html", "", live=False, worker=worker, tab="stacks", lines=lines)

    async def _log(self, request: web.Request) -> web.Response:
        worker = self._asked_worker(request)
        output = await self._output_of(worker)
        return self._page("log.html", "", worker=worker, tab="log", output=output, most=LOG_LINES)

    async def _output_of(self, worker: WorkerView) -> list[Output]:
        """Return the output of *worker*. It is read once for each sample, however many look at it."""
        at, id = self._board.sample.clock, worker.state.id
        self._outputs = {key: read for key, read in self._outputs.items() if read[0] == at}
        if id not in self._outputs:
            self._outputs[id] = at, self._tasks.start(self._read_output(worker), "reading the log of a worker")
        return await asyncio.shield(self._outputs[id][1])  # another request may wait for it too

    async def _read_output(self, worker: WorkerView) -> list[Output]:
        async def read(stream: str, title: str) -> Output:
            if worker.node is None:
                return Output(stream, title, [], "the node of this worker is not known to the head")
            name = f"{file_name(worker.group.name)}-{worker.state.rank}.{stream}"
            try:
                node, job = worker.node.report.node_id, worker.group.namespace
                lines = await self._sampler.last_lines(node, job, name, LOG_LINES)
            except RlinfActorsError as error:
                return Output(stream, title, [], str(error))
            return Output(stream, title, [bar(line.expandtabs()) for line in lines])

        return list(await asyncio.gather(read("out", "stdout"), read("err", "stderr")))

    async def _node(self, request: web.Request) -> web.Response:
        node = self._board.node(request.match_info["id"])
        if node is None:
            raise web.HTTPNotFound(reason="the head knows no node of this id")
        workers = [worker for worker in self._board.workers if worker.node is node.state]
        history = self._board.node_history.get(node.id, ())
        return self._page("node.html", "", node=node, workers=workers, history=history)

    async def _channels(self, request: web.Request) -> web.Response:
        return self._page("channels.html", "/channels")

    async def _events(self, request: web.Request) -> web.Response:
        return self._page("events.html", "/events", events=list(self._board.events)[::-1])

    def _asked_worker(self, request: web.Request) -> WorkerView:
        worker = self._board.worker(request.match_info["id"])
        if worker is None:
            raise web.HTTPNotFound(reason="the head knows no worker of this id: it may have ended, or was restarted")
        return worker

    def _page(self, template: str, here: str, **values: Any) -> web.Response:
        return self._html(self._pages.render(template, here, **values))

    def _html(self, text: str, status: int = 200) -> web.Response:
        return web.Response(text=text, status=status, content_type="text/html", charset="utf-8")

    # --- others ---

    async def _file(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self._static:
            raise web.HTTPNotFound
        return web.Response(body=self._static[name], content_type=STATIC[name], charset="utf-8")

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=metrics.text(self._board), headers={"Content-Type": metrics.CONTENT_TYPE})

    async def _live(self, request: web.Request) -> web.StreamResponse:
        """Send an event for each sample, until the page is closed (server-sent events)."""
        if self._listeners >= MOST_LISTENERS:
            raise web.HTTPServiceUnavailable(reason=f"{MOST_LISTENERS} pages are open already")
        answer = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        await answer.prepare(request)
        self._listeners += 1
        try:
            while not self._closing:
                changed = self._changed
                with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                    await asyncio.wait_for(changed.wait(), ALIVE_S)
                await answer.write(b"event: sample\ndata: \n\n" if changed.is_set() else b": alive\n\n")
        except ConnectionError:
            pass  # the page was closed
        finally:
            self._listeners -= 1
        return answer

    def _on_sample(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


@contextlib.asynccontextmanager
async def serving(application: web.Application, listener: socket.socket) -> AsyncIterator[None]:
    """Serve *application* on the bound socket *listener* for a ``with`` block."""
    runner = web.AppRunner(
        application, access_log=None, handle_signals=False, keepalive_timeout=30.0, shutdown_timeout=1.0
    )
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        yield
    finally:
        await runner.cleanup()
