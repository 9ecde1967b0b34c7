"""The released gateway, started against two engine processes built from this package."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ENGINE = Path(__file__).with_name("engine.py")
WAIT = 60.0


def _require(what: object, message: str) -> None:
    if what is None:
        message += "; `make gateway` installs what this needs"
        if os.environ.get("LOADBOX_REQUIRE_GATEWAY"):
            pytest.fail(message)
        pytest.skip(message)


def eventually(what: Callable[[], Any], seconds: float = WAIT) -> Any:
    """Ask again until the answer is true; gives it."""
    end = time.monotonic() + seconds
    while True:
        answer = what()
        if answer:
            return answer
        assert time.monotonic() < end, "this did not become true in time"
        time.sleep(0.05)


def make_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of 259 tokens: three special ones, then byte b as token b + 3."""
    tokenizers = pytest.importorskip("tokenizers")
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {**{byte: chr(byte) for byte in plain}, **{byte: chr(256 + n) for n, byte in enumerate(others)}}
    assert set(letters.values()) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2, **{letters[byte]: byte + 3 for byte in range(256)}}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>", "<unk>"])
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token_id": 1, "bos_token_id": 0, "model_type": "llama", "vocab_size": 259, "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))


def free_port(port: int = 0) -> int | None:
    """That port, or any, if it can be bound."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return None
        return int(probe.getsockname()[1])


def handshake_port(path: str) -> int:
    """Where the gateway listens for the engines of a worker at that path: 20000 and a 64-bit FNV-1a of the path's bytes."""
    value = 0xCBF29CE484222325
    for byte in path.encode():
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return 20000 + value % 10000


class Engine:
    """An engine process: what it said, and a way to set its load."""

    def __init__(self, address: str, index: int, tail: str, load_only: str, log: Path) -> None:
        self.log = log.open("w")
        command = [sys.executable, "-u", str(ENGINE), address, str(index), tail, load_only]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True)
        self.events: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))

    def heard(self, event: str) -> list[dict[str, Any]]:
        return [each for each in list(self.events) if each["event"] == event]

    def set_load(self, *load: int, finish: bool = False) -> None:
        """What its load is from now on; requests that are held get a token, or their last."""
        assert self.process.stdin is not None
        before = len(self.heard("load"))
        self.process.stdin.write(json.dumps({"load": load, "finish": finish}) + "\n")
        self.process.stdin.flush()
        eventually(lambda: len(self.heard("load")) > before)

    def close(self) -> None:
        try:
            self._end()
        finally:
            self.log.close()

    def _end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(20)
        self.process.stdout.close()


class Gateway:
    """The gateway with its two engines."""

    eventually = staticmethod(eventually)

    def __init__(self, program: str, folder: Path, tail: str, load_only: str) -> None:
        self.folder = folder
        self.model = str(folder / "model")
        make_tokenizer(folder / "model")
        number = 0
        while free_port(handshake_port(path := f"{folder}/w{number}")) is None:
            number += 1
        self.port, self.metrics_port = free_port(), free_port()
        self.log = (folder / "gateway.log").open("w")
        command = [
            program, "launch", "--host", "127.0.0.1", "--port", str(self.port), "--backend", "tokenspeed",
            "--worker-urls", f"ipc://{path}", "--zmq-engine-count", "2", "--model-path", self.model, "--policy", "round_robin",
            "--prometheus-host", "127.0.0.1", "--prometheus-port", str(self.metrics_port), "--load-monitor-interval", "1",
            "--health-check-interval-secs", "1", "--shutdown-grace-period-secs", "1",
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT, cwd=folder)
        address = f"tcp://127.0.0.1:{handshake_port(path)}"
        self.engines = [Engine(address, index, tail, load_only, folder / f"engine{index}.log") for index in range(2)]

    def wait_ready(self) -> None:
        eventually(lambda: all(engine.heard("connected") for engine in self.engines))
        eventually(self._answers)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.tell()
        try:
            return self.complete(2) == "ab"
        except urllib.error.URLError:
            return False

    def tell(self) -> str:
        """The logs, for a failure's text."""
        return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("*.log")))

    def open(self, path: str, body: dict[str, Any] | None = None, timeout: float = 30) -> Any:
        data = None if body is None else json.dumps({"model": self.model, **body}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, {"content-type": "application/json"})
        return urllib.request.urlopen(request, timeout=timeout)

    def complete(self, tokens: int, **body: Any) -> str:
        """The text of a plain request for so many tokens."""
        with self.open("/v1/completions", {"prompt": "hello", "max_tokens": tokens, **body}) as answer:
            choice = json.load(answer)["choices"][0]
        assert choice["finish_reason"] == "length"
        return str(choice["text"])

    def loads(self) -> dict[int, tuple[int, int, float]]:
        """What the gateway holds of each rank: running, waiting, token usage."""
        with self.open("/loads") as answer:
            found = json.load(answer)["loads"]
        return {each["dp_rank"]: (each["num_running_reqs"], each["num_waiting_reqs"], each["token_usage"]) for each in found}

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=30) as answer:
            return str(answer.read().decode())

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for engine in self.engines:
            engine.close()
        self.log.close()


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Gateway]]:
    """Starts gateways, ended with the module."""
    program = shutil.which("smg", path=os.path.dirname(sys.executable))
    _require(program, "the gateway (smg) is not installed here")
    made: list[Gateway] = []

    def start(tail: str, load_only: str) -> Gateway:
        made.append(Gateway(str(program), tmp_path_factory.mktemp("gateway"), tail, load_only))
        made[-1].wait_ready()
        return made[-1]

    yield start
    for gateway in made:
        gateway.close()
