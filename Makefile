# Everything runs in .venv, which the first target that needs it sets up with pip alone; the tests against other
# training frameworks run in .venv-stacks, which holds these.
PYTHON ?= python3
BIN := .venv/bin
RUNTIME := packages/dcil-runtime
# The networks of the tests are tiny: a process per core is faster than two threads in one.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

.PHONY: demo test test-all test-stacks test-ray torture lint native sanitize emulate dist bench clean docs docs-test chromium

.venv/ready: pyproject.toml $(RUNTIME)/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable $(RUNTIME) --editable '.[dev]'
	touch $@

.venv-stacks/ready: pyproject.toml constraints.txt constraints-stacks.txt
	$(PYTHON) -m venv .venv-stacks
	.venv-stacks/bin/python -m pip install --quiet --constraint constraints.txt --constraint constraints-stacks.txt \
		--editable '.[data,report,transformers,accelerate,peft,lightning,vision,tensorboard,search]' wandb mlflow-skinny pytest pytest-xdist
	touch $@

demo: .venv/ready
	rm -rf demo
	OMP_NUM_THREADS=1 $(BIN)/dcil train --recipe digits --method dense,dpf,dcil --sparsity 0.95 --out demo
	$(BIN)/dcil export demo/dcil --to safetensors --out demo/pnet.safetensors
	@echo
	@echo "The report is demo/report.html: open it in a browser."
	@echo "The pruned net is demo/pnet.safetensors: a plain state dict of its own model, zeros in place."
	@echo "Next: .venv/bin/dcil list, then try .venv/bin/dcil train --help, or read README.md from 'Five lines'."

lint: .venv/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: lint
	$(PYTEST) -m "not slow"

test-all: lint sanitize
	$(PYTEST) --cov
	$(MAKE) torture

# Kills, failing disks, damaged files, wrong input, and mutants of the core; the figures are in build/torture.json.
# DCIL_TORTURE_SEED=N chooses other cases, DCIL_TORTURE_FACTOR=N as many times more of them.
torture: .venv/ready
	$(BIN)/python tests/torture

# Lightning, transformers and the other frameworks, the real packages: tests/stacks.
test-stacks: .venv-stacks/ready
	OMP_NUM_THREADS=1 .venv-stacks/bin/python -m pytest -n 2 tests/stacks

# Grids on a Ray cluster of two nodes, of which one is lost: a part of the above.
test-ray: .venv-stacks/ready
	OMP_NUM_THREADS=1 .venv-stacks/bin/python -m pytest tests/stacks/test_ray.py

# The CPU runtime: rebuilt after an edit of $(RUNTIME)/native, and run under the sanitizers.
native: .venv/ready
	$(BIN)/python $(RUNTIME)/native/build.py

sanitize: .venv/ready
	$(BIN)/python $(RUNTIME)/native/sanitize.py

# The ARM kernels under qemu, on processors with and without dot products of bytes.
# Debian: apt install g++-aarch64-linux-gnu qemu-user
emulate: .venv/ready
	CXX=aarch64-linux-gnu-g++ $(BIN)/python $(RUNTIME)/native/emulate.py

# Two wheels and two source distributions, each wheel built from its source distribution; that of the runtime is for this
# machine's processor, or with CXX=aarch64-linux-gnu-g++ for ARM, and has a manylinux tag.
dist: .venv/ready
	rm -rf dist
	$(BIN)/python $(RUNTIME)/native/wheels.py dist
	$(BIN)/python -m build --no-isolation --outdir dist .

bench: .venv/ready
	$(BIN)/dcil bench step

clean:
	rm -rf .venv .venv-stacks .venv-docs build demo dist docs/auto_gallery

# The site: build/docs/index.html. Its environment is its own; nothing is loaded from the network when it is read.
.venv-docs/ready: pyproject.toml $(RUNTIME)/pyproject.toml constraints.txt constraints-docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --constraint constraints.txt --constraint constraints-docs.txt \
		--editable $(RUNTIME) --editable '.[docs]'
	touch $@

docs: .venv-docs/ready
	rm -rf build/docs build/doctrees docs/auto_gallery
	OMP_NUM_THREADS=1 .venv-docs/bin/python -m sphinx -W --keep-going -q -d build/doctrees docs build/docs
	@echo "The site is build/docs/index.html."

# The site in a real browser: links, search, console, copied code, screenshots in build/screenshots.
docs-test: docs chromium
	.venv-docs/bin/python -m pytest tests/docs

chromium:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -q && apt-get install -y -q chromium; } || \
		{ echo "docs-test needs Chromium: sudo apt-get install -y chromium"; exit 1; }

test-all: docs-test test-ray
