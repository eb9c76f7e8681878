# Everything runs from a fresh clone: each target makes the virtual environment that it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
# For what takes minutes: says what pip is doing.
PROGRESS := $(PYTHON) deploy/pip_progress.py
READY := $(VENV)/.ready
PROTO_VENV := .venv-proto
PROTO_BIN := $(PROTO_VENV)/bin
PROTO_READY := $(PROTO_VENV)/.ready
AUDIT_VENV := .venv-audit
AUDIT_BIN := $(AUDIT_VENV)/bin
AUDIT_READY := $(AUDIT_VENV)/.ready
# What users get: rdzv and what it needs, without what is for its development.
RUNTIME := build/runtime
PROTOS := proto/rdzv/v1/rdzv.proto
# Messages alone: their services are etcd's, and are called by path.
MESSAGES := proto/rdzv/etcd/etcd.proto

# A Python that may not keep its byte code compiles all sources anew in each of the many programs that
# the tests start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help:  ## show what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 18

.PHONY: setup
setup: $(READY)  ## make .venv and install everything into it

# torch is pinned in pyproject.toml, so that pip takes a build of known size.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "rdzv needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): torch among others, 1.7 GB, one to four minutes"
	@$(PROGRESS) $(PIP) install --progress-bar off --editable '.[dev]'
	@touch $@

.PHONY: demo
demo: $(READY)  ## a real training that survives what happens to it; KEEP=1: and the page of it, to look at
	@$(BIN)/rdzvctl demo $(if $(KEEP),--keep)

.PHONY: picture
picture: $(READY)  ## docs/img: the demo, as a real Prometheus has scraped it; and the page of a job
	@$(BIN)/python bench/dashboard.py
	@$(BIN)/python bench/page.py

# How many tests there are is known only once the last file is collected, so no percentages are shown.
FORKED := -p no:xdist -p tests.support.forked -o console_output_style=classic

.PHONY: test
# Four processes: two cores are busy then, though half of the time each test only waits.
test: check  ## the tests; STRICT=1: a skip is a failure
	@$(BIN)/python -m pytest tests -q $(FORKED) --forks 4 --durations=5 \
	  -m 'not campaign and not clusters and not frameworks and not release and not current_torch'

# An environment in which all that is installed in ours can be imported as well.
define environment-beside
	@rm -rf $(1) && $(BIN)/python -m venv $(1)
	@$(BIN)/python -c 'import sysconfig as s; print("import site; site.addsitedir(%r)" % s.get_path("purelib"))' \
	  >"$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
endef

# The frameworks and submitit, with what they bring, in an environment of their own beside ours.
FRAMEWORKS := build/frameworks

$(FRAMEWORKS)/.ready: $(READY)
	$(call environment-beside,$(FRAMEWORKS))
	@$(PROGRESS) $(FRAMEWORKS)/bin/python -m pip --disable-pip-version-check install --progress-bar off \
	  accelerate==1.15.0 transformers==5.23.0 lightning==2.6.6 submitit==1.5.4
	@touch $@

# The torch that `pip install torch` gives, in an environment of its own: gigabytes, with CUDA.
TORCH_CURRENT ?= 2.14.1
CURRENT := build/torch-$(TORCH_CURRENT)
CURRENT_TESTS := tests/conformance/test_conformance.py tests/unit/worker tests/unit/agent/test_worker_hook.py \
  $(patsubst %,tests/integration/test_%.py,torchrun_plugin torchrun_handler torchrun_launches warm warm_restarts \
  warm_store_host kept_workers kept_processes kept_shards kept_shards_in_process kept_shards_processes any_size parking \
  hangs hangs_of_torch reconfigured resumed_from_memory copied_snapshots snapshot_slots)

$(CURRENT)/.ready: $(READY)
	$(call environment-beside,$(CURRENT))
	@ln -s ../../../$(BIN)/py-spy $(CURRENT)/bin/py-spy
	@$(PROGRESS) $(CURRENT)/bin/python -m pip --disable-pip-version-check install --progress-bar off \
	  torch==$(TORCH_CURRENT) --editable .
	@touch $@

.PHONY: torch-current
torch-current: $(CURRENT)/.ready  ## what depends on torch, with the newest: conformance, plug-in, warm, kept, hangs, snapshots
	@$(CURRENT)/bin/python -m pytest $(CURRENT_TESTS) -q $(FORKED) --forks 4 --durations=5 \
	  -m 'not campaign and not clusters and not frameworks and not release'

.PHONY: clusters
clusters: $(FRAMEWORKS)/.ready  ## Slurm, the manifests for Kubernetes, the Debian package on a booted machine; root
	@timeout 30m $(BIN)/python -m pytest tests -q -n 2 --dist loadfile --durations=5 -m clusters \
	  || { [ $$? = 124 ] && echo "clusters: not done within 30 minutes"; exit 1; }

.PHONY: frameworks
frameworks: $(FRAMEWORKS)/.ready  ## Accelerate, Trainer and Lightning on two nodes; 30 minutes at most
	@timeout 30m $(BIN)/python -m pytest tests -q -n 2 --dist load --durations=5 -m frameworks \
	  || { [ $$? = 124 ] && echo "frameworks: not done within 30 minutes"; exit 1; }

.PHONY: campaigns
campaigns: $(READY)  ## tests that do the same many times over: restarts, kills, fail-overs
	@$(BIN)/python -m pytest tests -q --durations=5 -m campaign

.PHONY: ci
ci: test torch-current clusters frameworks campaigns dist-test  ## all six

.PHONY: unit
# Tests that start programs, serve gRPC or HTTP, import torch, or take more than some milliseconds otherwise
# are marked slow, and run in `make test` only; in a file that is slow as a whole a few are marked quick.
# Those of hypothesis are slow; its plugin would search all modules for constants.
unit: $(READY)  ## the quick tests
	@$(if $(wildcard /dev/shm/.),TMPDIR=/dev/shm) $(BIN)/python -m pytest tests/unit tests/scenarios \
	  tests/stores -q -p no:hypothesispytest $(FORKED) --forks 3 \
	  -m 'quick or not slow' -o tmp_path_retention_count=1

SEEDS ?= 10000

.PHONY: sim
sim: $(READY)  ## random histories of everything that can go wrong; SEEDS=N or FIRST:LAST
	@$(BIN)/python -m tests.sim --seeds $(SEEDS) --coverage

.PHONY: sim-mutants
sim-mutants: $(READY)  ## planted bugs: the simulator must catch every one of them
	@$(BIN)/python -m tests.sim.mutants

N ?= 400

# SEED=7 repeats a draw; an interrupted run of the same tree continues. ONLY=core,ledger: in files of such
# names; QUICK=1: judged by `make unit` alone.
.PHONY: mutants
mutants: $(READY)  ## N random changes to the code: the tests must catch nine of ten; SEED=N repeats
	@$(BIN)/python -m tests.mutants -n $(N) $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY)) \
	  $(if $(QUICK),--quick)

.PHONY: conformance-warm
conformance-warm: $(READY)  ## the conformance table with workers forked from a zygote
	@CONFORMANCE_WARM=1 $(BIN)/python -m pytest tests/conformance/test_conformance_warm.py -q

.PHONY: conformance-record
conformance-record: $(READY) $(CURRENT)/.ready  ## what torchrun shows for each case of that table, written anew; then review it
	@for bin in $(BIN) $(CURRENT)/bin; do \
	  $$bin/python -m pytest tests/conformance/test_conformance.py -q -m campaign -k recorded --rewrite || exit 1; done

.PHONY: integration
integration: $(READY)  ## real processes, real gRPC, kill -9
	@$(BIN)/python -m pytest tests/integration -q --durations=10

DOCS_READY := $(VENV)/.docs-ready

$(DOCS_READY): pyproject.toml $(READY)
	@$(PIP) install --quiet --editable '.[docs]'
	@touch $@

.PHONY: docs
docs: $(DOCS_READY)  ## the documents as a site, in build/site; a dead link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.PHONY: check
check: $(READY) proto-check  ## ruff, mypy --strict, generated code is current
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

.PHONY: dist
dist: $(READY)  ## a release, into dist/: wheels, sdist, Debian package, component list, notes, checksums
	@rm -rf dist
	@$(MAKE) --no-print-directory sbom
	@$(BIN)/python deploy/release.py dist

.PHONY: dist-test
dist-test: $(DOCS_READY) $(CURRENT)/.ready  ## that release, tried from its files alone, with both torches: install, demo, upgrade; minutes
	@$(BIN)/python -m pytest tests -q --durations=5 -m release
	@$(CURRENT)/bin/python -m pytest tests/integration/test_installed_release.py -q --durations=5 -m release \
	  -k 'walk or trains or survives'

# The versions of torch to try, each in an environment of its own, and the Python to try them with.
TORCH ?= 2.13.0
TORCH_PYTHON ?= $(PYTHON)

.PHONY: torch-versions
torch-versions: $(READY)  ## the demo, and workers that stay, with each of TORCH="2.13.0 2.14.1": gigabytes each
	@deploy/torch-versions $(TORCH_PYTHON) $(TORCH)

.PHONY: constraints
constraints: $(READY)  ## deploy/constraints.txt: the newest libraries that pyproject.toml permits
	@rm -rf build/newest && $(PYTHON) -m venv build/newest
	@$(BIN)/pip --disable-pip-version-check --python build/newest/bin/python install --quiet .[oidc]
	@sed -n '/^#/p' deploy/constraints.txt >build/constraints.txt
	@$(BIN)/pip --disable-pip-version-check --python build/newest/bin/python freeze --exclude rdzv \
	  >>build/constraints.txt && mv build/constraints.txt deploy/constraints.txt

$(AUDIT_READY): Makefile
	@test -x $(AUDIT_BIN)/python || $(PYTHON) -m venv $(AUDIT_VENV)
	@$(AUDIT_BIN)/pip --disable-pip-version-check install --quiet \
	  cyclonedx-bom==7.5.0 pip-audit==2.10.1
	@touch $@

$(RUNTIME)/.ready: pyproject.toml deploy/constraints.txt
	@rm -rf $(RUNTIME) && $(PYTHON) -m venv $(RUNTIME)
	@$(RUNTIME)/bin/pip --disable-pip-version-check install --quiet --constraint deploy/constraints.txt .[oidc]
	@$(RUNTIME)/bin/pip --disable-pip-version-check uninstall --quiet --yes pip setuptools
	@touch $@

.PHONY: sbom
sbom: $(AUDIT_READY) $(RUNTIME)/.ready  ## dist/rdzv.cdx.json: all that rdzv is made of (CycloneDX), and docs/licences.md
	@mkdir -p dist
	@$(AUDIT_BIN)/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml \
	  --output-file dist/rdzv.cdx.json $(RUNTIME)/bin/python
	@$(PYTHON) deploy/licences.py dist/rdzv.cdx.json >dist/licences.md && mv dist/licences.md docs/licences.md
	@echo "dist/rdzv.cdx.json, docs/licences.md"

.PHONY: audit
audit: $(AUDIT_READY) $(RUNTIME)/.ready  ## known vulnerabilities of what rdzv needs; asks pypi.org
	@$(AUDIT_BIN)/pip-audit --strict --path $(RUNTIME)/lib/python3*/site-packages

.PHONY: weight
weight: $(READY)  ## lower the rows of ARCHITECTURE.md's table of weights to what is there
	@$(BIN)/python -m tests.support.weight

.PHONY: format
format: $(READY)  ## let ruff put the code in order
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# Code that a new protoc generates is refused by older protobuf runtimes, not the reverse; so the
# generator is old, pinned, and lives apart.
$(PROTO_READY): Makefile
	@test -x $(PROTO_BIN)/python || $(PYTHON) -m venv $(PROTO_VENV)
	@$(PROTO_BIN)/pip --disable-pip-version-check install --quiet \
	  grpcio-tools==1.71.2 mypy-protobuf==3.6.0 'setuptools<81'
	@touch $@

define generate
	@$(PROTO_BIN)/python -m grpc_tools.protoc -Iproto \
	  --plugin=protoc-gen-mypy=$(PROTO_BIN)/protoc-gen-mypy \
	  --plugin=protoc-gen-mypy_grpc=$(PROTO_BIN)/protoc-gen-mypy_grpc \
	  --python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) \
	  $(PROTOS)
	@$(PROTO_BIN)/python -m grpc_tools.protoc -Iproto \
	  --plugin=protoc-gen-mypy=$(PROTO_BIN)/protoc-gen-mypy \
	  --python_out=$(1) --mypy_out=quiet:$(1) \
	  $(MESSAGES)
endef

.PHONY: proto
proto: $(PROTO_READY)  ## generate the Python code of the protocol
	$(call generate,proto)

.PHONY: proto-check
proto-check: $(PROTO_READY)
	@rm -rf build/proto && mkdir -p build/proto
	$(call generate,build/proto)
	@diff -r -x '*.proto' -x __pycache__ build/proto/rdzv proto/rdzv \
	  || { echo "the generated code is not current; run: make proto"; exit 1; }

.PHONY: clean
clean:  ## remove everything that was made here
	rm -rf $(VENV) $(PROTO_VENV) $(AUDIT_VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

# SURFACES=rpc,bytes,tls,tokens,c10d,spec,text,config chooses; SEED=N repeats; docs/security.md has more.
.PHONY: fuzz
fuzz: $(READY)  ## hostile input to every surface, SECONDS=600 for each; what finds something is kept
	@GRPC_VERBOSITY=NONE $(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),60) $(if $(SURFACES),--surfaces $(SURFACES)) \
	  $(if $(SEED),--seed $(SEED))

# FAULTS=kill-server,cut-host TIMES=20 chooses; QUICK=1 takes a few minutes; docs/faults.md has more.
.PHONY: faults
faults: $(READY)  ## real faults on a real training: kills, stops, partitions, loss, full disks; root
	@$(BIN)/python -m tests.faults $(if $(FAULTS),--faults $(FAULTS)) \
	  $(if $(TIMES),--times $(TIMES)) $(if $(QUICK),--quick)

.PHONY: bench-store
bench-store: $(READY)  ## what a commit costs, beside torchrun's; QUICK=1: half a minute
	@$(BIN)/python bench/store.py $(if $(QUICK),--quick)
	@$(BIN)/python bench/commits.py $(if $(QUICK),--quick)

.PHONY: bench-store-ranks
bench-store-ranks: $(READY)  ## init_process_group of up to 10,000 ranks with the round's store, beside torch's; ten minutes
	@$(BIN)/python bench/store_ranks.py --out build/bench/store-ranks.jsonl

.PHONY: bench-takeover
bench-takeover: $(READY)  ## how long a job has no server when one dies; QUICK=1: three minutes
	@$(BIN)/python bench/takeover.py $(if $(QUICK),--quick)

# RUNS=1: each once, and fewer launchers: five minutes.
.PHONY: bench-recovery
bench-recovery: $(READY)  ## how long until a training goes on, beside torchrun; RUNS=1: five minutes
	@$(BIN)/python bench/recovery.py --out build/bench/recovery.jsonl $(if $(RUNS),--runs $(RUNS))

# Peers whose processes or checkpoints in memory stay as well, in an environment of their own, beside ours.
build/peers/.ready: $(READY)
	$(call environment-beside,build/peers)
	@build/peers/bin/python -m pip install -q torchft==0.2.0 nvidia-resiliency-ext==0.4.1 dlrover==0.6.1
	@touch $@

.PHONY: bench-kept
bench-kept: $(READY) build/peers/.ready  ## workers that stay: what they promise, and how soon, beside peers; a quarter of an hour
	@$(BIN)/python bench/recovery.py --out build/bench/kept-recovery.jsonl --nodes 3 --nproc 2 --cases worker \
	  --minutes 4 --launchers torchrun,torchrun-best,torchft,nvidia,rdzvrun,rdzvrun-warm,rdzvrun-kept
	@$(BIN)/python bench/sections.py --print build/bench/kept-recovery.jsonl
	@$(BIN)/python bench/kept.py --out build/bench/kept.jsonl

.PHONY: bench-snapshots
bench-snapshots: $(READY) build/peers/.ready  ## what snapshots cost, beside a peer, and that none is loaded torn or damaged; KILLS=100: some minutes, else an hour on a busy machine
	@$(BIN)/python bench/snapshots.py
	@$(BIN)/python bench/snapshot_dlrover.py
	@$(BIN)/python bench/snapshot_faults.py $(if $(KILLS),--kills $(KILLS) --copy-kills $(KILLS) --flips $(KILLS))

.PHONY: bench-verify
bench-verify: $(READY)  ## what verifying a state costs, and that changed bits are found: two minutes
	@$(BIN)/python bench/verify.py

.PHONY: bench-goodput
bench-goodput: $(READY)  ## what share of its time a failing job trains, beside torchrun; QUICK=1: four minutes
	@$(BIN)/python bench/goodput.py --out build/bench/goodput.jsonl $(if $(QUICK),--minutes 1)

.PHONY: bench-scale
bench-scale: $(READY)  ## one server and up to 10,000 nodes, beside torchrun's c10d; QUICK=1: up to 1,000
	@$(BIN)/python bench/scale.py --out build/bench/scale.jsonl $(if $(QUICK),--quick)

.PHONY: bench-launch
bench-launch: $(READY)  ## how long until the script runs, and what that costs while idle; QUICK=1: a minute
	@$(BIN)/python bench/launch.py --out build/bench/launch.jsonl $(if $(QUICK),--starts 3 --idle 5)

# To draw and write down without measuring anew: bench/sections.py build/bench/*.jsonl
.PHONY: bench
bench: bench-recovery bench-scale bench-launch  ## measure all three anew, renew their tables in RESULTS.md, and plots
	@$(BIN)/python bench/sections.py build/bench/recovery.jsonl build/bench/scale.jsonl build/bench/launch.jsonl
