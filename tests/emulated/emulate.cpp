/* emulate.cpp: what card.cu calls of CUDA's runtime and of cuBLAS, for emulate.h's card. */
#include "emulate.h"

#include <atomic>
#include <condition_variable>
#include <dlfcn.h>
#include <mutex>
#include <pthread.h>

/* Saves the registers that a call keeps, and goes on with another stack (System V ABI for x86-64). */
__asm__(".globl emulated_switch\nemulated_switch:\n"
        "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\nmov %rsp,(%rdi)\n"
        "mov %rsi,%rsp\npop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");

/* A thread's stack has the shared variables of all kernels in it, too: more than the server's threads ask for. */
extern "C" int pthread_attr_setstacksize(pthread_attr_t *a, size_t n) noexcept {
    static const auto set = (decltype(&pthread_attr_setstacksize))dlsym(RTLD_NEXT, "pthread_attr_setstacksize");
    return set(a, n + ((size_t)4 << 20));
}

using emulated::finish;
using emulated::submit;
using emulated::Work;

enum { DEVICES = 8 };
extern "C" {
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char *cudaGetErrorString(cudaError_t) { return "an error of the emulated GPU"; }
cudaError_t cudaGetDeviceCount(int *n) { return *n = DEVICES, cudaSuccess; }
static thread_local int device; /* this thread's */
cudaError_t cudaSetDevice(int number) { return device = number, cudaSuccess; }
int emulated_dead = -1; /* a card that does nothing any more */
bool emulated_lives() { return device != emulated_dead; }
int emulated_peers = 1; /* do cards reach each other's memory */
cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) { return *can = emulated_peers, cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int) {
    *p = {};
    strcpy(p->name, "this computer");
    p->major = 8, p->multiProcessorCount = 4, p->sharedMemPerBlockOptin = 227 << 10;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *v) { return *v = 13000, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *v) { return *v = 13000, cudaSuccess; }
size_t emulated_memory = (size_t)4 << 30; /* bytes of a card */
static std::atomic<size_t> taken[DEVICES];
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    *total = emulated_memory, *free = *total - taken[device];
    return cudaSuccess;
}
/* The size of each allocation, and its card, lie in front of it. */
cudaError_t cudaMalloc(void **p, size_t n) {
    size_t *all = (size_t *)aligned_alloc(1024, (n + 2047) / 1024 * 1024);
    if (!all) return cudaErrorMemoryAllocation;
    taken[device] += all[0] = n, all[1] = (size_t)device;
    return *p = (char *)all + 1024, cudaSuccess;
}
cudaError_t cudaFree(void *p) {
    size_t *all = p ? (size_t *)((char *)p - 1024) : NULL;
    finish();
    if (all) taken[all[1]] -= all[0];
    return free(all), cudaSuccess;
}
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned) {
    return *p = aligned_alloc(64, (n + 63) / 64 * 64), cudaSuccess;
}
cudaError_t cudaFreeHost(void *p) { return finish(), free(p), cudaSuccess; }
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, cudaMemcpyKind) {
    return finish(), memcpy(to, from, n), cudaSuccess;
}
cudaError_t cudaMemset(void *to, int x, size_t n) { return finish(), memset(to, x, n), cudaSuccess; }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, cudaMemcpyKind, cudaStream_t) {
    return submit([=] { memcpy(to, from, n); }), cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned) { return *s = (cudaStream_t)malloc(1), cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t s) { return finish(), free(s), cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return finish(), emulated_lives() ? cudaSuccess : cudaErrorUnknown; }
cudaError_t cudaDeviceSynchronize() { return finish(), cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t *e) { return *e = (cudaEvent_t)malloc(1), cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t e) { return free(e), cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return finish(), emulated_lives() ? cudaSuccess : cudaErrorUnknown; }
cudaError_t cudaEventQuery(cudaEvent_t) { return finish(), cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t, cudaEvent_t) { return *ms = 1, cudaSuccess; }

cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
    return emulated::recorded = new Work, cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *g) {
    *g = (cudaGraph_t)emulated::recorded;
    return emulated::recorded = NULL, cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *made, cudaGraph_t g, unsigned long long) {
    return *made = (cudaGraphExec_t) new Work(*(Work *)g), cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t made, cudaStream_t) {
    for (auto &work : *(Work *)made) submit(work);
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t g) { return delete (Work *)g, cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t made) { return delete (Work *)made, cudaSuccess; }

/* ---- cuBLAS: y (n, rows) = x (n, cols) W^T + bias, as multiply_blas() calls it ---- */

namespace {
struct Layout {
    uint64_t type, rows, cols, pitch;
};
struct Product {
    const float *bias;
};
} // namespace
cublasStatus_t cublasLtCreate(cublasLtHandle_t *h) { return *h = (cublasLtHandle_t)malloc(1), CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t h) { return free(h), CUBLAS_STATUS_SUCCESS; }
const char *cublasLtGetStatusString(cublasStatus_t) { return "an error"; }
cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t l, size_t, cudaDataType type, uint64_t rows,
                                                 uint64_t cols, int64_t pitch) {
    return *(Layout *)l = {(uint64_t)type, rows, cols, (uint64_t)pitch}, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t d, size_t, cublasComputeType_t, cudaDataType_t) {
    return *(Product *)d = {}, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t what,
                                              const void *value, size_t) {
    if (what == CUBLASLT_MATMUL_DESC_BIAS_POINTER) memcpy(d, value, sizeof(void *));
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t, size_t) {
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t,
                                                    const void *, size_t) {
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t, int, cublasLtMatmulHeuristicResult_t[],
                                              int *n) {
    return *n = 1, CUBLAS_STATUS_SUCCESS;
}
static float element(const void *p, uint64_t type, size_t i) {
    if (type == CUDA_R_32F) return ((const float *)p)[i];
    return type == CUDA_R_16F ? __half2float(((const __half *)p)[i]) : __bfloat162float(((const __nv_bfloat16 *)p)[i]);
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t product, const void *, const void *w,
                              cublasLtMatrixLayout_t w_layout, const void *x, cublasLtMatrixLayout_t x_layout,
                              const void *beta, const void *, cublasLtMatrixLayout_t, void *y,
                              cublasLtMatrixLayout_t y_layout, const cublasLtMatmulAlgo_t *, void *, size_t,
                              cudaStream_t) {
    const Layout W = *(Layout *)w_layout, X = *(Layout *)x_layout, Y = *(Layout *)y_layout;
    const float *bias = ((Product *)product)->bias;
    const bool add = *(const float *)beta != 0;
    submit([=] {
        for (size_t t = 0; t < Y.cols; t++)
            for (size_t r = 0; r < Y.rows; r++) {
                float sum = bias ? bias[r] : 0;
                for (size_t c = 0; c < W.rows; c++)
                    sum += element(w, W.type, r * W.pitch + c) * element(x, X.type, t * X.pitch + c);
                if (add) sum += element(y, Y.type, t * Y.pitch + r);
                if (Y.type == CUDA_R_32F)
                    ((float *)y)[t * Y.pitch + r] = sum;
                else
                    ((__nv_bfloat16 *)y)[t * Y.pitch + r] = __float2bfloat16(sum);
            }
    });
    return CUBLAS_STATUS_SUCCESS;
}
}

/* ---- NCCL: each card brings its values, and waits until all have ---- */

static std::mutex meeting;
static std::condition_variable all_here;
static std::vector<const float *> brought;
static int taken_away;
extern "C" {
int ncclGetVersion(int *v) { return *v = 0, 0; }
const char *ncclGetErrorString(int) { return "an error"; }
int ncclCommInitAll(void **comm, int n, const int *) {
    for (int i = 0; i < n; i++) comm[i] = new std::array<int, 2>{i, n};
    return 0;
}
int ncclCommDestroy(void *comm) { return delete (std::array<int, 2> *)comm, 0; }
int ncclAllReduce(const void *from, void *to, size_t n, int, int, void *comm, cudaStream_t) {
    const auto [mine, cards] = *(std::array<int, 2> *)comm;
    submit([=, mine = mine, cards = cards] {
        std::vector<float> sum(n), own((const float *)from, (const float *)from + n);
        std::unique_lock<std::mutex> hold(meeting);
        all_here.wait(hold, [&] { return !taken_away; }); /* all have left the last one */
        brought.resize(cards, NULL), brought[mine] = own.data();
        all_here.notify_all();
        all_here.wait(hold, [&] { return taken_away || std::count(brought.begin(), brought.end(), nullptr) == 0; });
        for (const float *x : brought)
            for (size_t i = 0; i < n; i++) sum[i] += x[i];
        memcpy(to, sum.data(), n * sizeof(float));
        if (++taken_away == cards) brought.clear(), taken_away = 0;
        all_here.notify_all();
        all_here.wait(hold, [&] { return !taken_away; }); /* they still read `own` */
    });
    return 0;
}
}
