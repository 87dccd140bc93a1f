# Commands for a checkout. Every target works on its own, on a fresh machine with make and Python 3.11 or newer.
PYTHON ?= python3
TORCH_INDEX ?=
PIP_ARGS ?=
HASHES ?=
TORCH ?=
WORKERS ?= 2
DESIGNS ?= preset:gqa-tiny preset:local_global-tiny preset:gated_delta-tiny
BUDGET ?= --tokens 40000 --batch-size 4 --sequence-length 128 --recall mqar --speed-context-length 2048
ALL_DESIGNS := $(patsubst %,preset:%-tiny,mha gqa mqa local_global mla linear gated_delta hybrid)
COMPARE_ARGS ?=
BENCH_ARGS ?=
SEARCH_ARGS ?=
SOAK_SECONDS ?= 600
PYTEST_ARGS ?=
QUICK := tests/test_*.py tests/laws/test_laws.py tests/parts

OUT := runs/compare
RUN := .venv/bin/python

export PYTHON TORCH_INDEX PIP_ARGS HASHES TORCH
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help compare compare-all ablation test test-browser quick nightly soak clients bench evidence search-gemma docs package lock clean core dev

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20
	@echo
	@echo "  PYTHON=python3.12   the interpreter            TORCH_INDEX=URL   an extra package index, for torch only"
	@echo "  WORKERS=4           test processes             PIP_ARGS='...'    options of every pip call"
	@echo "  DESIGNS='...'       what compare compares      COMPARE_ARGS='...', PYTEST_ARGS='...'"
	@echo "  TORCH=newest        another version of torch than that of constraints.txt: newest, or 2.14.1"
	@echo "  HASHES=1            install the files of hashes.txt, checked by SHA-256, into a new .venv"

compare: core ## train three small designs on the same text and open the report: about 3 minutes on 2 cores
	@open=; if [ -z "$${CI:-}" ] && [ "$$(uname)" = Darwin -o -n "$${DISPLAY:-}$${WAYLAND_DISPLAY:-}" ]; then open=--open; fi; \
	$(RUN) -m heddle compare $(DESIGNS) --data stdlib --out $(OUT) $(BUDGET) $$open $(COMPARE_ARGS)

compare-all: ## the same with eight designs, one per kind of mixer: about 15 minutes on 2 cores
	@$(MAKE) --no-print-directory compare DESIGNS='$(ALL_DESIGNS)' BUDGET= OUT=runs/compare-all

ablation: ## train six variants of one small design, and show the effect of each of two varied fields
	@$(MAKE) --no-print-directory compare BUDGET= OUT=runs/ablation \
	  DESIGNS='preset:gqa-tiny --vary residual.kind=pre_norm,parallel --vary "layers.*.mixer.kv_heads=1,2,4"'

test: dev ## check style and types, and run the tests
	@failed=; types=$$(mktemp); \
	check() { echo "heddle: $$*"; $(RUN) -m "$$@" || failed="$$failed $$1"; }; \
	$(RUN) -m mypy >"$$types" 2>&1 & mypy=$$!; \
	trap 'kill $$mypy 2>/dev/null; rm -f "$$types"' EXIT; \
	check ruff check .; \
	check ruff format --check .; \
	check pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS); \
	echo "heddle: mypy"; wait $$mypy || failed="$$failed mypy"; cat "$$types"; \
	if [ -n "$$failed" ]; then echo "heddle: failed:$$failed" >&2; exit 1; fi; \
	echo "heddle: style, types and tests pass"

test-browser: dev ## open every kind of page in chromium: no error, no request, phone, dark, keyboard, 400 choices
	@$(RUN) -m pytest -q tests/browser/check_pages.py tests/browser/check_live_pages.py

quick: dev ## what one runs many times a day: style, types, house rules, parts, every law on a few cases
	@$(MAKE) --no-print-directory test PYTEST_ARGS='$(QUICK) $(PYTEST_ARGS)'

nightly: dev ## repetition of what `make test` checks once: random designs, long products, many kills
	@$(RUN) -m pytest -m nightly -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

soak: dev ## run only the long tests (HEDDLE_SOAK_DESIGNS=2000: more random designs)
	@$(RUN) -m pytest -m soak -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)
	@$(RUN) tools/soak.py --seconds $(SOAK_SECONDS)

clients: dev ## run other programs on heddle's folders, each in an environment of its own (needs a package index)
	@$(RUN) -m pytest -s -m soak tests/clients $(PYTEST_ARGS)

bench: dev ## speed against peers and limits: about 40 minutes (BENCH_ARGS=--all: every benchmark); continues where it stopped
	@$(RUN) -m benchmarks.run_all $(BENCH_ARGS)

evidence: core ## run every row of docs/evidence.md: about an hour of one core; continues where it stopped
	@$(RUN) -m evidence --workers $(WORKERS)

search-gemma: core ## search Gemma 3 270M, from PyPI, at half its state: hours; SEARCH_ARGS=--dry-run says how long; continues
	@$(RUN) -m evidence.search_gemma $(SEARCH_ARGS)

docs: ## build the documentation as a site with Sphinx, offline, in two minutes of CPU: build/docs/index.html
	@sh tools/install.sh docs
	@echo "heddle: writing four hundred pages into build/docs, in about two minutes of CPU"
	@$(RUN) -m tools.site build/docs

package: dev ## build the sdist and the wheel into dist/, offline, and try the wheel from an empty folder
	@$(RUN) tools/package.py

lock: ## write hashes.txt for the pins of constraints.txt, with uv; a pin that has not changed loses no hash
	@uv pip compile -q constraints.txt --no-deps --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --no-emit-index-url --custom-compile-command "make lock" -o hashes.txt

clean: ## remove .venv, caches and build outputs, but not runs/
	@rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	@find src tests benchmarks evidence -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

core dev:
	@sh tools/install.sh $@
