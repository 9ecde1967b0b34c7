# Each target works as the only command typed on a fresh clone: it makes its own virtual environment first.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
SOURCES := $(shell find mailbox piggyback reader engines cli -type f -not -name '*.pyc' 2>/dev/null) pyproject.toml setup.py MANIFEST.in

.DEFAULT_GOAL := help
.PHONY: help demo pictures test test-twin test-more test-slow torture model sanitize peers peers-full wheel gateway tokenspeed vllm vllm-install
.PHONY: bench bench-full bench-vllm bench-routing bench-routing-full instructions docs lint types clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

$(PY):
	$(PYTHON) -m venv $(VENV)

# A normal install, not an editable one: mypy does not follow those, and this is what users get.
$(VENV)/.installed: $(SOURCES) | $(PY)
	@rm -rf build # what an older tree built there would be installed again
	$(PY) -m pip install --quiet --disable-pip-version-check '.[dev]'
	@$(PY) -c 'import loadbox.mailbox._seqlock as s; print("loadbox: C core" if s.BACKEND == "c" else "loadbox: no C core could be built (is there a compiler? Python.h?); the pure-Python twin runs instead, several times slower")'
	@touch $@

demo: $(VENV)/.installed ## replay a public trace against a group of four ranks, live
	@$(VENV)/bin/loadbox demo $(ARGS)

pictures: $(VENV)/.installed ## make the documents' pictures of the demo and of top anew, a minute
	@$(VENV)/bin/loadbox demo --svg docs/demo.svg
	@$(PY) docs/pictures.py

test: $(VENV)/.installed ## the whole test suite but the slow tests, under three minutes
	$(VENV)/bin/pytest -n 2 -m 'not slow' $(ARGS)

test-twin: ## the suite as on a machine without a compiler: on the pure-Python twin alone
	@test -x $(VENV)-twin/bin/python || $(PYTHON) -m venv $(VENV)-twin
	@rm -rf build
	LOADBOX_REQUIRE_C= CC=false $(VENV)-twin/bin/python -m pip install --quiet --disable-pip-version-check '.[test]'
	@rm -rf build
	LOADBOX_REQUIRE_C= LOADBOX_TEST_WITHOUT_C=1 $(VENV)-twin/bin/pytest -q -n 2 -m 'not slow' tests/mailbox tests/docs $(ARGS)

test-more: $(VENV)/.installed ## the commands at a terminal, and the scheduler under every fault: what make test has no time for; a minute
	$(VENV)/bin/pytest -q -n 2 -m slow tests/cli tests/scheduler $(ARGS)

test-slow: $(VENV)/.installed ## the slow tests, with bounded time
	$(VENV)/bin/pytest -m slow $(ARGS)

torture: $(VENV)/.installed ## the mailbox at length: ten million reads each way, ten million publishes, a kill at every line; minutes
	timeout 900 $(VENV)/bin/pytest -m slow tests/mailbox/test_torture.py tests/mailbox/test_growth.py tests/mailbox/test_kill_walk.py $(ARGS)

model: ## Spin on the models, litmus files on the C11 rules, each also weakened; needs spin and a C compiler
	@$(PYTHON) proof/run $(ARGS)

sanitize: $(VENV)/.installed ## the header and the C cores under Address-, UB- and ThreadSanitizer, the reader and the fuzz tests, too; minutes; needs gcc
	@$(PY) proof/sanitize/run $(ARGS)

.PHONY: soak fuzz
SECONDS ?= 600
soak: $(VENV)/.installed ## ranks and frontends killed, stopped and restarted at random for ten minutes, every read checked; SECONDS=60 for less
	timeout $$(($(SECONDS) + 300)) $(PY) proof/soak/run --seconds $(SECONDS) $(ARGS)

FUZZ ?= 20
fuzz: $(VENV)/.installed ## arbitrary pages, messages and histories, at length: four minutes
	LOADBOX_FUZZ=$(FUZZ) timeout 900 $(VENV)/bin/pytest tests/fuzz tests/piggyback/test_batch.py tests/piggyback/test_requests.py tests/reader/test_ledger.py tests/reader/test_histories.py $(ARGS)

gateway: $(VENV)/.installed ## the real gateway (smg 1.13.0) against two engine processes of this package, about half a minute
	$(PY) -m pip install --quiet --disable-pip-version-check smg==1.13.0 'tokenizers>=0.20'
	LOADBOX_REQUIRE_GATEWAY=1 timeout 600 $(VENV)/bin/pytest tests/gateway $(ARGS)

tokenspeed: $(VENV)/.installed ## the adapter and the piggyback against the code of tokenspeed 0.1.1, unpacked beside the environment
	@if $(PY) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/tokenspeed tokenspeed==0.1.1; then \
		LOADBOX_TOKENSPEED=$(VENV)/tokenspeed timeout 600 $(VENV)/bin/pytest tests/engines/test_tokenspeed.py tests/piggyback/test_tokenspeed.py $(ARGS); \
	else \
		echo "SKIPPED: tokenspeed 0.1.1 cannot be installed here, so NOTHING was tested against it"; \
	fi

$(VENV)-peers/.installed: $(SOURCES)
	@test -x $(VENV)-peers/bin/python || $(PYTHON) -m venv $(VENV)-peers
	@rm -rf build
	$(VENV)-peers/bin/python -m pip install --quiet --disable-pip-version-check '.[cli]' kickmsg==0.9.2 || true
	$(VENV)-peers/bin/python -m pip install --quiet --disable-pip-version-check iceoryx2==0.10.0 membridge==1.0.0 redis prometheus_client || true
	$(VENV)-peers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)-peers/sglang sglang==0.5.23 || true
	@rm -rf build
	@touch $@

peers: $(VENV)-peers/.installed ## the closest peers beside loadbox in one run: times, torn reads, what is left after a kill; about a minute
	@$(MAKE) --no-print-directory $(VENV)/.installed
	$(VENV)/bin/pytest -q -m slow tests/benchmarks/test_peers.py
	@LOADBOX_PEER_SGLANG=$(VENV)-peers/sglang $(VENV)-peers/bin/python benchmarks/peers --quick $(ARGS)

peers-full: $(VENV)-peers/.installed ## every peer that can be had, several passes; writes benchmarks/results/peers.json; a quarter of an hour
	@LOADBOX_PEER_SGLANG=$(VENV)-peers/sglang $(VENV)-peers/bin/python benchmarks/peers --json benchmarks/results/peers.json $(ARGS)

# vLLM wants other versions than the rest, and gigabytes: an environment of its own.  Its imports are slow enough without compiling.
vllm vllm-install bench-vllm: export PYTHONDONTWRITEBYTECODE =

$(VENV)-vllm/.installed: $(SOURCES)
	@rm -rf build
	$(VENV)-vllm/bin/python -m pip install --quiet --disable-pip-version-check '.[test]'
	@touch $@

vllm-install: ## an environment with vLLM 0.32 for CPUs and this package, in .venv-vllm; 3 GB, two minutes and more
	@timeout 600 $(PYTHON) tests/engines/install_vllm.py $(VENV)-vllm
	@$(MAKE) --no-print-directory $(VENV)-vllm/.installed

vllm: ## vLLM 0.32 with its scheduler in our mailbox: the real scheduler, and a server of two ranks; makes vllm-install first
	@if timeout 600 $(PYTHON) tests/engines/install_vllm.py $(VENV)-vllm; then \
		$(MAKE) --no-print-directory $(VENV)-vllm/.installed && \
		LOADBOX_REQUIRE_VLLM=1 timeout 700 $(VENV)-vllm/bin/pytest -W default tests/engines/vllm $(ARGS); \
	else \
		echo "SKIPPED: vLLM 0.32 cannot be installed here, so NOTHING was tested against it"; \
	fi

bench-vllm: vllm-install ## what the mailbox costs vLLM's scheduler, side by side with vLLM's own; a quarter of an hour
	@timeout 2400 $(VENV)-vllm/bin/python benchmarks/vllm_cost.py $(ARGS)

wheel: $(VENV)/.installed ## build the sdist and the wheel into dist/, check them, and test the wheel in a clean environment
	$(PY) -m pip install --quiet --disable-pip-version-check 'build>=1.2' 'twine>=6'
	LOADBOX_REQUIRE_C= LOADBOX_KEEP_WHEEL=dist timeout 900 $(VENV)/bin/pytest -m slow tests/wheel $(ARGS)
	@ls dist/*.whl dist/*.tar.gz

bench: $(VENV)/.installed ## the quick benchmarks: one table of ratios, side by side in one run, about a minute
	@$(PY) benchmarks/quick.py

bench-full: $(VENV)/.installed $(VENV)-peers/.installed ## all benchmarks but the routing study, some 20 minutes; writes benchmarks/results/*.json and the plots
	$(PY) -m pip install --quiet --disable-pip-version-check 'matplotlib>=3.7'
	@set -e; for name in mailbox engines piggyback reader latency propagation staleness; do \
		$(PY) benchmarks/bench_$$name.py --json benchmarks/results/$$name.json; done
	@$(MAKE) --no-print-directory peers-full
	@$(PY) benchmarks/plots.py
	@$(PY) benchmarks/numbers_page.py

instructions: $(VENV)/.installed ## instructions of a bare publish and read against the committed figures; needs valgrind and a C compiler
	@$(PY) benchmarks/instructions.py $(ARGS)
	$(VENV)/bin/pytest -q -m slow tests/benchmarks/test_quick.py

bench-routing: $(VENV)/.installed ## ways of choosing a rank, by simulation: the quick variant, under a minute
	@$(PY) benchmarks/routing --quick $(ARGS)

bench-routing-full: $(VENV)/.installed ## all of it, a quarter of an hour and more; writes benchmarks/results/routing.json and docs/img/routing.svg
	$(PY) -m pip install --quiet --disable-pip-version-check 'matplotlib>=3.7'
	@$(PY) benchmarks/routing --publish $(ARGS)

docs: $(VENV)/.installed ## the API reference, from the docstrings, into build/docs; fails on a warning and on a missing docstring
	@$(PY) docs/build_api.py build/docs && echo "build/docs/index.html"

lint: $(VENV)/.installed ## ruff, and the house's own rules
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.installed ## mypy --strict, on the installed package
	$(PY) -m mypy -p loadbox.mailbox -p loadbox.piggyback -p loadbox.reader -p loadbox.engines -p loadbox.cli

clean: ## remove what the targets made
	rm -rf $(VENV) $(VENV)-twin $(VENV)-vllm $(VENV)-peers build dist *.egg-info
