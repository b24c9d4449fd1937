# make demo    train a small GPT under DeepSpeed with Spillway's optimizer   (STEPS=, SECONDS=, COMPARE=1)
# make test    every test, those on an emulated Arm included; sets up what it needs
# make lib     the library, the preload library and the command line tool, in target/release
# make install PREFIX=/usr/local
# make dist    libraries and wheels for x86-64 and Arm, in dist/
# make kill    kill a process that steps a tier, at random moments, again and again   (ROUNDS=1000)
# make model   random sequences of calls, signals, stops, kills and attacks on files, against an oracle   (SECONDS=3600)
# make bench   this machine against its own limits, then against torch and DeepSpeed
# make tune    the I/O settings that suit a directory (DIR=.), written where the library reads them
# make soak    eight threads of verified reads and writes for MINUTES=10, and what they leave behind

PREFIX ?= /usr/local
RELEASE = target/release

DIR ?= .
MINUTES ?= 10

.PHONY: demo test quick lib install kill model bench tune soak dist packages

demo: packages
	ffi_tests/deepspeed/demo.sh

test: packages
	ffi_tests/all.sh

# The inner loop: Rust and C, without Python.
quick:
	cargo test

lib:
	cargo build --release --package spillway --package spillway-preload

install: lib
	packaging/install.sh "$(PREFIX)" $(RELEASE)/libspillway.so $(RELEASE)/libspillway_preload.so

ROUNDS ?= 1000
kill:
	SPILLWAY_KILL_ROUNDS=$(ROUNDS) cargo test --test c -- tier_kill
	@cat target/*/c/tier_kill/counts.txt

SECONDS ?= 3600
model: lib packages
	eval "$$(packaging/python_env.sh --export)" && ffi_tests/model/run.sh $(SECONDS)

bench: lib packages
	$(RELEASE)/spillway bench adam
	$(RELEASE)/spillway bench undo
	$(RELEASE)/spillway bench io --dir $(DIR)
	packaging/python_bench.sh adam
	packaging/python_bench.sh io --dir $(DIR)

tune: lib
	$(RELEASE)/spillway tune --dir $(DIR)

soak:
	SPILLWAY_SOAK_SECONDS=$$(($(MINUTES) * 60)) cargo test --test soak -- --nocapture

# Libraries and wheels for x86-64 and Arm, in dist/.
dist: packages
	packaging/dist.sh

packages:
	packaging/system_packages.sh
