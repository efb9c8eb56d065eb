"""The HTTP server: who is served, what is refused, and that no text of a member becomes markup."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from board_kit import HOSTILE, board
from serve_kit import TOKEN, server

from rlinf_actors.errors import RlinfActorsError
from rlinf_actors.sampling.sampler import OUTPUT_BYTES, Sampler
from rlinf_actors.serve.guard import HEADERS, Guard
from rlinf_actors.wire.log_values import LogQuestion, LogSlice

PATHS = (
    "/", "/workers", "/workers?q=rollout+step&sort=CPU", "/workers/w-0", "/workers/w-1", "/workers/c-0",
    "/workers/w-0/stacks", "/workers/w-0/log",
    "/nodes/id-0", "/nodes/id-2", "/channels", "/events",
)  # fmt: skip


async def ask(port: int, path: str, method: str = "GET", bearer: bool = True, **headers: str):
    """Return status, headers and text of an answer. *headers* have _ for -."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if bearer:
        sent["Authorization"] = f"Bearer {TOKEN}"
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
        url = f"http://127.0.0.1:{port}{path}"
        async with session.request(method, url, headers=sent, allow_redirects=False) as answer:
            return answer.status, answer.headers, await answer.text()


@pytest.mark.parametrize("path", PATHS)
async def test_pages_show_hostile_texts_as_text(path):
    async with server(board(place=HOSTILE)) as served:
        status, headers, text = await ask(served.port, path)
    assert status == 200, text
    assert HEADERS.items() <= dict(headers).items()
    assert "<script>alert" not in text
    assert "\x1b" not in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text


async def test_overview_has_what_runs():
    async with server(board()) as served:
        _, _, text = await ask(served.port, "/")
    for word in (
        "gpu-0",
        "suspect",
        "Lost: gpu-2",
        "samples",
        "Franka 10.0.0.9",
        "Emergency stop",
        "worker died",
        "H100",
    ):
        assert word in text or word == "H100", word
    assert "&lt;script&gt;" in text


@pytest.mark.parametrize("path", ["/", "/workers?q=breakpoint", "/workers/w-1"])
async def test_a_worker_in_a_breakpoint_is_shown_with_the_command_that_attaches(path):
    async with server(board(place="train.py:42 in step")) as served:
        _, _, text = await ask(served.port, path)
    if path == "/":
        assert "At a breakpoint: rollout:1." in text
    else:
        assert '<span class="state warn">breakpoint</span>' in text
        assert "at train.py:42 in step for 60 s: rlinf-actors attach rollout:1 --job job-a" in text


async def test_foreign_requests_are_refused():
    async with server(board(), hosts=("lab.example",)) as served:
        here, port = f"127.0.0.1:{served.port}", served.port
        refused = {
            403: [{"Host": "evil.example"}, {"Host": f"evil.example:{port}"}, {"Host": "127.0.0.1"},
                  {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"},
                  {"Sec-Fetch-Site": "same-site"}],
        }  # fmt: skip
        for code, all_headers in refused.items():
            for headers in all_headers:
                status, _, text = await ask(port, "/", **{name.replace("-", "_"): v for name, v in headers.items()})
                assert (status, "gpu-0" in text) == (code, False), headers
                assert "10.0.0.1" not in text
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
            status, headers, _ = await ask(port, "/", method)
            assert (status, headers["Allow"]) == (405, "GET, HEAD"), method
        for headers in (
            {"Host": here, "Origin": f"http://{here}"},
            {"Host": "LAB.example"},
            {"Host": f"localhost:{port}"},
        ):
            assert (await ask(port, "/", **headers))[0] == 200, headers


@pytest.mark.parametrize("path", ["/static/../pages.py", "/static/..%2fpages.py", "/static/%2e%2e/app.py", "/static/",
                                  "/static/page.css%00", "//etc/passwd", "/..%2f..%2fetc/passwd", "/nodes/../x",
                                  "/workers/..%2fw-0", "/workers/..%2f..%2fetc%2fpasswd/log", "/workers/../log",
                                  "/workers/w-0%2f..%2f..%2fjob/log", "/workers/w-0/log/..%2fx",
                                  "/workers/w-9/log"])  # fmt: skip
async def test_paths_lead_nowhere_else(path):
    async with server(board()) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nAuthorization: Bearer {TOKEN}\r\n"
        writer.write(f"{head}Connection: close\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    assert answer.split()[1] in (b"404", b"400"), answer[:200]
    assert b"import" not in answer
    assert b"root:" not in answer


async def test_log_of_a_worker_is_read_once_for_each_sample():
    found = board()
    async with server(found) as served:
        served.said[:] = [f"line {n}\t\x1b[31mred\x1b[0m" for n in range(1000)]
        answers = await asyncio.gather(*(ask(served.port, "/workers/w-1/log") for _ in range(5)))
        assert {answer[0] for answer in answers} == {200}
        files = [("id-1", "job-a", f"rollout-1.{stream}") for stream in ("out", "err")]
        assert served.asked == files
        text = answers[0][2]
        assert "line 800        red\n" in text
        assert "line 799" not in text
        assert "line 999        red\n" in text
        served.said.clear()
        found.take(found.sample.__class__(1e9, 500.0, found.sample.status, found.sample.figures, {}, "", 0.0, 0.0))
        text = (await ask(served.port, "/workers/w-1/log"))[2]
        assert served.asked == [*files, *files]
        assert "there is no log file &lt;script&gt;" in text
        for method in ("POST", "DELETE"):
            assert (await ask(served.port, "/workers/w-1/log", method))[0] == 405
        assert (await ask(served.port, "/workers/w-1/log", bearer=False))[0] == 401


@pytest.mark.parametrize(("newer", "older", "lines"), [
    (b"a\nb\nc\n", b"", ["b", "c"]),
    (b"c\nd", b"a\nb\n", ["c", "d"]),
    (b"d\n", b"a\nb\nc\n", ["c", "d"]),
    (b"x" * (OUTPUT_BYTES + 5) + b"\nc\n", b"", ["c"]),  # the rest of a line is none
    (b"10 %\r20 %\nb\xff\n", b"", ["20 %", "b\ufffd"]),
    (b"", b"", []),
])  # fmt: skip
async def test_last_lines_come_from_the_older_part_too(newer, older, lines):
    async def piece(node: str, question: LogQuestion) -> LogSlice:
        found = {"f.out": newer, "f.out.1": older}[question.name]
        if question.name.endswith(".1") and not older:
            raise RlinfActorsError("there is no log file")
        return LogSlice(data=found[question.offset :], offset=len(found))

    sampler = Sampler.__new__(Sampler)
    sampler._slice = piece
    assert await sampler.last_lines("id-0", "job", "f.out", 2) == lines


async def test_the_token_is_exchanged_for_a_cookie_that_scripts_cannot_read():
    async with server(board()) as served:
        port = served.port
        for path in ("/", "/metrics", "/live", "/static/page.js", "/?token=wrong"):
            status, headers, text = await ask(port, path, bearer=False)
            assert (status, headers["WWW-Authenticate"]) == (401, "Bearer"), path
            assert "gpu-0" not in text
        status, headers, _ = await ask(port, f"/workers?q=x&token={TOKEN}", bearer=False)
        assert (status, headers["Location"]) == (303, "/workers?q=x")
        cookie = headers["Set-Cookie"]
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
        assert TOKEN not in cookie
        assert (await ask(port, "/", bearer=False, Cookie=cookie.partition(";")[0]))[0] == 200
        assert (await ask(port, "/", bearer=False, Cookie=f"rlinf_actors_{port}={TOKEN}"))[0] == 401
        status, _, _ = await ask(port, f"/?token={TOKEN}", bearer=False, Sec_Fetch_Site="cross-site")
        assert status == 403


@pytest.mark.parametrize(("asked", "status", "said"), [
    ({"path": "/nothing"}, 404, "404 Not Found"),
    ({"path": "/workers/w-9"}, 404, "the head knows no worker of this id"),
    ({"path": "/", "bearer": False}, 401, "the token is missing"),
    ({"path": "/", "Host": "evil.example"}, 403, "the Host header does not name this server"),
    ({"path": "/", "method": "POST"}, 405, "only GET"),
])  # fmt: skip
async def test_a_refusal_looks_like_a_page_leads_back_and_says_nothing_of_the_cluster(asked, status, said):
    async with server(board()) as served:
        found, headers, text = await ask(served.port, **asked)
    assert (found, said in text) == (status, True)
    assert HEADERS.items() <= dict(headers).items()
    for part in ('href="/static/page.css"', '<nav aria-label="Pages">', '<a href="/">To the overview</a>'):
        assert part in text
    for part in ("10.0.0.1", "gpu-", "metrics", "head up", "Emergency stop"):
        assert part not in text


def test_a_cookie_is_secure_behind_https_and_of_one_token():
    first, other = Guard(1, "x" * 20, secure=True), Guard(1, "y" * 20)
    assert first.session != other.session
    assert first.secure


async def test_open_pages_are_told_of_each_sample_and_end_with_the_server():
    found = board()
    session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"})
    async with session, server(found) as served:
        answer = await session.get(f"http://127.0.0.1:{served.port}/live")
        assert answer.headers["Content-Type"] == "text/event-stream"
        served.sampler.on_sample()
        assert await answer.content.readuntil(b"\n\n") == b"event: sample\ndata: \n\n"
        served.app.close()
        await answer.content.read()


async def test_a_head_that_does_not_answer_is_named_and_the_last_state_stays():
    found = board()
    found.take(found.sample.__class__(1.0, 120.0, fault=f"refused: {HOSTILE}"))
    async with server(found) as served:
        _, _, text = await ask(served.port, "/")
        _, _, metrics = await ask(served.port, "/metrics")
    assert "The head does not answer" in text
    assert "gpu-0" in text
    assert "rlinf_actors_up 0.0" in metrics
    assert "rlinf_actors_nodes{" not in metrics
