"""`openipu report --open`: who can read what, and how it ends."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from openipu.cli import serve
from openipu.engine.report.files import JSON, PAGE, TRACE

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of a report and others, and one beside it."""
    folder = tmp_path / "out"
    (folder / "instance-1").mkdir(parents=True)
    for name in (PAGE, JSON, TRACE, "notes.txt", f"instance-1/{PAGE}"):
        (folder / name).write_text(f"this is {name}")
    (tmp_path / "secret.txt").write_text("secret")
    return folder


@pytest.fixture
def port(folder: Path) -> Iterator[int]:
    with serve.make_server(folder) as server:
        assert server.server_address[0] == "127.0.0.1", "no other machine can reach it"
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def get(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("path", "name"), [("/", PAGE), ("/report.html?x=1", PAGE), (f"/{JSON}", JSON), (f"/{TRACE}", TRACE)]
)
def test_the_files_of_the_report_are_served(port, path, name):
    assert get(port, path) == (200, f"this is {name}")


@pytest.mark.parametrize(
    "path",
    [
        "/notes.txt",
        "/instance-1/",
        "/instance-1",
        f"/instance-1/{PAGE}",
        "/../secret.txt",
        "/%2e%2e/secret.txt",
        "/.",
    ],
)
def test_nothing_else_is(port, path):
    status, text = get(port, path)
    assert status == 404
    assert "secret" not in text
    assert "notes" not in text


def test_nothing_can_be_written(port, folder):
    assert get(port, f"/{PAGE}", "PUT")[0] == 501
    assert (folder / PAGE).read_text() == f"this is {PAGE}"


def test_pages_from_elsewhere_cannot_read_it_under_a_name_of_their_own(port):
    assert get(port, "/", Host=f"example.org:{port}")[0] == 403
    assert get(port, "/", Host="localhost:8000")[0] == 200, "behind a tunnel, the port is another one"


def test_the_page_opens_in_a_browser_until_ctrl_c(folder, tmp_path):
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\nprintf "%s" "$1" > {opened}.part && mv {opened}.part {opened}\n')
    browser.chmod(0o700)
    command = [sys.executable, "-m", "openipu", "report", "--open", str(folder)]
    with subprocess.Popen(
        command, env=os.environ | {"BROWSER": str(browser)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        until = time.monotonic() + 60
        while not opened.exists() and time.monotonic() < until:
            time.sleep(0.02)
        with urllib.request.urlopen(opened.read_text(), timeout=30) as answer:
            assert answer.read().decode() == f"this is {PAGE}"
        process.send_signal(signal.SIGINT)
        said, failed = process.communicate(timeout=60)
    assert (process.returncode, failed) == (0, "")
    assert f"The report is at {opened.read_text()} until you press Ctrl-C." in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--open", "."], "There is no report.html in ."), (["--open", ".", "."], "--open shows one report, but two")],
)
def test_what_cannot_be_opened(arguments, message, tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "openipu", "report", *arguments],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert message in result.stderr
