# Two commands do everything on a fresh machine: `make tune` and `make test`.
#
# PYTHON  the interpreter that makes the virtual environment.
# VENV    where that environment lies. Empty: none is made and $(PYTHON) is used as it is, for a GPU host
#         without a network: make bench VENV= PYTHON=python3.12
PYTHON ?= python3
VENV ?= .venv

# What `make tune` passes on; unset, the command line's own defaults hold.
ARCH ?=
KERNEL ?=
PROBLEM ?=
LIMIT ?=
REQUIRE ?=
# How long `make fuzz` takes, all readers together.
SECONDS ?= 60
# A library that the tests of recording record: never installed in the environment.
TILEGYM ?= 1.5.1
# The environment of `make test-ray`.
RAY_VENV ?= .venv-ray
# The extras that `make venv` installs.
EXTRAS ?= dev
# Further arguments of whatever the target runs.
ARGS ?=

RUN = $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
TUNE = $(if $(ARCH),--arch $(ARCH)) $(KERNEL) $(if $(PROBLEM),--problem '$(PROBLEM)') \
       $(if $(LIMIT),--limit $(LIMIT)) $(if $(REQUIRE),--require $(REQUIRE))

.DEFAULT_GOAL := help
.PHONY: help tune cubins test test-fast test-slow test-gpu test-ray faults fuzz check check-archs bench lint fmt wheel clean venv third-party flashinfer third-party-all

help: ## print this
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20
	@echo
	@echo '  PYTHON=$(PYTHON)  makes the environment VENV=$(VENV); VENV= (empty) uses PYTHON as it is'
	@echo '  ARGS=...  is passed on, e.g. make test ARGS="-k bucket"'

tune: venv ## tune for ARCH (default: this GPU, else sm100, and a first look without one); KERNEL= PROBLEM= LIMIT= REQUIRE=measured
	$(RUN) -m aot_tune tune $(strip $(TUNE) $(ARGS))

cubins: venv ## compile what the tables need for ARCH="sm90 sm100" into tuned_configs/<arch>/cubins.aot; KERNEL=
	$(RUN) -m aot_tune compile $(strip $(foreach arch,$(ARCH),--arch $(arch)) $(foreach kernel,$(KERNEL),--kernel $(kernel)) $(ARGS))

# The tests start hundreds of Pythons: modules are compiled once, also where the caller wants no bytecode written.
test test-fast test-slow: export PYTHONDONTWRITEBYTECODE =

test: venv third-party ## run the tests that need no GPU, but for test-slow's; under ten minutes on two cores
	$(RUN) -m pytest -n auto --dist worksteal $(ARGS)

test-fast: venv ## run those that start no process, no compiler and no emulator; under a minute on two cores
	$(RUN) -m pytest --fast -n auto --dist worksteal $(ARGS)

# pytest's exit code 5: it found nothing to run.
test-slow: venv third-party flashinfer ## run the long proofs, which `make test` leaves out
	@$(RUN) -m pytest -m 'slow and not gpu' -n auto --dist worksteal $(ARGS); code=$$?; \
	if [ $$code -eq 5 ]; then echo 'test-slow: no test of these is marked slow: nothing to prove'; else exit $$code; fi

third-party-all: venv third-party flashinfer ## record, compile and replay every site of TileGym and FlashInfer
	FLASHINFER_SITES=all $(RUN) -m pytest -m 'not gpu' -n auto --dist worksteal \
	  tests/replay/record/test_tilegym.py tests/replay/record/test_flashinfer.py $(ARGS)

test-gpu: venv ## run the tests that need a GPU
	$(RUN) -m pytest -m gpu $(ARGS)

test-ray: ## run the tests that start a Ray cluster of three nodes on this machine, in an environment of their own
ifneq ($(VENV),)
	@$(MAKE) --no-print-directory venv VENV='$(RAY_VENV)' EXTRAS=dev,ray
endif
	$(if $(VENV),$(RAY_VENV)/bin/python,$(PYTHON)) -m pytest -m ray tests/tuner/ray $(ARGS)

faults: venv ## do every fault of the READMEs' tables: injected, lost, wrong, hung; ARGS="--row A8 --full"
	@$(RUN) -m tests.faults $(ARGS)

fuzz: venv ## give every reader damaged bytes for SECONDS=60, with atheris where the extra `fuzz` is installed; ARGS="--runs 1000000"
	$(RUN) -m tests.fuzz --seconds $(SECONDS) $(ARGS)

check: venv ## check the committed tables against the kernels, as a pull request does
	$(RUN) -m aot_tune check $(ARGS)

check-archs: venv ## compile every default and portfolio for sm80 sm89 sm100 sm103 sm120; ARGS="--arch sm100 --kernel matmul"
	$(RUN) -m tests.check_archs $(ARGS)

bench: venv ## measure what the README states, on a GPU host
	$(RUN) -m aot_tune bench $(ARGS)

lint: venv ## ruff and mypy
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

fmt: venv ## format, and mend what ruff can mend
	$(RUN) -m ruff check --fix-only .
	$(RUN) -m ruff format .

wheel: venv $(if $(ARCH),cubins) ## build dist/*.whl with the tables in it; ARCH="sm90 sm100": with their cubins
	rm -rf dist
	$(RUN) -m aot_tune check --archives --module aot_tune.kernels
	$(RUN) -m pip wheel -q --no-deps --no-build-isolation -w dist .
	$(RUN) -m twine check --strict dist/*.whl
	@$(RUN) -m zipfile -l dist/*.whl | grep 'aot_tune/tuned_configs/.*\.json' \
	  || { echo 'wheel: no tables in dist/*.whl; expected tuned_configs/<arch>/<kernel>.json beside aot_tune/' >&2; exit 1; }
	@for arch in $(ARCH); do $(RUN) -m zipfile -l dist/*.whl | grep "aot_tune/tuned_configs/$$arch/cubins.aot" \
	  || { echo "wheel: no cubins for $$arch in dist/*.whl" >&2; exit 1; }; done

clean: ## remove build/ (unfinished sweeps too), dist/, cubins and caches; the environment stays
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find tuned_configs -name cubins.aot -type f -delete
	find aot_tune tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Without what it depends on, in a folder of its own. Where it cannot be had its tests are skipped, and say why.
THIRD_PARTY = build/third-party
third-party: venv
	@[ -d '$(THIRD_PARTY)/tilegym/tilegym-$(TILEGYM).dist-info' ] || { \
	  rm -rf '$(THIRD_PARTY)/tilegym' '$(THIRD_PARTY)/unfinished'; \
	  $(RUN) -m pip install -q --no-deps --no-compile --only-binary=:all: --retries 1 --target '$(THIRD_PARTY)/unfinished' tilegym==$(TILEGYM) && \
	  mv '$(THIRD_PARTY)/unfinished' '$(THIRD_PARTY)/tilegym'; } || \
	  echo 'third-party: tilegym $(TILEGYM) cannot be had here: the tests that record or declare it are skipped' >&2

# FlashInfer's cuTile code without the rest of its wheel of 62 MB, for `make test-slow` and for recording on a GPU host.
flashinfer: venv
	@$(RUN) -m aot_tune.bench.libraries --fetch || \
	  echo 'flashinfer: it cannot be had here: the tests that record it are skipped' >&2

# The environment carries a stamp of all that it was made from: both files, the interpreter and the place, since its
# scripts hold absolute paths. The stamp is written last, so an interrupted one is made anew. Only a folder that is
# ours is ever removed: the default one, or one with the mark that is written first.
define STAMP
import hashlib, os, sys
made_from = b"".join(open(name, "rb").read() for name in ("pyproject.toml", ".constraints.txt"))
print(sys.version.split()[0], sys.base_prefix, os.getcwd(), hashlib.sha256(made_from).hexdigest())
endef
export STAMP

venv:
ifneq ($(VENV),)
	@want=$$($(PYTHON) -c "$$STAMP") || exit 1; \
	[ "$$want" != "$$(cat '$(VENV)/made-from' 2>/dev/null)" ] || exit 0; \
	if [ -e '$(VENV)' ] && [ '$(VENV)' != .venv ] && [ ! -e '$(VENV)/made-by-aot-tune' ]; then \
	  echo 'make: $(VENV) exists and was not made here; remove it, or name another folder: VENV=...' >&2; exit 1; fi; \
	base=$$($(PYTHON) -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))') || exit 1; \
	echo "making $(VENV): $$want" >&2; \
	rm -rf '$(VENV)' && mkdir -p '$(VENV)' && touch '$(VENV)/made-by-aot-tune' && \
	"$$base" -m venv '$(VENV)' && \
	'$(VENV)/bin/python' -m pip install -q -c .constraints.txt hatchling && \
	'$(VENV)/bin/python' -m pip install -q -c .constraints.txt --no-build-isolation -e '.[$(EXTRAS)]' && \
	echo "$$want" > '$(VENV)/made-from'
endif
