# infer: `make help` lists the targets. Variables to override: CC, CFLAGS, NVCC, CUDA_HOME, CUDA_ARCH, PREFIX, DESTDIR.
CC       = gcc
CFLAGS   = -O3 -g
CUDA_HOME ?= /usr/local/cuda
NVCC     = $(or $(shell command -v nvcc 2>/dev/null),$(CUDA_HOME)/bin/nvcc)
PREFIX   = /usr/local
FAST     = $(if $(wildcard fast),$(if $(filter no,$(EXTENSIONS)),no,yes),no)

# The architectures that infer.cu is compiled for: the card's own, or, where there is none, all that matter and PTX for
# later ones. Give another as CUDA_ARCH="sm_89", several as CUDA_ARCH="sm_80 sm_90a". Hopper is sm_90a: wgmma is only there.
CUDA_ARCH ?= $(or $(patsubst sm_90,sm_90a,$(addprefix sm_,$(sort $(subst .,,$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null))))),\
               sm_80 sm_86 sm_89 sm_90a compute_90)

ARCHES = $(foreach a,$(filter sm_%,$(CUDA_ARCH)),-gencode=arch=compute_$(a:sm_%=%),code=$(a)) \
         $(foreach a,$(filter compute_%,$(CUDA_ARCH)),-gencode=arch=$(a),code=$(a))

# A room is a folder that adds something to the core; extensions.c has its rows, extensions.cuh its part on the card.
# EXTENSIONS=no builds the core alone, programs included, below build/core. FAST=no: without fast/.
ROOMS     = $(if $(filter no,$(EXTENSIONS)),,$(wildcard families encodings formats json serve commands terminal gpus \
                                                        $(if $(filter yes,$(FAST)),fast)))

BUILD     = build$(if $(filter no,$(EXTENSIONS)),/core)
HERE      = $(if $(filter no,$(EXTENSIONS)),$(BUILD)/)

# Every object depends on which rooms there are: a file that changes when they do.
ifneq ($(MAKECMDGOALS),clean)
$(shell mkdir -p $(BUILD); echo $(ROOMS) | cmp -s - $(BUILD)/rooms.txt || echo $(ROOMS) >$(BUILD)/rooms.txt)
endif

LIBRARIES = libcjson libpcre2-8 libcurl libcrypto libutf8proc $(if $(filter terminal,$(ROOMS)),libedit) \
            $(if $(filter serve,$(ROOMS)),libmicrohttpd)
PACKAGES  = libcjson-dev libpcre2-dev libedit-dev libcurl4-openssl-dev libssl-dev libutf8proc-dev libmicrohttpd-dev
SOURCES   = base.c tokenizer.c chat.c scheduler.c extensions.c download.c infer.c \
            $(wildcard $(foreach room,$(ROOMS),$(room)/*.c))
REFERENCE = $(SOURCES) tests/reference.c
TESTED    = $(sort $(REFERENCE) $(wildcard commands/random.c))

# Products and sums stay apart (-ffp-contract=off), so that sampling.h draws alike everywhere. Callbacks get more than
# they use, so unused parameters are no warning.
FLAGS     = -std=c11 -D_GNU_SOURCE -ffp-contract=off -Wall -Wextra -Wno-unused-parameter -MMD -MP -I. $(shell pkg-config --cflags $(LIBRARIES) 2>/dev/null) $(addprefix -DROOM_,$(ROOMS))
LIBS      = $(shell pkg-config --libs $(LIBRARIES) 2>/dev/null) -lm -lpthread
# Only fast/ multiplies with cuBLAS.
BLAS      = $(if $(filter fast,$(ROOMS)),-lcublasLt)
SANITIZE  = -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer

ifneq ($(MAKECMDGOALS),help)
ifneq ($(MAKECMDGOALS),clean)
MISSING := $(shell pkg-config --exists $(LIBRARIES) 2>/dev/null || echo yes)
ifeq ($(MISSING),yes)
$(error libraries are missing: sudo apt install pkg-config $(PACKAGES))
endif
endif
endif

# Recipes begin with $(call say,WHAT), which stands for them on the terminal; V=1 shows the commands instead.
say = $(if $(V),,@echo "$(1)";)

# objects of a build below build/, by its name and sources
objects = $(patsubst %.c,$(BUILD)/$(1)/%.o,$(2))

all: $(HERE)infer ## ./infer, which needs the CUDA toolkit and an NVIDIA GPU

$(HERE)infer: $(call objects,cuda,$(SOURCES)) $(BUILD)/cuda/infer.cu.o $(BUILD)/cuda/card.cu.o
	$(call say,link $@)$(NVCC) $(ARCHES) $^ -o $@ $(LIBS) $(BLAS)

$(BUILD)/cuda/%.o: %.c Makefile $(BUILD)/rooms.txt
	@mkdir -p $(@D)
	$(call say,cc $<)$(CC) $(FLAGS) $(CFLAGS) -DBACKEND=cuda -c $< -o $@

$(BUILD)/cuda/%.cu.o: %.cu Makefile $(BUILD)/rooms.txt
	@$(NVCC) --version >/dev/null 2>&1 || { echo "make: no CUDA toolkit: install it (developer.nvidia.com/cuda-downloads), set CUDA_HOME, or 'make reference' for the plain C twin" >&2; exit 1; }
	@mkdir -p $(@D)
	$(call say,nvcc $< for $(strip $(CUDA_ARCH)): minutes)$(NVCC) -std=c++17 -O3 -g -lineinfo --threads 0 $(ARCHES) -DCUDA_ARCHES='"$(strip $(CUDA_ARCH))"' -I. $(shell pkg-config --cflags libcjson) $(addprefix -DROOM_,$(ROOMS)) -MMD -MP -c $< -o $@

test-gpu: $(BUILD)/cuda/gpu $(HERE)infer ## the tests that need a GPU; make test runs them if it is there
	$(BUILD)/cuda/gpu
	python3 tests/run.py $(if $(HERE),--core) --gpu real. gpus.

# __wrap_cudaMalloc makes each allocation fail in turn
$(BUILD)/cuda/gpu: $(call objects,cuda,$(TESTED) tests/gpu.c) $(BUILD)/cuda/infer.cu.o $(BUILD)/cuda/tests/card.cu.o
	$(call say,link $@)$(NVCC) $(ARCHES) -Xlinker --wrap=cudaMalloc $^ -o $@ $(LIBS) $(BLAS)

# The quick ones of these tests without a GPU: infer.cu, card.cu and the rooms' parts, but Hopper's, as C++
# (tests/emulated/).
# sed replaces what only nvcc can read: shared memory without a size, and <<<>>>.
EMULATED_CUH   = extensions.cuh $(wildcard $(addsuffix /*.cuh,$(ROOMS)))
EMULATED_FLAGS = -std=c++17 -O2 -g -fno-strict-aliasing -ffp-contract=off -w -MMD -MP -DCUDA_ARCHES='"emulated"' \
          '-DPIECE_BYTES(bytes)=4096' -DGAP_BYTES=16ul -DMAX_FLOAT_TOKENS=16 -DMAX_PEER_ROWS=100 -I$(BUILD)/emulated -I. -I$(CUDA_HOME)/include $(shell pkg-config --cflags libcjson) $(addprefix -DROOM_,$(ROOMS))
AS_CPP  = -e 's/extern __shared__( __align__\([0-9]+\))? (\w+) (\w+)\[\];/\2 *\3 = (\2 *)emulated::shared;/' \
          -e 's/(\w+|\([^()]*\))<<<(.*)>>>\(/emulated::Launch{\2}(\1, /'
$(BUILD)/emulated/gpu: $(call objects,emulated,$(TESTED) tests/gpu.c) \
                    $(patsubst %,$(BUILD)/emulated/%.o,infer.cu card.cu emulate.cpp)
	$(call say,link $@)$(CXX) -rdynamic -Wl,--wrap=cudaMalloc $^ -o $@ $(LIBS)

# The program with these kernels.
$(BUILD)/emulated/infer: $(call objects,emulated,$(SOURCES)) \
                    $(patsubst %,$(BUILD)/emulated/%.o,infer.cu card.cu emulate.cpp)
	$(call say,link $@)$(CXX) -rdynamic $^ -o $@ $(LIBS)

$(BUILD)/emulated/%.cu.o: $(BUILD)/emulated/%.cu $(addprefix $(BUILD)/emulated/,$(EMULATED_CUH))
	$(call say,c++ $<)$(CXX) $(EMULATED_FLAGS) -include tests/emulated/emulate.h -x c++ -c $< -o $@

$(addprefix $(BUILD)/emulated/,infer.cu card.cu $(EMULATED_CUH)): $(BUILD)/emulated/%: % Makefile
	@mkdir -p $(@D)
	@sed -E $(AS_CPP) $< >$@

$(BUILD)/emulated/emulate.cpp.o: tests/emulated/emulate.cpp Makefile
	@mkdir -p $(@D)
	$(call say,c++ $<)$(CXX) $(EMULATED_FLAGS) -c $< -o $@

$(BUILD)/emulated/%.o: %.c Makefile $(BUILD)/rooms.txt
	@mkdir -p $(@D)
	$(call say,cc $<)$(CC) $(FLAGS) $(CFLAGS) -DBACKEND=cuda -DEMULATED=1 -I$(CUDA_HOME)/include -c $< -o $@

reference: $(HERE)infer-reference ## ./infer-reference, the plain C twin, which needs no CUDA

$(HERE)infer-reference: $(call objects,reference,$(REFERENCE))
	$(call say,link $@)$(CC) $(CFLAGS) $^ -o $@ $(LIBS)

$(BUILD)/reference/unit: $(call objects,reference,$(TESTED) tests/unit.c)
	$(call say,link $@)$(CC) $(CFLAGS) $^ -o $@ $(LIBS)

# test_json.py compares grammars with jsonschema
$(BUILD)/reference/schemas: $(call objects,reference,$(REFERENCE) tests/schemas.c)
	$(call say,link $@)$(CC) $(CFLAGS) $^ -o $@ $(LIBS)

$(BUILD)/reference/%.o: %.c Makefile $(BUILD)/rooms.txt
	@mkdir -p $(@D)
	$(call say,cc $<)$(CC) $(FLAGS) $(CFLAGS) -DBACKEND=reference -c $< -o $@

$(foreach b,cuda reference asan emulated,$(BUILD)/$(b)/serve/http.o): $(wildcard serve/page.html)

asan: $(BUILD)/asan/infer-reference $(BUILD)/asan/unit ## the twin and the unit tests with sanitizers

$(BUILD)/asan/infer-reference: $(call objects,asan,$(REFERENCE))
	$(call say,link $@)$(CC) $(SANITIZE) $^ -o $@ $(LIBS)

$(BUILD)/asan/unit: $(call objects,asan,$(TESTED) tests/unit.c)
	$(call say,link $@)$(CC) $(SANITIZE) $^ -o $@ $(LIBS)

$(BUILD)/asan/tests/reference.o: SANITIZE += -O3 # it computes

$(BUILD)/asan/%.o: %.c Makefile $(BUILD)/rooms.txt
	@mkdir -p $(@D)
	$(call say,cc $<)$(CC) $(FLAGS) $(SANITIZE) -DBACKEND=reference -c $< -o $@

GPU = $(shell nvidia-smi -L 2>/dev/null)
# Without a GPU its tests run emulated. That needs g++, CUDA's headers, and x86-64: the switch of fibers is assembly.
EMULATED = $(and $(if $(GPU),,yes),$(filter x86_64,$(shell uname -m)),$(shell command -v $(CXX)),\
                 $(wildcard $(CUDA_HOME)/include/cublasLt.h),$(wildcard $(CUDA_HOME)/include/crt/host_defines.h))
test: ## builds and runs the tests; TESTS='...': for tests/run.py
	@python3 tests/run.py $(if $(HERE),--core) $(if $(GPU),--gpu) $(if $(EMULATED),--emulated) $(TESTS)

fuzz: $(patsubst tests/fuzz_%.c,$(BUILD)/fuzz/%,$(wildcard tests/fuzz_*.c)) ## each fuzzer for a minute (needs clang)
	python3 tests/run_fuzzers.py

$(BUILD)/fuzz/%: tests/fuzz_%.c $(REFERENCE) $(wildcard *.h tests/*.h serve/*.h serve/page.html) Makefile
	@mkdir -p $(@D)
	$(call say,clang $<)clang $(filter-out -MMD -MP,$(FLAGS)) -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined $(filter %.c,$^) -o $@ $(LIBS)

verify: ## MODEL=DIR: are prompts continued as by OpenAI's code?
	$(if $(MODEL),,$(error make verify MODEL=DIR: where are the weights of gpt-oss-20b?))
	$(MAKE) $(if $(GPU),infer,reference)
	python3 tests/verify.py $(if $(GPU),./infer,./infer-reference) $(MODEL)

install: all ## into DESTDIR and PREFIX, /usr/local
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/share/man/man1
	install -m 755 $(HERE)infer $(DESTDIR)$(PREFIX)/bin/
	$(if $(wildcard commands/infer.1),install -m 644 commands/infer.1 $(DESTDIR)$(PREFIX)/share/man/man1/)

COUNTED = $(wildcard *.c *.h *.cu *.cuh $(foreach room,$(ROOMS),$(room)/*.[ch] $(room)/*.cuh))
FORMATTED = $(COUNTED) $(wildcard tests/*.[ch] tests/emulated/*)
format: ## clang-format
	clang-format -i $(FORMATTED)
check-format: ## is it needed?
	@clang-format --dry-run -Werror $(FORMATTED) || { echo "make format changes that"; exit 1; }

NOTEBOOKS = $(wildcard notebooks/*.ipynb)
LESSON_PACKAGES = python3-torch python3-matplotlib jupyter-nbconvert python3-ipykernel python3-markdown
lesson-packages:
	@jupyter nbconvert --version >/dev/null 2>&1 && command -v markdown_py >/dev/null || { \
	    echo "make: for the notebooks: sudo apt install --no-install-recommends $(LESSON_PACKAGES)" >&2; exit 1; }
notebooks: reference lesson-packages ## executes the notebooks, below build/notebooks
	PYDEVD_DISABLE_FILE_VALIDATION=1 jupyter nbconvert --to notebook --execute --output-dir build/notebooks $(NOTEBOOKS)

STYLE = body{max-width:60em;margin:2em auto;padding:0 1em;font:16px/1.5 sans-serif} td,th{padding:.2em .7em;text-align:left} \
        pre,code{background:\#f3f6f9} pre{padding:.7em;overflow-x:auto} table{border-collapse:collapse} tr{border-bottom:1px solid \#ccd4dc}
docs: lesson-packages ## renders README and the notebooks, below build/docs
	@mkdir -p build/docs/notebooks
	python3 notebooks/block.py >build/docs/notebooks/block.svg
	{ echo '<!doctype html><meta charset="utf-8"><title>infer</title><style>$(STYLE)</style>'; \
	  markdown_py -x tables -x fenced_code README.md; } >build/docs/README.html
	jupyter nbconvert --to html --output-dir build/docs/notebooks $(NOTEBOOKS)

# Three rings: what a learner reads first, the core, everything. Deleting is welcome; whoever needs more raises the ring here.
LEARNER     = $(wildcard infer.h infer.c tokenizer.c sampling.h infer.cu)
ROOT        = $(wildcard *.c *.h *.cu *.cuh)
MAX_LEARNER = 4455
MAX_ROOT    = 9280
MAX_LINES   = 24878
MAX_ENTRIES = 36
count: ## lines of each file
	@wc -l $(COUNTED) | sort -n
budget: ## do the sources keep the rules of size?
	@ring() { lines=$$(cat $$3 | wc -l); echo "$$1: $$lines lines of $$2"; [ $$lines -le $$2 ] || { \
	    echo "$$((lines - $$2)) lines too many: something has to go"; exit 1; } }; \
	    ring "a learner's path" $(MAX_LEARNER) "$(LEARNER)" && ring "the core, $(words $(ROOT)) sources" $(MAX_ROOT) "$(ROOT)" && \
	    ring all $(MAX_LINES) "$(COUNTED)"
	@entries=$$(git ls-files 2>/dev/null | cut -d/ -f1 | sort -u | wc -l); [ $$entries -le $(MAX_ENTRIES) ] || { \
	    echo "$$entries entries at the top are more than $(MAX_ENTRIES)"; exit 1; }
	@! LC_ALL=C.UTF-8 grep -nE '.{121}' $(COUNTED)
	@awk '/[{]$$/ && !begin && !/^(namespace|extern)/ { begin = FNR } /^}$$/ && begin && FNR - begin >= 100 { long = 1; \
	    print FILENAME ":" begin ": " FNR - begin + 1 " lines; 100 at most" } /^}/ { begin = 0 } END { exit long }' $(COUNTED)
	@! grep -nE '#include "($(subst $(eval ) ,|,$(ROOMS) fast))/' $(filter-out extensions.%,$(ROOT)) || { \
	    echo "only extensions.c and extensions.cuh may include a room"; exit 1; }

# The rest of the tree without one room, in build/rooms: it must build and pass its quick tests. The card's part of the
# program differs only without a room that has one: then it is built with nvcc, too, and its kernels run.
AWAY = $(sort $(ROOMS) fast)
rooms: ## tests without each room in turn, half an hour; AWAY=ROOM: one
	@for room in $(AWAY); do \
	    echo "== without $$room/"; rm -rf build/rooms; mkdir -p build/rooms; kernels=; \
	    git ls-files | grep -v "^$$room/" | tar c -T - | tar x -C build/rooms || exit 1; \
	    ls $$room/*.cuh >/dev/null 2>&1 || kernels="GPU= EMULATED="; \
	    if [ -z "$$kernels" ] && $(NVCC) --version >/dev/null 2>&1; then \
	        $(MAKE) -C build/rooms CUDA_ARCH=sm_90a infer || exit 1; fi; \
	    $(MAKE) -C build/rooms $$kernels test TESTS=--quick || exit 1; done

check: check-format budget test notebooks ## format, size, tests, notebooks

clean: ## removes what was built
	rm -rf build infer infer-reference

help: ## this list; V=1 shows the commands that make runs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

.PHONY: all reference asan test test-gpu fuzz verify install format check-format lesson-packages notebooks docs count \
        budget rooms check clean help
-include $(wildcard $(BUILD)/*/*.d $(BUILD)/*/*/*.d)
