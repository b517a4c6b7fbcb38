# One command per habit. Each target sets up what it needs on first use; nothing outside this folder is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUNNABLE := $(VENV)/.installed-to-run
SOURCES := pyproject.toml setup.py $(wildcard native/*.cpp native/*.h)
JOBS ?= 2

.PHONY: run example docs venv adapters versions test test-fast dist browser host-tools lint mutants native-sanitize soak bench bench-full bench-packages clean

# `make` alone does the main job: train the demo with staging on.
run: $(RUNNABLE)
	$(BIN)/shmstage run --pipeline-step-boundary --stage-next-microbatch

# a whole loop of reinforcement learning: rollout workers, verifier, training, from a mean reward under 0.3 to 0.9
example: $(RUNNABLE)
	$(BIN)/python examples/grpo_arithmetic/train.py

# the documentation, in build/site: a broken link or a page that nothing leads to makes it fail, and so does any block of code
# in it that does not do what it says
docs: venv
	$(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest -n 0 tests/test_docs.py tests/ecosystem/test_docs_blocks.py tests/ecosystem/test_docs_site.py

venv: $(STAMP)

$(STAMP): $(SOURCES)
	$(call install,train$(COMMA)dev$(COMMA)docs)
	touch $(RUNNABLE) $@

# what `run` and `example` need is little of that
$(RUNNABLE): $(SOURCES)
	$(call install,train$(COMMA)examples)
	touch $@

COMMA := ,
define install
	@echo "installing shmstage[$(1)] into $(VENV), with its C++ core: some minutes, quiet meanwhile"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet --editable '.[$(1)]'
endef

# environments for tests/ecosystem, made once: the packages that the adapters are for, and the other Pythons that the package
# is for with the newest JAX; where those Pythons are not on this machine their tests are skipped
adapters: venv
	$(BIN)/python tests/ecosystem/adapters_venv.py

versions: venv
	$(BIN)/python tests/ecosystem/version_venvs.py

# sdist, and wheels for the Pythons of this machine, in dist/; cibuildwheel makes those that may be published
dist: venv
	$(BIN)/python tests/ecosystem/distributions.py

test: venv adapters versions
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test-fast: venv
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m 'not slow'

# Chromium, for the tests of the report page and the trace; as root, from the distribution (else they are skipped)
browser:
	command -v chromium >/dev/null || for try in 1 2 3; do \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null && break; \
	done
	command -v chromium >/dev/null

# ip and tc, for the tests with hosts as namespaces; as root (else they are skipped)
host-tools:
	command -v ip >/dev/null && command -v tc >/dev/null || for try in 1 2 3; do \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends iproute2 util-linux >/dev/null && break; \
	done
	command -v ip >/dev/null && command -v tc >/dev/null

lint: venv
	$(BIN)/ruff check shmstage tests bench examples docs native setup.py
	$(BIN)/mypy

# deliberate faults in a copy of the sources; every one must be noticed by the tests it names
mutants: venv
	$(BIN)/python tests/mutants/run.py --jobs $(JOBS)

# the native core under the address, undefined-behaviour and thread sanitizers: clean, and seeded faults reported.
# Needs a C++17 compiler only.
native-sanitize:
	$(PYTHON) native/sanitize/run.py

# a long run of hand-offs between two processes: nothing may grow
soak: venv
	$(BIN)/python bench/soak.py --handoffs 200000

# side by side in one run, with figures, verdicts and plots in bench/results; see bench/README.md. A missed target is told
# at the end, a script that fails for anything else makes it fail. `make bench` takes ten minutes, `bench-full` hours.
bench: bench-packages
	$(BIN)/python bench/run.py quick

bench-full: bench-packages
	$(BIN)/python bench/run.py full

bench-packages: venv
	$(BIN)/python -m pip install --quiet --editable '.[bench]'

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info shmstage/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis runs
