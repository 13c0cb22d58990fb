"""`openipu report --open`: the page of a report in a browser, from a server that only this machine can reach."""

from __future__ import annotations

import contextlib
import threading
import webbrowser
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Final

from openipu.engine.report.files import JSON, PAGE, TRACE

from .terminal import make_console

HOST: Final = "127.0.0.1"


class _Handler(SimpleHTTPRequestHandler):
    """Gives out the files of one report, and nothing else that is in their folder."""

    def send_head(self) -> BytesIO | BinaryIO | None:
        """The file that a request asks for, after its headers have been sent; None if it is refused."""
        # A page from elsewhere could read the report, under a name of its own that leads to this machine.
        if (self.headers.get("Host") or "").partition(":")[0] not in (HOST, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN)
            return None
        wanted = self.path.partition("?")[0].removeprefix("/") or PAGE
        if wanted not in (PAGE, JSON, TRACE):
            self.send_error(HTTPStatus.NOT_FOUND)
            return None
        self.path = f"/{wanted}"
        return super().send_head()

    def log_message(self, format: str, *arguments: object) -> None:
        """Requests are nothing to tell about."""


def show(folder: Path) -> None:
    """Open the page of a report in a browser, until Ctrl-C is pressed."""
    folder = folder if folder.is_dir() else folder.parent
    if not (folder / PAGE).is_file():
        raise ValueError(f"There is no {PAGE} in {folder}. Give the folder that a report was written to.")
    with make_server(folder) as server, contextlib.suppress(KeyboardInterrupt):
        url = f"http://{HOST}:{server.server_port}/"
        make_console().print(f"The report is at {url} until you press Ctrl-C.", soft_wrap=True)
        # In a thread, because browsers of terminals do not return before they end.
        threading.Thread(target=webbrowser.open, args=[url], daemon=True).start()
        server.serve_forever()


def make_server(folder: Path) -> ThreadingHTTPServer:
    """A server for the report in this folder, at any free port."""
    return ThreadingHTTPServer((HOST, 0), partial(_Handler, directory=str(folder)))
