/* doctor.c: what is wrong with this machine: GPU, driver, cache, token and network, each with its cure. */
#include "host.h"

#include <stdlib.h>
#include <unistd.h>

/* Prints a finding and frees its text. cure NULL: nothing is wrong. status: the code of the first fault. */
static void finding(int *status, const char *what, int code, const char *cure, char *text) {
    LocalText name = text_print("%s %-8s", cure ? "✗" : "✓", what);
    LocalText line = text_print("%s%s%s", text, cure ? ": " : "", cure ? cure : "");
    print_row(stdout, name, 10, line);
    if (cure && !*status) *status = code;
    free(text);
}

static int run_doctor(const char *model) {
    int status = DONE;
    Devices v = {0};
    backend->describe(&v); /* runtime 0: a build without CUDA, which needs no GPU */
    if (!v.gpus)
        finding(&status, "GPU", NO_GPU,
                v.runtime ? "install or update NVIDIA's driver: nvidia-smi has to show one" : NULL,
                text_print("none (%s)", v.problem));
    for (int i = 0; i < v.gpus; i++) {
        LocalText cure = text_print("this build has no code for it, make clean && make CUDA_ARCH=sm_%d%d%s",
                                    v.gpu[i].major, v.gpu[i].minor, v.gpu[i].major == 9 ? "a" : "");
        LocalText links = text_print(", reaches the memory of %d others", v.gpu[i].peers);
        finding(&status, "GPU", NO_GPU, v.gpu[i].usable ? NULL : cure,
                text_print("%d: %s, compute capability %d.%d, %s of %s free%s", i, v.gpu[i].name, v.gpu[i].major,
                           v.gpu[i].minor, SIZE(v.gpu[i].free), SIZE(v.gpu[i].total), v.gpus == 1 ? "" : links));
    }
    if (v.gpus > 1)
        finding(&status, "NCCL", 0, NULL,
                v.nccl
                    ? text_print("%d.%d.%d", v.nccl / 10000, v.nccl / 100 % 100, v.nccl % 100)
                    : text_print(
                          "none: GPUs without peer access need it, and three or more are faster with it (libnccl2)"));
    if (v.driver)
        finding(&status, "CUDA", 0, NULL,
                text_print("driver for %d.%d, built with toolkit %d.%d for %s", v.driver / 1000, v.driver % 1000 / 10,
                           v.runtime / 1000, v.runtime % 1000 / 10, v.built));

    LocalText cache = hub_cache();
    LocalText there = NULL;
    const uint64_t room = hub_room(&there);
    LocalText inside = text_print("%s/.", there); /* it may be a file */
    finding(&status, "cache", NO_NETWORK,
            access(inside, W_OK) ? "it cannot be written; choose another place with HF_HOME" : NULL,
            text_print("%s, %s free", cache, SIZE(room)));

    char token[300] = "not checked", answer[400] = "not tried";
    Error e = {0};
    bool answers = hub_check(token, answer, &e);
    finding(&status, "token", 0, NULL, text_print("%s", token));
    finding(&status, "network", e.code, answers ? NULL : e.text, text_print("%s", answer));

    return status;
}

const Command doctor = {
    "doctor", "", "GPU, driver, cache, token, network: what is wrong, and its cure", {NULL}, run_doctor};
