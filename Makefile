# `make help` prints the text after ## of each target.

PREFIX ?= /usr/local
RELEASE = $(or $(CARGO_TARGET_DIR),target)/release

DIR ?= .
DIST ?=
FS ?= all
K ?=
MINUTES ?= 10
ROUNDS ?= 1000
SECONDS ?= 3600

.PHONY: help demo test test-long quick py py-light lib install dist docs bench tune soak kill model numa pfs packages packages-test

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

demo: ## train a small GPT under DeepSpeed with Spillway's optimizer (STEPS=, NVME=, COMPARE=)
	packaging/system_packages.sh --demo
	ffi_tests/deepspeed/demo.sh

test: packages ## every test, on an emulated Arm too, the longest with a sample of their cases; installs what it needs
	ffi_tests/all.sh

test-long: packages ## every test with all of its cases
	SPILLWAY_TEST_LONG=1 ffi_tests/all.sh

quick: ## the inner loop: format, unit tests, tidy, ABI, kernels and some C programs, in a minute
	ffi_tests/quick.sh

py: ## one Python test file: make py T=ffi_tests/deepspeed/test_rollback.py K=changed
	@[ -n "$(T)" ] || { echo "usage: make py T=FILE [K=NAME]" >&2; exit 2; }
	packaging/python_tests.sh --only $(T) $(if $(K),-k '$(K)')

py-light: ## one Python test file that needs numpy alone, on a library that was built: make py-light T=FILE [K=NAME]
	@[ -n "$(T)" ] || { echo "usage: make py-light T=FILE [K=NAME]" >&2; exit 2; }
	packaging/python_light.sh $(T) $(if $(K),-k '$(K)')

# All of them include object stores, as the archives and the wheels of `make dist` do.
lib: ## the library, the preload library and the command line tool, in target/release
	cargo build --release --package spillway --package spillway-cli --package spillway-preload --features spillway/s3

install: lib ## libraries, headers and the command line tool below PREFIX=/usr/local
	packaging/install.sh "$(PREFIX)" $(RELEASE)/libspillway.so $(RELEASE)/libspillway_preload.so $(RELEASE)/spillway

dist: packages ## wheels, archives and Debian packages for x86-64 and Arm, and the sdist, in dist/
	packaging/dist.sh

# rustdoc warnings are errors.
docs: ## the documentation site, in docs/_build/html
	$$(packaging/docs_env.sh) -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo "docs: docs/_build/html/index.html"

bench: lib packages ## this machine against its own limits, then against torch and DeepSpeed
	packaging/python_bench.sh adam
	packaging/python_bench.sh undo
	packaging/python_bench.sh io --dir $(DIR)

tune: lib ## find the best I/O settings for DIR=. and save them where the library reads them
	$(RELEASE)/spillway tune --dir $(DIR)

soak: ## eight threads of verified reads and writes for MINUTES=10; fails if memory or files grow
	SPILLWAY_SOAK_SECONDS=$$(($(MINUTES) * 60)) cargo test --test soak -- --nocapture

kill: ## kill a process that steps a tier, or writes an arena, at random moments, ROUNDS=1000 times
	SPILLWAY_KILL_ROUNDS=$(ROUNDS) cargo test --test c -- tier_kill arena_kill
	@cat target/*/c/tier_kill/counts.txt target/*/c/arena_kill/counts.txt

model: lib packages ## random sequences of calls, signals, kills and attacks on files, against an oracle (SECONDS=3600)
	eval "$$(packaging/python_env.sh --export)" && ffi_tests/model/run.sh $(SECONDS)

numa: lib ## bound memory and workers in a virtual machine with three NUMA nodes; installs qemu
	ffi_tests/numa/run.sh $(RELEASE)/libspillway.so

pfs: lib packages ## tiers on GlusterFS, sshfs, NFS, XFS, btrfs, MooseFS, CephFS and 4 KiB sectors, where they can be set up (FS=xfs,sshfs); installs them
	ffi_tests/pfs/run.sh --install $(FS)

packages: ## install the system packages that tests and demo need
	packaging/system_packages.sh

packages-test: packages ## build the packages of this machine, and use them in a root without a compiler (DIST=folder of make dist)
	ffi_tests/packages/run.sh $(DIST)
