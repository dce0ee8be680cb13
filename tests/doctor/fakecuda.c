/* A driver for tests of kvfs doctor and kvfs bench: the calls that kvfs/doctor/gpu_probe.py makes, and their failures.
   FAKE_CUDA: nothing, or one of init=CODE, hang, crash, none, register=CODE, second=CODE, pin=CODE, wrong. */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int current;

static int code_of(const char *what) {
    const char *mode = getenv("FAKE_CUDA");
    size_t n = strlen(what);
    return mode && !strncmp(mode, what, n) && mode[n] == '=' ? atoi(mode + n + 1) : 0;
}
static int is(const char *what) {
    const char *mode = getenv("FAKE_CUDA");
    return mode && !strcmp(mode, what);
}

int cuInit(unsigned flags) { return code_of("init"); }
int cuDriverGetVersion(int *version) { *version = 12040; return 0; }
int cuDeviceGetCount(int *count) { *count = is("none") ? 0 : 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "Fake 9000"); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)80 << 30; return 0; }
int cuDeviceGetPCIBusId(char *name, int size, int device) { snprintf(name, size, "ffff:FF:%02X.0", device); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 1; return 0; }
int cuGetErrorString(int code, const char **text) { *text = "a fake error"; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(intptr_t)(device + 1); return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
int cuCtxSetCurrent(void *context) {
    current = (int)(intptr_t)context - 1;
    if (is("hang"))
        for (;;) pause();
    if (is("crash")) raise(SIGSEGV);
    return 0;
}
int cuMemHostRegister_v2(void *address, size_t size, unsigned flags) {
    if (current == 1 && code_of("second")) return code_of("second");
    if (flags != 9 || (uintptr_t)address % 4096) return 1; /* portable, read-only, of whole pages */
    return code_of("register");
}
int cuMemHostUnregister(void *address) { return 0; }
int cuMemHostAlloc(void **address, size_t size, unsigned flags) {
    if (current == 1 && code_of("pin")) return code_of("pin");
    return (*address = malloc(size)) ? 0 : 2;
}
int cuMemFreeHost(void *address) { free(address); return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuMemAlloc_v2(uint64_t *memory, size_t size) { *memory = (uint64_t)(uintptr_t)malloc(size); return 0; }
int cuMemFree_v2(uint64_t memory) { free((void *)(uintptr_t)memory); return 0; }
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size) { memcpy((void *)(uintptr_t)to, from, size); return 0; }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) {
    memcpy(to, (void *)(uintptr_t)from, size);
    if (is("wrong")) ((char *)to)[size / 2] ^= 1;
    return 0;
}
