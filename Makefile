# Each command sets up what it needs in .venv: only Python 3.11 or newer and make are asked for.
PYTHON ?= python3
BIN := .venv/bin
export FLWR_TELEMETRY_ENABLED = 0
export FLWR_DISABLE_UPDATE_CHECK = 1

DATA ?=
MINUTES ?= 360
.PHONY: demo test check test-fedsim test-others test-attacks test-service test-attacker fuzz test-page test-deploy bench-gpu docs reference format clean

demo: .venv/.installed  ## four federations, attacked and shown on one page
	$(BIN)/attacker demo --out runs/demo

test: .venv/.installed-dev  ## all that a change must pass; three parts at a time, as federations often wait, longest first
	$(MAKE) --no-print-directory --keep-going --jobs=3 test-fedsim check test-attacks test-others test-attacker test-service

check: .venv/.installed-dev  ## style, types, import contracts, documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# One thread each: the tensors are small, and a second thread would only wait.
test-fedsim: .venv/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -rs tests/fedsim
test-others: .venv/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -rs --ignore=tests/attacker --ignore=tests/fedsim
test-attacks: .venv/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -rs tests/attacker/attacks
test-service: .venv/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -rs tests/attacker/service
test-attacker: .venv/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -rs tests/attacker --ignore=tests/attacker/attacks --ignore=tests/attacker/service

fuzz: .venv/.installed-dev  ## ten minutes of random runs, as every night; the seed is the day's, or: make fuzz SEED=7 SECONDS=60
	OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python tests/fuzz/run_fuzzer.py --seconds $(or $(SECONDS),600) $(if $(SEED),--seed $(SEED))
	OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python tests/fuzz/api_fuzzer.py --seconds $(or $(SECONDS),600) $(if $(SEED),--seed $(SEED))

test-page: .venv/.installed-dev  ## the web page in a headless Chromium, fetched where it can be; without one the tests say so and are skipped
	command -v chromium chromium-browser google-chrome >/dev/null || $(BIN)/playwright install chromium || true
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/page -m page -rs

test-deploy: .venv/.installed-dev  ## federations of separate processes, and on several hosts where the system allows it
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/deploy tests/docs/test_deployment_commands.py -m 'deploy or not deploy' -rs

docs: .venv/.installed-dev  ## the documentation as a site in build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo build/site/index.html

reference: .venv/.installed-dev  ## the pages that repeat what the code says: commands and names
	$(BIN)/python docs/generate_reference.py

bench-gpu: .venv/.installed-dev  ## CUDA tests and every benchmark's GPU table, in pieces that go on where they were; DRY=1 on a CPU
	PYTHONPATH=benchmarks $(BIN)/python -m support.gpu.pieces $(if $(DRY),--dry-run) $(if $(DATA),--data $(DATA)) --minutes $(MINUTES)

format: .venv/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info

# Without --no-compile half of the time goes into bytecode of modules that are never imported; Python compiles the others itself.
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	test -x $@ || $(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml | $(BIN)/python
	$(PIP_INSTALL) .
	touch $@

.venv/.installed-dev: pyproject.toml | $(BIN)/python
	$(PIP_INSTALL) '.[dev,docs]'
	touch .venv/.installed $@
