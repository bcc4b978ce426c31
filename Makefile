# Two commands are all a newcomer needs: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Two processes of one thread each: the models of tests are too small for several threads.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

.PHONY: demo docs options quick test coverage browser fuzz torture lint env benchmark clean

# torch is installed first and by its exact version: that is the release with a CPU build, and later
# requirements are then satisfied by it.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "$(VENV): a virtual environment of $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@echo "$(VENV): installing torch (0.9 GB, more with CUDA; some minutes)"
	@$(PIP) torch==2.13.0
	@echo "$(VENV): installing hmmlm from this folder, and what it needs (0.3 GB; a minute)"
	@$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "$(VENV): installing what development needs (1.4 GB; some minutes)"
	@$(PIP) -e '.[dev,docs]'
	@touch $@

env: $(VENV)/.installed-dev
	@echo "$(VENV) is up to date for development"

demo: $(VENV)/.installed
	@echo "$(VENV) is up to date for hmmlm"
	$(BIN)/hmmlm demo

# The explorer is tested in a browser, if there is one or it can be installed; its tests are skipped otherwise.
browser:
	@command -v chromium || command -v google-chrome || { test "$$(id -u)" = 0 && \
		echo "installing Chromium with apt-get (0.5 GB; a minute)" && apt-get install --quiet --yes chromium > /dev/null 2>&1; } || echo "no Chromium: tests in a browser are skipped"

# What a developer runs before each commit: all but the tests marked slow.
quick: lint
	$(PYTEST) -m "not slow"

test: lint browser
	$(PYTEST)

# Separate, because recording the lines makes the tests take half as long again.
coverage: env browser
	$(PYTEST) --cov --cov-report=term:skip-covered

# Every query of random models against the enumeration of all paths: make fuzz SEED=1 COUNT=5000
SEED ?= 1
COUNT ?= 2000
fuzz: env
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m helpers.fuzz --seed $(SEED) --count $(COUNT)

# The tests that kill runs, before every operation on files and at many more random moments, which a seed changes.
torture: env
	OMP_NUM_THREADS=1 TORTURE_LEFT=100000 TORTURE_KILLS=300 TORTURE_SEED=$(SEED) $(BIN)/python -m pytest tests/test_learning_torture.py

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --strict --follow-imports silent --cache-dir .mypy_cache/client tests/typing/client.py

# The options of commands whose parsers import torch, with which the command line refuses others at once.
options: env
	PYTHONPATH=tests $(BIN)/python -m helpers.options

# The documentation site, in site/: open site/index.html, or `python -m http.server -d site` for its search.
docs: env
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

benchmark: env
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[benchmark,fast]'
	$(BIN)/python -m benchmarks.run

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .coverage
