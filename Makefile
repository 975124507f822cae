# make up      set up, then run everything; Ctrl-C ends it
# make test    set up, then lint, types, import contracts and all tests
# make test-unit  the unit tests that take milliseconds each
# make long    what of the tests takes long, such as a kill at every border of a recovery's stages
# make setup   .venv with `recourse` in it, the jars, and what makes Java start fast; quick when nothing changed
# make check   the checks without the tests, and the size of the code
# make format  rewrite the files as the checks want them
# make lock    a maintainer's: resolve the packages anew
# make clean   remove .venv and caches; the home folder .recourse stays
#
# Needs Python 3.11, 3.12 or 3.13 and make. Another interpreter: make setup PYTHON=/path/to/python3.13
# Java is one of the packages; JAVA_HOME, if it is set, names another one (17, 21 or 25).

.DEFAULT_GOAL := setup
.PHONY: setup up test test-unit check format tests long lock clean again

BIN := .venv/bin
STAMP := .venv/.set-up
UV := $(BIN)/uv --quiet pip install --python $(BIN)/python --compile-bytecode
RIGHT_PYTHON := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
MINOR := import sys; print("%d.%d" % sys.version_info[:2])

# The first of these that runs and is of a right version; empty if there is none.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3 python; do \
	if $$name -c '$(RIGHT_PYTHON)' 2>/dev/null; then command -v $$name; break; fi; done)

setup: $(STAMP)
	@test '$(origin PYTHON)' != 'command line' || test "$$($(PYTHON) -c '$(MINOR)')" = "$$($(BIN)/python -c '$(MINOR)')" || { \
		echo ".venv has Python $$($(BIN)/python -c '$(MINOR)'), not $(PYTHON). To make it anew: make clean" >&2; exit 1; }
	@$(BIN)/python -m streaming_jobs.platform.jars fetch
	@$(BIN)/python -m streaming_jobs.warm_up

up: setup
	@$(BIN)/recourse up

test: setup
	@$(EACH); $(CHECKS); $(TESTS); $(VERDICT)

check: setup
	@$(EACH); $(CHECKS); $(BIN)/python docs/weight.py; $(VERDICT)

# Imports are sorted by the linter, so it comes first.
format: setup
	$(BIN)/ruff check --fix-only --select I .
	$(BIN)/ruff format .

tests: setup
	@$(EACH); $(TESTS); $(VERDICT)

test-unit: setup
	@$(EACH); each unit $(BIN)/pytest tests/unit -m "not slow and not long" --numprocesses auto; $(VERDICT)

# A red kind does not hide those after it: each runs, and the last line names what was red.
EACH := red=; each() { name=$$1; shift; echo "$$*"; "$$@" || red="$$red $$name"; }
VERDICT := test -z "$$red" || { echo "red:$$red" >&2; exit 1; }

CHECKS := each format $(BIN)/ruff format --check .; each lint $(BIN)/ruff check .; each types $(BIN)/mypy; \
	each imports $(BIN)/lint-imports; each dependencies $(BIN)/deptry .

# Each kind has processes of its own, since they share nothing. Spark's tests keep two cores busy. With the broker and Dagster
# three processes do not (they wait for other processes in between, and take 2 GB each), so the unit tests run beside them, at
# low priority; what these print comes last. A file's tests stay in one process, the longest files first
# (tests/longest_first.txt; xdist by itself begins with the files of the most tests). A kind is named by its folder: by its
# mark, each process would import the tests of all kinds first, which takes 20 s.
BY_FILE := --dist loadfile --no-loadscope-reorder
TESTS := each spark $(BIN)/pytest tests/spark -m "not long" --numprocesses 2 --dist worksteal; \
	printed=$$(mktemp); nice $(BIN)/pytest tests/unit -m "not long" --numprocesses 2 --dist worksteal > $$printed 2>&1 & unit=$$!; \
	each broker $(BIN)/pytest tests/broker -m "not long" --numprocesses 3 $(BY_FILE); \
	each dagster $(BIN)/pytest tests/dagster -m "not long" --numprocesses 3 $(BY_FILE); \
	wait $$unit || red="$$red unit"; cat $$printed; rm $$printed

long: setup
	$(BIN)/pytest -m long

# Scripts in a .venv hold its path, so one that was moved, or lost its interpreter, is made again.
ifneq ($(shell $(BIN)/python -c 'print(open(".venv/.place").read())' 2>/dev/null),$(CURDIR))
$(STAMP): again
endif

$(STAMP): pyproject.toml requirements.lock requirements-dev.lock
	@python='$(PYTHON)'; fail() { echo "$$1" >&2; exit 1; }; \
	test -n "$$python" || fail 'No Python 3.11, 3.12 or 3.13 was found. Install one, or name it: make setup PYTHON=/path/to/python3.11'; \
	"$$python" -c '$(RIGHT_PYTHON)' || fail "$$python is not Python 3.11, 3.12 or 3.13. Name another: make setup PYTHON=/path/to/python3.11"; \
	"$$python" -c 'import venv, ensurepip' || fail "$$python lacks the module venv or ensurepip (Debian: apt install python3-venv)."; \
	test "$$($(BIN)/python -c 'print(open(".venv/.place").read())' 2>/dev/null)" = '$(CURDIR)' || { \
		echo "making .venv with $$python"; rm -rf .venv; \
		"$$python" -m venv .venv && printf %s '$(CURDIR)' > .venv/.place; }
	@echo 'installing the packages that the locks name; the first time takes a few minutes'
	@sed -n '/^uv==/,/[^\\]$$/p' requirements-dev.lock > .venv/uv.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r .venv/uv.lock
	@$(UV) --require-hashes -r requirements.lock -r requirements-dev.lock
	@$(UV) --no-deps --no-build-isolation --editable .
	@touch $(STAMP)

# requirements.lock is what production installs; the other one has what develops and tests, in versions that fit it.
COMPILE := $(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes --upgrade \
	--no-emit-index-url --no-emit-find-links --no-header --quiet
lock: setup
	$(COMPILE) pyproject.toml --all-extras --output-file requirements.lock
	$(COMPILE) --group dev --constraints requirements.lock --output-file requirements-dev.lock

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist
	find streaming_jobs reprocessing quality orchestration tests -name __pycache__ -type d -prune -exec rm -rf {} +
