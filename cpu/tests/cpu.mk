# Tests of the CPU library without Python: cpu-test, and cpu-tsan, cpu-asan under the sanitizers. Included by the top Makefile.
# The fuzzer is part of cpu-test under the sanitizers, without which it sees little. cpu-test-arm runs all but the fuzzer in an
# emulated AArch64 CPU, with every kernel table that is built for Arm.
# Each build lives in build/cpu/<kind>/; only the units of an instruction set are compiled with that set's flags.

CPU_DIR := $(patsubst %/tests/cpu.mk,%,$(lastword $(MAKEFILE_LIST)))
CPU_BUILD := build/cpu
CPU_LIB := $(filter-out ffi module,$(basename $(notdir $(wildcard $(CPU_DIR)/src/*.cc))))
CPU_TESTS := $(basename $(notdir $(wildcard $(CPU_DIR)/tests/test_*.cc)))
CPU_MODELS := amx_model amx_model_avx512
CPU_FLAGS := -std=c++17 -Wall -Wextra -fno-math-errno -fno-trapping-math -ffp-contract=fast -I$(CPU_DIR)/include -I$(CPU_DIR)/src -pthread -MMD -MP
CPU_MACHINE := $(patsubst arm64,aarch64,$(patsubst amd64,x86_64,$(shell uname -m)))
CPU_AVX512 := -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512

CPU_KIND_FLAGS_release := -O3
CPU_KIND_FLAGS_tsan := -O1 -g1 -fsanitize=thread
CPU_KIND_FLAGS_asan := -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
# Cross-compiled; linked statically, so that the emulator needs no folder of Arm libraries.
CPU_KIND_FLAGS_aarch64 := -O3 -static
CPU_KIND_CXX_aarch64 := aarch64-linux-gnu-g++
CPU_KIND_MACHINE_aarch64 := aarch64

CPU_ISA_FLAGS_x86_64_isa_generic := -O1
CPU_ISA_FLAGS_x86_64_isa_avx2 := -mavx2 -mfma -mf16c
CPU_ISA_FLAGS_x86_64_isa_avx512 := $(CPU_AVX512)
CPU_ISA_FLAGS_x86_64_isa_avx512bf16 := $(CPU_AVX512) -mavx512bf16
CPU_ISA_FLAGS_x86_64_isa_amx := $(CPU_AVX512) -mavx512bf16 -mamx-tile -mamx-bf16
CPU_ISA_FLAGS_x86_64_amx_model_avx512 := $(CPU_AVX512) -mavx512bf16
CPU_ISA_FLAGS_aarch64_isa_neonbf16 := -march=armv8.2-a+bf16

# Units that run once per program, which setup.py optimizes less too.
CPU_COLD := executor plan_strips plan_vector program program_check

# Tests that are linked by a rule of their own, below.
CPU_OWN_asan := test_fuzz

# Of a kind of build: its compiler, and how it compiles a unit.
CPU_CXX = $(or $(CPU_KIND_CXX_$(1)),$(CXX))
CPU_COMPILE = $(CPU_CXX) $(CPU_FLAGS) $(CPU_KIND_FLAGS_$(1)) $(CPU_ISA_FLAGS_$(or $(CPU_KIND_MACHINE_$(1)),$(CPU_MACHINE))_$(2)) $(if $(filter $(2),$(CPU_COLD)),-O1)

# The object that the extension's build has kept of a unit (setup.py): release is tested with what is shipped.
CPU_FOUND = $(if $(and $(filter release,$(1)),$(KERNEL_OBJECTS)),$(wildcard $(KERNEL_OBJECTS)/$(2)-*.o))
CPU_KEPT = $(if $(filter 1,$(words $(CPU_FOUND))),$(CPU_FOUND))
CPU_DEPENDS = $(filter-out -MMD,$(CPU_COMPILE)) -MM

define CPU_KIND_RULES
$(CPU_BUILD)/$(1)/%.o: $(CPU_DIR)/src/%.cc
	@mkdir -p $$(@D)
	$$(if $$(call CPU_KEPT,$(1),$$*),\
	  $$(call CPU_DEPENDS,$(1),$$*) -MT $$@ -MF $$(@:.o=.d) $$< && cp $$(call CPU_KEPT,$(1),$$*) $$@,\
	  $$(call CPU_COMPILE,$(1),$$*) -c $$< -o $$@)
$(CPU_BUILD)/$(1)/%.o: $(CPU_DIR)/tests/%.cc
	@mkdir -p $$(@D)
	$$(filter-out -O3,$$(call CPU_COMPILE,$(1),$$*)) -O1 -c $$< -o $$@
$(patsubst %,$(CPU_BUILD)/$(1)/%,$(filter-out $(CPU_OWN_$(1)),$(CPU_TESTS))): %: %.o $(CPU_LIB:%=$(CPU_BUILD)/$(1)/%.o) $(CPU_MODELS:%=$(CPU_BUILD)/$(1)/%.o)
	$$(call CPU_CXX,$(1)) $$(CPU_KIND_FLAGS_$(1)) -pthread $$^ -o $$@
endef
$(foreach kind,release tsan asan aarch64,$(eval $(call CPU_KIND_RULES,$(kind))))
-include $(wildcard $(CPU_BUILD)/*/*.d)
.PRECIOUS: $(CPU_BUILD)/%.o

# The fuzzer runs the best table that this CPU has. The units that this table calls nothing of are taken from release, for which the
# extension's build has kept them (each takes a minute of a compiler under the sanitizers); it refuses to run on a table that the
# sanitizers do not see.
CPU_HAS := $(shell sed -n '/^flags/{p;q}' /proc/cpuinfo 2>/dev/null)
CPU_HAS_ALL = $(filter $(words $(1)),$(words $(filter $(1),$(CPU_HAS))))
ifneq ($(call CPU_HAS_ALL,avx512f avx512bw avx512dq avx512vl avx512_bf16),)
CPU_UNSEEN := isa_avx2 isa_generic $(if $(call CPU_HAS_ALL,amx_tile amx_bf16),,isa_amx)
else ifneq ($(call CPU_HAS_ALL,avx512f avx512bw avx512dq avx512vl),)
CPU_UNSEEN := isa_avx2 isa_generic isa_avx512bf16 isa_amx
else ifneq ($(call CPU_HAS_ALL,avx2 fma f16c),)
CPU_UNSEEN := isa_generic isa_avx512 isa_avx512bf16 isa_amx
endif
CPU_SEEN := $(filter-out $(CPU_UNSEEN),$(filter isa_%,$(CPU_LIB)) $(filter-out isa_%,$(CPU_LIB))) # the longest first
$(CPU_BUILD)/asan/test_fuzz: $(CPU_BUILD)/asan/test_fuzz.o $(CPU_SEEN:%=$(CPU_BUILD)/asan/%.o) $(CPU_UNSEEN:%=$(CPU_BUILD)/release/%.o)
	$(call CPU_CXX,asan) $(CPU_KIND_FLAGS_asan) -pthread $^ -o $@
$(CPU_BUILD)/asan/test_fuzz.o: private CPU_FLAGS += -DKITSUNE_UNSEEN='"$(CPU_UNSEEN)"'

CPU_ASAN := ASAN_OPTIONS=allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1

.PHONY: cpu-test cpu-tsan cpu-asan cpu-test-arm cpu-arm
# Each is a target of its own, so that `make -j` runs tests while others are compiled; the fuzzer is first, which takes longest.
CPU_RUNS := $(CPU_BUILD)/asan/test_fuzz $(patsubst %,$(CPU_BUILD)/release/%,$(filter-out test_fuzz,$(CPU_TESTS)))
.PHONY: $(CPU_RUNS:%=run/%)
cpu-test: $(CPU_RUNS:%=run/%)
$(CPU_RUNS:%=run/%): run/%: %
	@out=$$($(CPU_ASAN) $< 2>&1); status=$$?; printf '== %s\n%s\n' $< "$$out"; exit $$status
cpu-tsan: $(CPU_TESTS:%=$(CPU_BUILD)/tsan/%)
	@set -e; for t in $^; do echo "== $$t"; TSAN_OPTIONS=halt_on_error=1 $$t; done
cpu-asan: $(CPU_TESTS:%=$(CPU_BUILD)/asan/%)
	@set -e; for t in $^; do echo "== $$t"; $(CPU_ASAN) $$t; done

# An emulated CPU has no speed worth a number: this tests values and the choice of a table, on one that has the bf16 instructions and
# on one that lacks them. The Python tests run the parts: cpu-arm, then CPU_QEMU with the test at hand.
CPU_QEMU := qemu-aarch64
CPU_ARM_TESTS := $(patsubst %,$(CPU_BUILD)/aarch64/%,$(filter-out test_fuzz,$(CPU_TESTS)))
cpu-test-arm: cpu-arm
	@set -e; run() { echo "== $$*"; $(CPU_QEMU) "$$@"; }; \
	for t in $(CPU_ARM_TESTS); do run -cpu max $$t; done; \
	for isa in neon generic; do run -cpu max $(CPU_BUILD)/aarch64/test_executor $$isa; done; \
	run -cpu cortex-a72 $(CPU_BUILD)/aarch64/test_kernels; run -cpu cortex-a72 $(CPU_BUILD)/aarch64/test_executor; \
	expect() { got=$$($(CPU_QEMU) -cpu $$1 $(CPU_BUILD)/aarch64/test_kernels --tables); echo "== tables on $$1: $$got"; [ "$$got" = "$$2" ]; }; \
	expect max "neonbf16 neon generic"; expect cortex-a72 "neon generic"
cpu-arm: $(CPU_BUILD)/aarch64/.tools
	@$(MAKE) --no-print-directory $(CPU_ARM_TESTS)
$(CPU_BUILD)/aarch64/.tools:
	@missing=; command -v $(CPU_KIND_CXX_aarch64) >/dev/null || missing="g++-aarch64-linux-gnu"; \
	command -v $(CPU_QEMU) >/dev/null || missing="$$missing qemu-user"; \
	if [ -n "$$missing" ]; then echo "the Arm tests need these Debian packages: $$missing" >&2; exit 1; fi
	@mkdir -p $(@D) && touch $@
