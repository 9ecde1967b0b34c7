"""A client of the server: requests in threads, each sent to a rank of its choice by the header ``X-data-parallel-rank``."""

from __future__ import annotations

import http.client
import json
import threading
import time

__all__ = ["Request"]

_LIMIT_S = 180.0


class Request:
    """One completion of exactly ``tokens`` tokens, sent at once."""

    def __init__(self, port: int, rank: int | None, tokens: int, prompt_tokens: int = 40) -> None:
        self.rank = rank
        self.seconds: float | None = None
        """How long it took; None while it is under way."""
        self.error: str | None = None
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_LIMIT_S)
        self._body = {"model": "tiny", "prompt": [7] * prompt_tokens, "max_tokens": tokens, "ignore_eos": True}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> str | None:
        """Wait until it has ended; its error, which begins with the status if the server answered."""
        self._thread.join()
        return self.error

    def abort(self) -> None:
        """Hang up; the server aborts the request."""
        sock = self._connection.sock
        if sock is not None:
            try:
                sock.shutdown(2)
            except OSError:
                pass

    def _run(self) -> None:
        start = time.monotonic()
        headers = {"Content-Type": "application/json"}
        if self.rank is not None:
            headers["X-data-parallel-rank"] = str(self.rank)
        try:
            self._connection.request("POST", "/v1/completions", json.dumps(self._body), headers)
            answer = self._connection.getresponse()
            content = answer.read()
            if answer.status != 200:
                self.error = f"{answer.status} {content[:200].decode(errors='replace')}"
            elif json.loads(content)["usage"]["completion_tokens"] != self._body["max_tokens"]:
                self.error = f"another number of tokens came: {content[-200:].decode(errors='replace')}"
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self._connection.close()
            self.seconds = time.monotonic() - start
