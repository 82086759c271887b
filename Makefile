# Each target installs what it needs into .venv. Only Python 3.11 or newer and make must be there.
PYTHON ?= python3
BIN := .venv/bin
export FLWR_TELEMETRY_ENABLED = 0
export FLWR_DISABLE_UPDATE_CHECK = 1
# The tests start hundreds of processes; without stored bytecode, each would compile PyTorch's, Flower's and Ray's modules again.
unexport PYTHONDONTWRITEBYTECODE

DATA ?=
MINUTES ?= 360
.PHONY: demo test check test-fedsim test-others test-attacks test-service test-attacker fuzz test-page test-deploy bench-gpu docs reference format clean

demo: .venv/.installed  ## four federations, attacked and shown on one page
	$(BIN)/attacker demo --out runs/demo

test: .venv/.installed-dev  ## every check that a change must pass; three parts run at a time, since federations often wait
	$(MAKE) --no-print-directory --keep-going --jobs=3 test-fedsim test-attacks test-attacker test-others check test-service

check: .venv/.installed-dev  ## style, types, import contracts, documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# One PyTorch thread per process: the tensors are small, and a second thread would mostly wait.
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

# Without SEED, the seed is derived from the date: make fuzz SEED=7 SECONDS=60
fuzz: .venv/.installed-dev  ## ten minutes of commands on randomly changed runs, then ten minutes of random requests
	OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python tests/fuzz/run_fuzzer.py --seconds $(or $(SECONDS),600) $(if $(SEED),--seed $(SEED))
	OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python tests/fuzz/api_fuzzer.py --seconds $(or $(SECONDS),600) $(if $(SEED),--seed $(SEED))

test-page: .venv/.installed-dev  ## the web page in a headless Chromium, which is downloaded if none is installed
	command -v chromium chromium-browser google-chrome >/dev/null || $(BIN)/playwright install chromium || true
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/page -m page -rs

test-deploy: .venv/.installed-dev  ## federations of separate processes, and of several simulated hosts where the system allows it
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/deploy tests/docs/test_deployment_commands.py -m 'deploy or not deploy' -rs

docs: .venv/.installed-dev  ## the documentation as a site in build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo build/site/index.html

reference: .venv/.installed-dev  ## write docs/commands.md and docs/names.md anew from the code
	$(BIN)/python docs/generate_reference.py

bench-gpu: .venv/.installed-dev  ## CUDA tests and GPU benchmarks that are not done yet; DRY=1 checks on a CPU that they start
	PYTHONPATH=benchmarks $(BIN)/python -m support.gpu.pieces $(if $(DRY),--dry-run) $(if $(DATA),--data $(DATA)) --minutes $(MINUTES)

format: .venv/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info

# --no-compile halves the time: most modules are never imported, and Python compiles the others when it imports them.
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
