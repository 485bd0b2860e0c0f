# Two commands: `make demo` and `make test`. Both make the virtual environment first if it is not there.
PYTHON ?= python3
TORCH := 2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
READY := $(VENV)/.ready

.PHONY: demo test lint browser clean

# Without an NVIDIA driver, Linux takes the CPU build by name: the plain one would bring gigabytes of CUDA packages.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("dessilbi needs Python 3.11 or newer: make PYTHON=...")'
	@test -x $(BIN)/python || { echo "making $(VENV) (once; takes a minute or two)"; $(PYTHON) -m venv $(VENV); }
	@if [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null 2>&1; then \
	    $(PIP) install --no-deps --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu 'torch==$(TORCH)+cpu'; \
	else $(PIP) install 'torch==$(TORCH)'; fi
	@$(BIN)/python -m pip freeze | grep '^torch==' > $(VENV)/constraints.txt
	@$(PIP) install -c $(VENV)/constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)
	@$(BIN)/python examples/digits.py

test: $(READY) lint browser
	$(BIN)/python -m pytest -n 2

# The page of a run is tested in a real browser, Debian's chromium. Where it is not there and cannot be installed without
# asking for a password, nothing fails: the tests that need it are skipped and say why.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || ! command -v apt-get >/dev/null || { \
	    echo "installing chromium for the tests of the report (once; takes a minute or two)"; \
	    as=$$([ "$$(id -u)" = 0 ] || echo "sudo -n"); \
	    { timeout 120 $$as apt-get -qq update; timeout 300 $$as env DEBIAN_FRONTEND=noninteractive \
	        apt-get -qq -y --no-install-recommends install chromium; } </dev/null >/dev/null 2>&1 \
	    || echo "chromium could not be installed: the tests in a browser are skipped"; }

lint: $(READY)
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist
